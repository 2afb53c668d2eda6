// What outlives the page. Conversations are in IndexedDB; settings and the key in localStorage;
// what this tab is writing in sessionStorage, which survives a reload and is no other tab's.

const NAME = "treadle";
const TABLE = "talks";

let database; // a promise of it; null where the browser gives none, as in some private windows
const memory = new Map();

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
      const request = indexedDB.open(NAME, 1);
      request.onupgradeneeded = () => request.result.createObjectStore(TABLE, { keyPath: "id" });
      request.onsuccess = () => resolve(request.result);
      request.onerror = () => resolve(null);
    } catch {
      resolve(null);
    }
  });
  return database;
}

async function table(mode) {
  const found = await open();
  return found && found.transaction(TABLE, mode).objectStore(TABLE);
}

// Other tabs are told of what changes.
const channel = "BroadcastChannel" in window ? new BroadcastChannel(NAME) : null;
export const onChange = (act) => channel?.addEventListener("message", ({ data }) => act(data));

export async function put(talk) {
  const store = await table("readwrite");
  if (store) await done(store.put(talk));
  else memory.set(talk.id, structuredClone(talk));
  channel?.postMessage(talk.id);
}

export async function get(id) {
  const store = await table("readonly");
  return store ? done(store.get(id)) : structuredClone(memory.get(id));
}

export async function drop(id) {
  const store = await table("readwrite");
  if (store) await done(store.delete(id));
  else memory.delete(id);
  channel?.postMessage(id);
}

export async function all() {
  const store = await table("readonly");
  return store ? done(store.getAll()) : [...memory.values()];
}

// Conversations that have every word of a query somewhere, the last used first: their id and title.
export async function search(query = "") {
  const words = query.toLowerCase().split(/\s+/).filter(Boolean);
  const found = (await all()).filter((talk) => {
    if (!words.length) return true;
    const said = Object.values(talk.nodes).map((node) => node.content);
    const text = [talk.title, ...said].join("\n").toLowerCase();
    return words.every((word) => text.includes(word));
  });
  return found.sort((a, b) => b.changed - a.changed).map(({ id, title }) => ({ id, title }));
}

export const lasting = async () => Boolean(await open());

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
