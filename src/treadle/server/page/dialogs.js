// The dialogs: settings, with the colours and the system prompt, and the API key.

import { byId } from "./element.js";
import { imageOf } from "./pictures.js";
import * as settings from "./settings.js";
import { kept } from "./store.js";

// `page` has changed(), system() of the conversation that is shown, setSystem(text), and connect().
export class Dialogs {
  constructor(page) {
    this.page = page;
    this.typed = kept.get("settings", {}); // settings, as they were typed
    this.server = {}; // what /props says
    const on = (id, event, act) => byId(id).addEventListener(event, act);
    on("settings-open", "click", () => {
      byId("system").value = page.system();
      byId("theme").value = kept.get("theme", "");
      byId("settings").showModal();
    });
    on("settings-close", "click", () => byId("settings").close());
    on("settings-clear", "click", () => {
      this.typed = {};
      this._keep();
      this.draw(this.server);
    });
    on("system", "change", ({ target }) => page.setSystem(target.value));
    on("theme", "change", ({ target }) => {
      kept.set("theme", target.value);
      this.paint();
    });
    on("key-open", "click", () => this.askKey());
    on("key-close", "click", () => byId("key").close());
    on("large-close", "click", () => byId("large").close());
    on("key-form", "submit", (event) => {
      event.preventDefault();
      kept.set("key", byId("key-value").value.trim() || null);
      byId("key").close();
      page.connect();
    });
    this.paint();
    this._count();
  }

  // The form, with a server's own values in empty fields.
  draw(server) {
    this.server = server;
    settings.show(byId("fields"), this.typed, server, (name, text) => {
      if (text) this.typed[name] = text;
      else delete this.typed[name];
      this._keep();
    });
  }

  askKey() {
    byId("key-value").value = kept.get("key", "");
    byId("key").showModal();
  }

  // Shows a picture as large as it is sent, or as the window has room for.
  enlarge(picture) {
    byId("large-picture").replaceChildren(imageOf(picture, Infinity));
    byId("large").showModal();
  }

  paint() {
    document.documentElement.dataset.theme = kept.get("theme", "");
  }

  _keep() {
    kept.set("settings", this.typed);
    this._count();
    this.page.changed();
  }

  _count() {
    const n = settings.nSet(this.typed);
    byId("settings-open").textContent = n ? `Settings (${n})` : "Settings";
  }
}
