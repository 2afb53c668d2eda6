// The page: what buttons do, which conversation is shown, and what happens at a reload.

import { Composer } from "./composer.js";
import { announce, button, byId } from "./element.js";
import { Dialogs } from "./dialogs.js";
import { Models, isLoaded, stateInWords } from "./models.js";
import * as pictures from "./pictures.js";
import { completes } from "./settings.js";
import { Side } from "./side.js";
import { ToolServers } from "./servers.js";
import * as store from "./store.js";
import { ServerError, getJson } from "./stream.js";
import * as talks from "./talk.js";
import { View } from "./view.js";
import { Writer } from "./writer.js";

// What /props says of the model. Of a server that has several, `several` is true, and `outline`
// too as long as the model is not loaded: then it has only what is known of its file.
let server = {};
let models = null; // where the server has several
let talk = talks.newTalk(); // the conversation that is shown
const servers = new ToolServers();
const writers = new Map(); // of each conversation that is being written in this tab
const composer = new Composer({
  current: () => talk.id,
  isWriting: () => writers.has(talk.id),
  ready,
  send,
  notice,
  refusal,
  nHeld: () => pictures.shownIn(talk).length,
});
const dialogs = new Dialogs({
  changed: show,
  connect,
  system: () => talk.system,
  setSystem(text) {
    talk.system = text;
    store.kept.set("system", text);
    if (talk.leaf) save();
  },
});
const side = new Side({
  current: () => talk.id,
  forget(id) {
    writers.get(id)?.forget();
    if (id === talk.id) fresh();
  },
  fresh,
  notice,
});
const view = new View(byId("log"), {
  again: (node) => reply(node.parent),
  reply: (node) => reply(node.id),
  resume: (node) => write(node),
  answerNow: () => writers.get(talk.id)?.answerNow().catch(({ message }) => notice(message)),
  edit(node, text) {
    const { role, mode, files, pictures: seen, sounds, reasoning, model, calls } = node;
    const held = { files, pictures: seen, sounds };
    const said = { role, mode, ...held, reasoning, model, calls, content: text };
    const made = talks.add(talk, node.parent, said);
    if (role === "user") reply(made.id);
    else save();
  },
  async remove(node) {
    const [own, before] = [talk, pictures.allOf(talk)];
    writers.get(own.id)?.stop();
    talks.remove(own, node);
    composer.focus();
    await save();
    const left = new Set(pictures.allOf(own).map(({ id }) => id));
    pictures.drop(before.filter(({ id }) => !left.has(id)));
  },
  turn(node, step) {
    const place = talks.siblings(talk, node);
    talk.leaf = talks.tip(talk, place[place.indexOf(node) + step]);
    save();
  },
  result: (node, call, text) => result(node, call, text),
  canRun: (call) => servers.has(call),
  isRunning: (call) => servers.isRunning(call),
  run(node, call, always) {
    if (always) servers.allow(call);
    run(node, call);
  },
  take: (node, prefix) =>
    write(talks.add(talk, node.parent, { role: "assistant", content: prefix, mode: node.mode })),
  enlarge: (picture) => dialogs.enlarge(picture),
});

// -- answers --------------------------------------------------------------------------------------

// "text" where a message is gone on with, undefined where it is answered.
const mode = () => (completes(dialogs.typed, server) ? "text" : undefined);

async function reply(parent, own = talk) {
  if (own === talk && !(await ready())) return own === talk ? save() : keep(own);
  write(talks.add(own, parent, { role: "assistant", mode: mode() }), own);
}

// Takes a call's result; behind the last one the model answers.
function result(node, call, text, own = talk) {
  const said = { role: "tool", callId: call.id, name: call.name, content: text };
  const leaf = talks.add(own, own.leaf, said);
  if (!talks.unanswered(own, node).length) reply(leaf.id, own);
  else if (own === talk) save();
  else keep(own);
}

// Runs a call that the user has allowed, and takes its result.
async function run(node, call, own = talk) {
  announce(`Running tool ${call.name}`);
  const running = servers.run(call, key());
  if (own === talk) show();
  try {
    const text = await running;
    // It may have been answered, or deleted, meanwhile.
    if (talks.unanswered(own, node).includes(call)) result(node, call, text, own);
  } catch (error) {
    if (!(error instanceof ServerError)) throw error;
    notice(error.message);
  }
  if (own === talk) show();
}

// Why no "picture" or "sound" can be sent now, or "".
function refusal(kind) {
  const modality = { picture: "vision", sound: "audio" }[kind];
  if (!server.model_alias) return `the server has not said yet whether its model reads ${kind}s`;
  if (!server.modalities?.[modality]) return `${server.model_alias} does not read ${kind}s`;
  return mode() ? `text mode has no ${kind}s: set Mode to chat` : "";
}

async function write(node, own = talk) {
  while (writers.has(own.id)) await writers.get(own.id).stop(); // the last one asked for is written
  const writer = new Writer(
    own,
    node,
    { server: serverOf(own), servers, typed: dialogs.typed, key: key() },
    {
      grow: (grown) => {
        if (own === talk) {
          view.grow(grown);
          meter();
        }
      },
      save: keep,
      end(ended, error) {
        writers.delete(own.id);
        if (own === talk) show();
        side.list();
        announce(
          error
            ? error.message
            : ended.state === "stopped"
              ? "Stopped"
              : `Answer finished: ${ended.timings?.predicted_n ?? 0} tokens`,
        );
        if (error?.status === 401) dialogs.askKey();
        for (const call of talks.unanswered(own, ended))
          if (ended.state === "done" && servers.isAllowed(call)) run(ended, call, own);
      },
    },
  );
  writers.set(own.id, writer);
  node.state = "writing";
  node.model = writer.server.model_alias;
  if (own === talk) {
    show();
    view.toEnd();
  }
  announce("Generating an answer");
  await writer.run();
}

let unkept = ""; // why, as it was told: once, not each second
const keep = (changed) =>
  store.put(changed).catch(({ message }) => {
    if (message !== unkept)
      notice(`The conversation could not be saved in this browser: ${message}`);
    unkept = message;
  });

async function save() {
  await keep(talk);
  show();
  side.list();
}

function send(message) {
  if (models) talk.model ||= chosen();
  const node = talks.add(talk, talk.leaf, { role: "user", ...message, mode: mode() });
  location.hash = talk.id;
  reply(node.id);
  side.list();
}

function stop() {
  writers.get(talk.id)?.stop();
  composer.focus();
}

// -- what is shown --------------------------------------------------------------------------------

function show() {
  const writing = writers.has(talk.id);
  byId("title").textContent = talk.title || "New conversation";
  document.title = talk.title ? `${talk.title} · treadle` : "treadle";
  view.show(talk, talks.path(talk));
  byId("stop").hidden = !writing;
  byId("send").hidden = writing;
  composer.show(mode() ? "Text to continue" : "Message");
  meter();
}

function meter() {
  const n_ctx = server.default_generation_settings?.n_ctx;
  const last = talks.path(talk).findLast((node) => node.timings);
  byId("context").hidden = !n_ctx || !last;
  if (byId("context").hidden) return;
  const { cache_n = 0, prompt_n = 0, predicted_n = 0 } = last.timings;
  const used = Math.min(n_ctx, cache_n + prompt_n + predicted_n);
  Object.assign(byId("meter"), { max: n_ctx, value: used });
  byId("used").textContent = `${used} of ${n_ctx}`;
}

function notice(text) {
  byId("notice").hidden = !text;
  byId("notice").replaceChildren(
    text,
    button("Close", () => notice("")),
  );
}

function fresh() {
  talk = talks.newTalk(store.kept.get("system", ""), chosen());
  history.replaceState(null, "", location.pathname);
  show();
  side.list();
  composer.focus();
}

async function open(id) {
  talk =
    writers.get(id)?.talk ?? (await store.get(id)) ?? talks.newTalk(store.kept.get("system", ""));
  show();
  view.toEnd();
  side.open(false);
  side.list();
  if (models) await take();
}

// -- the server -----------------------------------------------------------------------------------

async function connect() {
  let failing = "";
  try {
    await getJson("health", "");
    const told = await getJson("props", key());
    if (told.role === "router") {
      await connectToSeveral(told);
    } else {
      server = told;
      failing = await servers.load(server, key());
    }
  } catch (error) {
    if (!(error instanceof ServerError)) throw error;
    notice(error.message);
    if (error.status === 401) return dialogs.askKey();
    await new Promise((resolve) => setTimeout(resolve, 2000));
    return connect();
  }
  if (models) return;
  notice(failing);
  byId("model").textContent = server.model_alias;
  dialogs.draw(server);
  show();
}

// -- several models -------------------------------------------------------------------------------

let mostBytes; // of a request
const key = () => store.kept.get("key", "");

async function connectToSeveral(told) {
  mostBytes = told.treadle?.max_body_bytes;
  notice("");
  const first = !models;
  models ??= new Models({ key, chosen, choose, changed: stateChanged, notice });
  byId("models-open").hidden = false;
  await models.refresh();
  await take();
  if (first) models.follow();
}

// The name of the model that answers in the conversation that is shown.
const chosen = () => (models ? models.pick(talk.model, store.kept.get("model", "")) : "");

async function choose(name) {
  talk.model = name;
  store.kept.set("model", name);
  if (talk.leaf) await keep(talk);
  await take();
}

// Takes the chosen model's settings: from the model if it is loaded, or is to be, else from the
// list.
async function take({ load = false } = {}) {
  const name = chosen();
  const model = models.find(name);
  if (!model) {
    server = { several: true };
    heading();
    return notice("The server has no model that writes text.");
  }
  if (talk.model && talk.model !== name && !model.aliases?.includes(talk.model))
    notice(`${talk.model} is not on this server: ${name} answers.`);
  let found = outline(model);
  if (load || isLoaded(model)) {
    const query = `model=${encodeURIComponent(name)}${load ? "" : "&autoload=false"}`;
    try {
      found = { ...(await getJson(`props?${query}`, key())), several: true };
    } catch (error) {
      if (load || error.code !== "model_not_loaded") throw error; // it was unloaded meanwhile
    }
  }
  if (name !== chosen()) return; // another was chosen meanwhile
  server = found;
  dialogs.draw(server);
  heading();
  show();
  if (server.outline) return; // each model has tool servers of its own, which start with it
  const failing = await servers.load(server, key());
  if (failing) notice(failing);
}

function outline({ id, architecture, meta }) {
  const reads = architecture?.input_modalities ?? [];
  return {
    several: true,
    outline: true,
    model_alias: id,
    modalities: { vision: reads.includes("image"), audio: reads.includes("audio") },
    default_generation_settings: { n_ctx: meta?.n_ctx },
    treadle: { max_body_bytes: mostBytes },
  };
}

// Resolves to whether a message can be sent. A model that is not loaded is: only then it is known
// whether it talks or goes on with a text.
async function ready() {
  if (!server.several || (server.model_alias && !server.outline)) return true;
  announce(`Loading ${chosen()}`);
  try {
    await take({ load: true });
  } catch (error) {
    notice(error.message);
  }
  return Boolean(server.model_alias && !server.outline);
}

// What is known of the model that answers in a conversation.
function serverOf(own) {
  const model = own === talk ? null : models?.find(models.pick(own.model));
  return model && model.id !== server.model_alias ? outline(model) : server;
}

function heading() {
  const model = models.find(server.model_alias);
  byId("model").textContent = server.model_alias ?? "no model";
  byId("model-state").textContent = !model || isLoaded(model) ? "" : stateInWords(model);
}

function stateChanged() {
  if (!server.several) return; // it connects
  const model = models.find(chosen());
  const same = server.model_alias === model?.id;
  if (!same || (model && isLoaded(model) === Boolean(server.outline)))
    take().catch(({ message }) => notice(message));
  else heading();
}

// -- the browser ----------------------------------------------------------------------------------

const on = (id, event, act) => byId(id).addEventListener(event, act);

on("stop", "click", stop);
on("newest", "click", () => {
  view.toEnd();
  composer.focus();
});

document.addEventListener("keydown", (event) => {
  if (event.key !== "Escape" || document.querySelector("dialog[open]")) return;
  if (side.isOpen()) {
    side.open(false);
    byId("side-open").focus();
  } else stop();
});
window.addEventListener("hashchange", () => {
  if (location.hash.slice(1) !== talk.id) open(location.hash.slice(1));
});
store.onChange(async (id) => {
  side.list();
  if (id === talk.id && !writers.has(id)) {
    talk = (await store.get(id)) ?? talk;
    show();
  }
});

// A reload ends the stream. What has come so far is kept here, and gone on with after the reload.
window.addEventListener("pagehide", () => {
  const left = [...writers.values()].map(({ talk: { id }, node }) => ({ id, node }));
  store.ofTab.set("writing", left.length ? left : null);
});

function goOn() {
  const left = store.ofTab.get("writing", []);
  store.ofTab.set("writing", null);
  for (const { id, node } of left) resume(id, node);
}

async function resume(id, node) {
  const own = id === talk.id ? talk : await store.get(id);
  if (own?.nodes[node.id]) write(Object.assign(own.nodes[node.id], node), own);
}

composer.restore().catch(({ message }) => notice(message));
talk.system = store.kept.get("system", "");
if (location.hash) await open(location.hash.slice(1));
show();
side.list();
if (!(await store.lasting()))
  notice("This browser cannot store conversations: they are lost when the page is closed.");
composer.focus();
await connect();
goOn();
