// A conversation is a tree of messages. What is shown is the path from the root to `leaf`; an edit
// or another answer is a branch beside the old one. Nothing here knows the page or the network.
//
// talk: {id, title, system, model, made, changed, nodes: {id: node}, leaf}; model: the name of the
//   one that was chosen for it, of a server that has several
// node: {id, parent, role, content, state, at, ...}; of an assistant also reasoning, calls,
//   tokens, timings, finish, error, warning; of a user also files: [{name, text}], pictures:
//   [{id, name, alt, width, height}] and sounds: [{id, name, seconds}]. state: "writing", "done",
//   "stopped" or "broken".

// crypto.randomUUID is missing where the page comes over plain HTTP from another machine.
export const newId = () =>
  Array.from(crypto.getRandomValues(new Uint8Array(12)), (b) =>
    b.toString(16).padStart(2, "0"),
  ).join("");

export function newTalk(system = "", model = "") {
  const now = Date.now();
  const fresh = { id: newId(), title: "", system, model, made: now, changed: now };
  return { ...fresh, nodes: {}, leaf: null };
}

// Adds a message behind `parent` (null: a first one) and shows it.
export function add(talk, parent, fields) {
  const node = { id: newId(), parent, content: "", state: "done", at: Date.now(), ...fields };
  talk.nodes[node.id] = node;
  talk.leaf = node.id;
  talk.changed = node.at;
  if (!talk.title && node.role === "user") talk.title = titleOf(node);
  return node;
}

function titleOf(node) {
  const attached = node.files?.[0]?.name || node.pictures?.[0]?.alt || node.sounds?.[0]?.name;
  const line = (node.content || attached || "").trim().split("\n")[0];
  return line.length > 60 ? `${line.slice(0, 59)}…` : line;
}

// Messages from the first to `leaf`.
export function path(talk, leaf = talk.leaf) {
  const found = [];
  for (let node = talk.nodes[leaf]; node; node = talk.nodes[node.parent]) found.unshift(node);
  return found;
}

// A message and those that stand in its place, by age.
export function siblings(talk, node) {
  return Object.values(talk.nodes)
    .filter((each) => each.parent === node.parent)
    .sort((a, b) => a.at - b.at);
}

// The end of the youngest branch behind a message.
export function tip(talk, node) {
  const children = Object.values(talk.nodes).filter((each) => each.parent === node.id);
  if (!children.length) return node.id;
  return tip(
    talk,
    children.reduce((a, b) => (b.at >= a.at ? b : a)),
  );
}

// The calls of a message that is shown whose results are still to be given.
export function unanswered(talk, node) {
  if (!node.calls?.length) return [];
  const shown = path(talk);
  const rest = shown.slice(shown.indexOf(node) + 1);
  if (rest.some(({ role }) => role !== "tool")) return [];
  return node.calls.filter(({ id }) => !rest.some(({ callId }) => callId === id));
}

// Takes a message away, with all that follows it.
export function remove(talk, node) {
  const others = siblings(talk, node).filter((each) => each !== node);
  const gone = [node.id];
  for (let i = 0; i < gone.length; i++) {
    for (const each of Object.values(talk.nodes)) if (each.parent === gone[i]) gone.push(each.id);
  }
  for (const id of gone) delete talk.nodes[id];
  talk.leaf = others.length ? tip(talk, others.at(-1)) : node.parent;
  talk.changed = Date.now();
}

// A message's text with its files, each in a fence that is longer than any in it.
export function written(node) {
  const files = (node.files ?? []).map(({ name, text }) => {
    const longest = Math.max(2, ...(text.match(/`+/g) ?? []).map((run) => run.length));
    const fence = "`".repeat(longest + 1);
    return `${name}:\n${fence}\n${text}\n${fence}`;
  });
  return [...files, node.content].filter(Boolean).join("\n\n");
}

// A message as /v1/chat/completions takes it: a text, or its pictures, its sounds and then the
// text. `urls` has the data: URL of each of them by its id.
function content(node, urls) {
  const said = written(node);
  const urlOf = ({ id, name }, what) => {
    if (!urls.has(id))
      throw new Error(`${name}: this browser no longer has this ${what}: delete its message`);
    return urls.get(id);
  };
  const seen = (node.pictures ?? []).map((each) => ({
    type: "image_url",
    image_url: { url: urlOf(each, "picture") },
  }));
  const heard = (node.sounds ?? []).map((each) => {
    const data = urlOf(each, "sound").split(",")[1];
    return { type: "input_audio", input_audio: { data, format: "wav" } };
  });
  const parts = [...seen, ...heard];
  if (!parts.length) return said;
  return said ? [...parts, { type: "text", text: said }] : parts;
}

// The messages up to `leaf`, as /v1/chat/completions takes them. `urls` is as in `content`; with
// `preserve` the model reads the reasoning of all answers again.
export function messages(talk, leaf, urls, preserve = false) {
  const said = talk.system.trim() ? [{ role: "system", content: talk.system }] : [];
  for (const node of path(talk, leaf)) {
    const message = { role: node.role, content: content(node, urls) };
    if (node.role === "assistant" && node.calls?.length) {
      message.tool_calls = node.calls.map(({ id, name, arguments: given }) => ({
        id,
        type: "function",
        function: { name, arguments: given },
      }));
    }
    const goesOn = node.id === leaf;
    if ((goesOn || preserve) && node.role === "assistant" && node.reasoning)
      message.reasoning_content = node.reasoning;
    if (node.role === "tool") message.tool_call_id = node.callId;
    if (node.role !== "assistant" || message.content || message.tool_calls) said.push(message);
  }
  return said;
}

// The messages up to `leaf` as one text that is gone on with.
export const text = (talk, leaf) => talk.system + path(talk, leaf).map(written).join("");

// A conversation that a file claims to be, or an error that says what is wrong. Also read: a list
// of messages, and what `treadle chat` writes with /save. Its pictures have their bytes as `url`,
// not checked yet.
export function read(value) {
  if (Array.isArray(value)) value = { messages: value };
  if (Array.isArray(value?.messages)) return fromMessages(value);
  const bad = (why) => new Error(`not a conversation: ${why}`);
  if (typeof value?.nodes !== "object" || value.nodes === null) throw bad("no messages found");
  const talk = newTalk(string(value.system), string(value.model).slice(0, 500));
  talk.title = string(value.title).slice(0, 200);
  for (const key of ["made", "changed"]) if (Number.isFinite(value[key])) talk[key] = value[key];
  for (const [id, node] of Object.entries(value.nodes)) {
    if (!["user", "assistant", "tool"].includes(node?.role))
      throw bad("a message has an unknown role");
    talk.nodes[id] = readNode(id, node, value.pictures ?? {});
  }
  for (const node of Object.values(talk.nodes)) {
    const seen = new Set();
    for (let at = node; at; at = talk.nodes[at.parent]) {
      if (seen.has(at.id)) throw bad("its messages form a cycle");
      seen.add(at.id);
    }
    if (node.parent !== null && !talk.nodes[node.parent]) node.parent = null;
  }
  const ids = Object.keys(talk.nodes);
  talk.leaf = talk.nodes[value.leaf] ? value.leaf : (ids.at(-1) ?? null);
  return talk;
}

const string = (value) => (typeof value === "string" ? value : "");

function readNode(id, node, urls) {
  const made = {
    id,
    parent: typeof node.parent === "string" ? node.parent : null,
    role: node.role,
  };
  made.content = string(node.content);
  made.at = Number.isFinite(node.at) ? node.at : 0;
  made.state = ["stopped", "broken"].includes(node.state) ? node.state : "done";
  if (node.mode === "text") made.mode = "text";
  const words = ["reasoning", "error", "warning", "finish", "model", "callId", "name", "reads"];
  for (const key of words) {
    if (typeof node[key] === "string") made[key] = node[key];
  }
  const list = (key) =>
    Array.isArray(node[key]) ? node[key].filter((each) => each && typeof each === "object") : [];
  made.files = list("files").map((file) => ({ name: string(file.name), text: string(file.text) }));
  made.pictures = list("pictures").map(({ id: own, name, alt }) => ({
    id: string(own),
    name: string(name),
    alt: string(alt),
    url: string(urls[string(own)]),
  }));
  made.sounds = list("sounds").map(({ id: own, name }) => ({
    id: string(own),
    name: string(name),
    url: string(urls[string(own)]),
  }));
  made.calls = list("calls").map((call) => ({
    id: string(call.id),
    name: string(call.name),
    arguments: string(call.arguments),
  }));
  if (Array.isArray(node.tokens) && node.tokens.every(isToken)) made.tokens = node.tokens;
  if (node.timings && typeof node.timings === "object") {
    const numbers = Object.entries(node.timings).filter(([, value]) => Number.isFinite(value));
    made.timings = { ...Object.fromEntries(numbers), cache: node.timings.cache };
  }
  return made;
}

const isChoice = (value) =>
  Array.isArray(value) && typeof value[0] === "string" && Number.isFinite(value[1]);
const isToken = (value) => isChoice(value) && Array.isArray(value[2]) && value[2].every(isChoice);

// The address in a part of a message that is a picture, in OpenAI's two forms.
const urlOf = (part) => string(part?.image_url?.url) || string(part?.image_url);
const named = (url, i) => ({ id: url, name: `picture ${i + 1}`, alt: `picture ${i + 1}`, url });
// A sound of OpenAI's parts, whose bytes stand there without a URL.
const heard = (part) => string(part?.input_audio?.data);
const namedSound = (data, i) => ({
  id: data,
  name: `sound ${i + 1}`,
  url: data.startsWith("data:") ? data : `data:audio/wav;base64,${data}`,
});

function fromMessages(value) {
  const talk = newTalk(string(value.system));
  for (const message of value.messages) {
    const { role } = message ?? {};
    const parts = Array.isArray(message?.content) ? message.content : [];
    const texts = parts.filter((part) => typeof part?.text === "string");
    const content = texts.map((part) => part.text).join("\n") || string(message?.content);
    const pictures = parts.map(urlOf).filter(Boolean).map(named);
    const sounds = parts.map(heard).filter(Boolean).map(namedSound);
    if (role === "system" || role === "developer") talk.system = content;
    else if (["user", "assistant", "tool"].includes(role)) {
      const asked = Array.isArray(message.tool_calls) ? message.tool_calls : [];
      const calls = asked.map((call) => ({
        id: string(call?.id),
        name: string(call?.function?.name),
        arguments: string(call?.function?.arguments),
      }));
      const callId = string(message.tool_call_id);
      add(talk, talk.leaf, { role, content, pictures, sounds, calls, callId });
    } else throw new Error("not a conversation: a message has an unknown role");
  }
  return talk;
}
