// The page: what buttons do, which conversation is shown, and what happens at a reload.

import { Composer } from "./composer.js";
import { announce, button, byId } from "./element.js";
import { Dialogs } from "./dialogs.js";
import * as pictures from "./pictures.js";
import { completes } from "./settings.js";
import { Side } from "./side.js";
import { ToolServers } from "./servers.js";
import * as store from "./store.js";
import { ServerError, getJson } from "./stream.js";
import * as talks from "./talk.js";
import { View } from "./view.js";
import { Writer } from "./writer.js";

let server = {}; // what /props says
let talk = talks.newTalk(); // the conversation that is shown
const servers = new ToolServers();
const writers = new Map(); // of each conversation that is being written in this tab
const composer = new Composer({
  current: () => talk.id,
  isWriting: () => writers.has(talk.id),
  send,
  notice,
  refusal: noPictures,
  nPictures: () => pictures.shownIn(talk).length,
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
    const { role, mode, files, pictures: shown, reasoning, model, calls } = node;
    const said = { role, mode, files, pictures: shown, reasoning, model, calls, content: text };
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

function reply(parent, own = talk) {
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
  const running = servers.run(call, store.kept.get("key", ""));
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

// Why no picture can be sent now, or "".
function noPictures() {
  if (!server.model_alias) return "the server has not said yet whether its model reads pictures";
  if (!server.modalities?.vision) return `${server.model_alias} does not read pictures`;
  return mode() ? "text mode has no pictures: set Mode to chat" : "";
}

async function write(node, own = talk) {
  while (writers.has(own.id)) await writers.get(own.id).stop(); // the last one asked for is written
  const writer = new Writer(
    own,
    node,
    { server, servers, typed: dialogs.typed, key: store.kept.get("key", "") },
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
  composer.show(mode() ? "Text to continue" : "Message", noPictures());
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
  talk = talks.newTalk(store.kept.get("system", ""));
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
}

// -- the server -----------------------------------------------------------------------------------

async function connect() {
  let failing = "";
  try {
    await getJson("health", "");
    server = await getJson("props", store.kept.get("key", ""));
    failing = await servers.load(server, store.kept.get("key", ""));
  } catch (error) {
    if (!(error instanceof ServerError)) throw error;
    notice(error.message);
    if (error.status === 401) return dialogs.askKey();
    await new Promise((resolve) => setTimeout(resolve, 2000));
    return connect();
  }
  notice(failing);
  byId("model").textContent = server.model_alias;
  dialogs.draw(server);
  show();
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
