// The list of conversations: found, deleted, written to a file and read from one.

import { button, byId, download, el } from "./element.js";
import * as pictures from "./pictures.js";
import * as store from "./store.js";
import * as talks from "./talk.js";

// `page` has current(), the id of what is shown; forget(id); fresh(); notice(text).
export class Side {
  constructor(page) {
    this.page = page;
    const on = (id, event, act) => byId(id).addEventListener(event, act);
    on("search", "input", () => this.list());
    on("side-open", "click", () => this.open(!this.isOpen()));
    on("new", "click", () => {
      this.open(false);
      page.fresh();
    });
    on("export", "click", async () => {
      const packed = [];
      for (const talk of await store.all()) packed.push(await pictures.packed(talk));
      download("treadle-conversations.json", store.exported(packed));
    });
    on("import", "click", () => byId("import-file").click());
    on("import-file", "change", async ({ target }) => {
      await this._import(target.files[0]);
      target.value = "";
    });
  }

  async list() {
    const found = await store.search(byId("search").value);
    byId("talks").replaceChildren(...found.map(({ id, title }) => this._row(id, title)));
  }

  _row(id, title) {
    const current = id === this.page.current() ? "page" : null;
    const name = title || "Untitled";
    const gone = button("×", () => this._forget(id), { "aria-label": `Delete ${name}` });
    return el("li", {}, el("a", { href: `#${id}`, "aria-current": current }, name), gone);
  }

  async _forget(id) {
    const talk = await store.get(id);
    this.page.forget(id);
    await store.drop(id);
    if (talk) await pictures.drop(pictures.allOf(talk));
    this.page.notice("Conversation deleted.");
    await this.list();
    byId("search").focus();
  }

  async _import(file) {
    try {
      const found = store.imported(await file.text()).map(talks.read);
      let n_left_out = 0;
      let unstored = "";
      for (const talk of found) {
        n_left_out += await pictures.unpack(talk, ({ message }) => (unstored = message));
        await store.put(talk);
      }
      const left = n_left_out ? ` Pictures and sounds that could not be read: ${n_left_out}.` : "";
      const lost = unstored
        ? ` Pictures and sounds are lost at a reload, not stored: ${unstored}.`
        : "";
      this.page.notice(`Imported ${found.length} conversations.${left}${lost}`);
    } catch (error) {
      this.page.notice(`${file.name}: ${error.message}`);
    }
    await this.list();
  }

  // On a narrow screen the list covers the conversation, and is opened and closed.
  open(wanted) {
    document.body.classList.toggle("side", wanted);
    byId("side-open").setAttribute("aria-expanded", String(wanted));
  }

  isOpen() {
    return document.body.classList.contains("side");
  }
}
