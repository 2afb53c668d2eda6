// What outlives the page. Conversations are in IndexedDB, and beside them their pictures and
// sounds, since a conversation is saved again each second while an answer grows; settings and the
// key are in localStorage; what this tab is writing in sessionStorage, which survives a reload and
// is no other tab's.

const NAME = "treadle";
const VERSION = 2; // 1 had no pictures
const TABLE = "talks";
const PICTURES = "pictures"; // and sounds: {id, blob, at: when it was put there, in ms}
const UNSENT_MS = 7 * 86400000; // how long a picture may wait to be sent in a tab

let database; // a promise of it; null where the browser gives none, as in some private windows
const memory = { [TABLE]: new Map(), [PICTURES]: new Map() }; // what the browser did not take

// A full disk shows at the transaction's end, behind the success of its request.
const done = (request) =>
  new Promise((resolve, reject) => {
    const { transaction } = request;
    transaction.oncomplete = () => resolve(request.result);
    transaction.onabort = () => reject(transaction.error ?? new Error("aborted"));
  });

function open() {
  database ??= new Promise((resolve) => {
    try {
      const request = indexedDB.open(NAME, VERSION);
      request.onupgradeneeded = () => {
        const { objectStoreNames: there } = request.result;
        for (const name of [TABLE, PICTURES])
          if (!there.contains(name)) request.result.createObjectStore(name, { keyPath: "id" });
      };
      request.onsuccess = () => {
        request.result.onversionchange = () => request.result.close(); // a newer page needs it
        resolve(request.result);
      };
      request.onerror = () => resolve(null);
      request.onblocked = () => resolve(null); // an older page in another tab does not let go
    } catch {
      resolve(null);
    }
  });
  return database;
}

async function table(mode, name = TABLE) {
  const found = await open();
  return found && found.transaction(name, mode).objectStore(name);
}

// Other tabs are told of what changes.
const channel = "BroadcastChannel" in window ? new BroadcastChannel(NAME) : null;
export const onChange = (act) => channel?.addEventListener("message", ({ data }) => act(data));

export async function put(talk) {
  const store = await table("readwrite");
  if (store) await done(store.put(talk));
  else memory[TABLE].set(talk.id, structuredClone(talk));
  channel?.postMessage(talk.id);
}

export async function get(id) {
  const store = await table("readonly");
  return store ? done(store.get(id)) : structuredClone(memory[TABLE].get(id));
}

export async function drop(id) {
  const store = await table("readwrite");
  if (store) await done(store.delete(id));
  else memory[TABLE].delete(id);
  channel?.postMessage(id);
}

export async function all() {
  const store = await table("readonly");
  return store ? done(store.getAll()) : [...memory[TABLE].values()];
}

// Conversations that have every word of a query somewhere, the last used first: their id and title.
export async function search(query = "") {
  const words = query.toLowerCase().split(/\s+/).filter(Boolean);
  const found = (await all()).filter((talk) => {
    if (!words.length) return true;
    const nodes = Object.values(talk.nodes);
    const said = nodes.flatMap(({ content, pictures = [], sounds = [] }) => [
      content,
      ...pictures.map(({ alt }) => alt),
      ...sounds.map(({ name }) => name),
    ]);
    const text = [talk.title, ...said].join("\n").toLowerCase();
    return words.every((word) => text.includes(word));
  });
  return found.sort((a, b) => b.changed - a.changed).map(({ id, title }) => ({ id, title }));
}

export const lasting = async () => Boolean(await open());

// -- pictures and sounds --------------------------------------------------------------------------

// Where the browser does not take one, this page keeps it, and what went wrong is thrown.
export async function putPicture(id, blob) {
  try {
    const store = await table("readwrite", PICTURES);
    if (store) return await done(store.put({ id, blob, at: Date.now() }));
    memory[PICTURES].set(id, blob);
  } catch (error) {
    memory[PICTURES].set(id, blob);
    throw error;
  }
}

// The bytes of a picture, undefined if they are not there.
export async function picture(id) {
  const store = memory[PICTURES].has(id) ? null : await table("readonly", PICTURES);
  return store ? (await done(store.get(id)))?.blob : memory[PICTURES].get(id);
}

// Deletes those of these pictures that no conversation has.
export async function dropPictures(ids) {
  if (!ids.length) return;
  const used = await usedPictures();
  await deletePictures(ids.filter((id) => !used.has(id)));
}

// Deletes pictures that were never sent, nor taken away: their tab was closed. `waiting` are the
// ids of those that wait in this one.
export async function sweepPictures(waiting) {
  const store = await table("readonly", PICTURES);
  const found = store ? await done(store.getAll()) : [];
  const old = found.filter(({ at }) => Date.now() - at > UNSENT_MS).map(({ id }) => id);
  await dropPictures(old.filter((id) => !waiting.includes(id)));
}

async function usedPictures() {
  const nodes = (await all()).flatMap((talk) => Object.values(talk.nodes));
  const held = nodes.flatMap((node) => [...(node.pictures ?? []), ...(node.sounds ?? [])]);
  return new Set(held.map(({ id }) => id));
}

async function deletePictures(ids) {
  for (const id of ids) memory[PICTURES].delete(id);
  const store = ids.length ? await table("readwrite", PICTURES) : null;
  if (!store) return;
  for (const id of ids.slice(1)) store.delete(id);
  await done(store.delete(ids[0]));
}

// -- small things ---------------------------------------------------------------------------------

function read(storage, name, otherwise) {
  try {
    return JSON.parse(storage.getItem(`${NAME}.${name}`)) ?? otherwise;
  } catch {
    return otherwise;
  }
}

function write(storage, name, value) {
  try {
    if (value === null) storage.removeItem(`${NAME}.${name}`);
    else storage.setItem(`${NAME}.${name}`, JSON.stringify(value));
    return true;
  } catch {
    return false; // full, or forbidden
  }
}

export const kept = {
  get: (name, otherwise) => read(localStorage, name, otherwise),
  set: (name, value) => write(localStorage, name, value),
};
export const ofTab = {
  get: (name, otherwise) => read(sessionStorage, name, otherwise),
  set: (name, value) => write(sessionStorage, name, value),
};

// -- files ----------------------------------------------------------------------------------------

export const exported = (talks) =>
  JSON.stringify({ format: "treadle-conversations", version: 1, conversations: talks }, null, 1);

// The conversations in a file's text, not checked yet. Throws where it is no JSON.
export function imported(text) {
  let value;
  try {
    value = JSON.parse(text);
  } catch {
    throw new Error("not a conversations file: not valid JSON");
  }
  return Array.isArray(value?.conversations) ? value.conversations : [value];
}
