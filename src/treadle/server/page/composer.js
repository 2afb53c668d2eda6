// Where a message is written: its text, with what is attached to it. Both outlive a reload.

import { announce, byId } from "./element.js";
import { Attached } from "./files.js";
import { Recorder, canRecord } from "./sounds.js";
import { ofTab, sweepPictures } from "./store.js";

// `page` has current(), the id of what is shown; isWriting(), whether it gets an answer now;
// ready(), which resolves to whether a message can be sent; send({content, files, pictures,
// sounds}); and what Attached takes.
export class Composer {
  constructor(page) {
    this.page = page;
    this.entry = byId("entry");
    this.entry.value = ofTab.get("draft", "");
    this.attached = new Attached(byId("attached"), page);
    this._waits = false; // a message waits for its pictures and sounds
    this._recorder = null;
    this._listen();
  }

  // Puts back what was attached before a reload.
  async restore() {
    await this.attached.restore();
    const { pictures, sounds } = this.attached;
    await sweepPictures([...pictures, ...sounds].map(({ id }) => id));
  }

  focus() {
    this.entry.focus();
  }

  show(placeholder) {
    this.entry.placeholder = placeholder;
    byId("picture").hidden = Boolean(this.page.refusal("picture"));
    const deaf = Boolean(this.page.refusal("sound"));
    byId("sound").hidden = deaf;
    byId("record").hidden = (deaf || !canRecord()) && !this._recorder;
  }

  // Begins to record, or ends it: what was recorded is then attached.
  record() {
    const button = byId("record");
    if (this._recorder) return this._recorder.stop();
    const over = (label) => {
      this._recorder = null;
      button.textContent = "Record";
      button.setAttribute("aria-pressed", "false");
      announce(label);
    };
    button.textContent = "Stop recording";
    button.setAttribute("aria-pressed", "true");
    announce("Recording");
    this._recorder = new Recorder({
      ended: async (file) => {
        over("Recording ended");
        await this.attached.add([file], { only: "sound" });
        this.focus();
      },
      failed: ({ message }) => {
        over("Not recording");
        this.page.notice(message);
      },
      ticked: (time) => (button.textContent = `Stop recording (${time})`),
    });
  }

  async send() {
    const own = this.page.current();
    if (this._waits) return;
    if (this.attached.busy) {
      this._waits = true;
      await this.attached.busy;
      this._waits = false;
      if (this.page.current() !== own) return; // the message stays in its box
    }
    if (this.page.isWriting() || (!this.entry.value.trim() && this.attached.isEmpty)) return;
    this._waits = true;
    const ready = await this.page.ready();
    this._waits = false;
    if (!ready || this.page.current() !== own) return;
    const content = this.entry.value;
    if (this.page.isWriting() || (!content.trim() && this.attached.isEmpty)) return;
    this.entry.value = "";
    ofTab.set("draft", null);
    this.page.send({ content, ...this.attached.take() });
  }

  _listen() {
    const { attached, entry } = this;
    const on = (id, event, act) => byId(id).addEventListener(event, act);
    on("form", "submit", (event) => {
      event.preventDefault();
      this.send();
    });
    on("entry", "keydown", (event) => {
      if (event.key !== "Enter" || event.shiftKey || event.isComposing) return;
      event.preventDefault();
      this.send();
    });
    on("entry", "input", () => ofTab.set("draft", entry.value));
    on("entry", "paste", (event) => {
      if (attached.paste(event.clipboardData)) event.preventDefault();
    });
    const picker = (name, options) => {
      on(name, "click", () => byId(`${name}-file`).click());
      on(`${name}-file`, "change", async ({ target }) => {
        await attached.add([...target.files], options);
        target.value = "";
        entry.focus();
      });
    };
    picker("attach", {});
    picker("picture", { only: "picture" });
    picker("sound", { only: "sound" });
    on("record", "click", () => this.record());
    document.addEventListener("dragover", (event) => attached.drag(event));
    document.addEventListener("drop", (event) => attached.drag(event));
  }
}
