// The list of conversations: found, deleted, written to a file and read from one.

import { button, byId, download, el } from "./element.js";
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
    on("export", "click", async () =>
      download("treadle-conversations.json", store.exported(await store.all())),
    );
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
    this.page.forget(id);
    await store.drop(id);
    this.page.notice("Conversation deleted.");
    await this.list();
    byId("search").focus();
  }

  async _import(file) {
    try {
      const found = store.imported(await file.text()).map(talks.read);
      for (const talk of found) await store.put(talk);
      this.page.notice(`Imported ${found.length} conversations.`);
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
