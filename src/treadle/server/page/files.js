// Files that are attached to a message: pictures, sounds, and all others as text.

import { announce, button, el } from "./element.js";
import * as pictures from "./pictures.js";
import * as sounds from "./sounds.js";
import { ofTab } from "./store.js";

const MOST_BYTES = 4 << 20; // a text file larger than this fits no context
const LONG_PASTE = 4000; // characters; more of them are shown as a file
const THUMB_SIDE = 96; // pixels
const NAMED = 3; // files that a complaint names

// The files that wait for the next message, shown in `box`. `page` has notice(text), for files that
// cannot be read; refusal(kind), why no "picture" or "sound" can be sent now, or ""; nHeld(), how
// many pictures and sounds are shown.
export class Attached {
  constructor(box, page) {
    Object.assign(this, { box, page, files: [], pictures: [], sounds: [] });
    this._n_waiting = 0; // calls of `add` that are not done
    this._reading = ""; // the name of the picture or sound that is being read
    this._read = Promise.resolve(); // when all that was given is read
    this._rows = new WeakMap(); // of each file and picture: its element, which may have the focus
  }

  get isEmpty() {
    return !this.files.length && !this.pictures.length && !this.sounds.length;
  }

  // Null, or a promise of the moment when every file is read.
  get busy() {
    return this._n_waiting ? this._read : null;
  }

  // Adds files, or from a button for pictures or sounds `only` these. Resolves when they are read.
  add(list, { only = "", pasted = false } = {}) {
    this._n_waiting++;
    this._read = this._read
      .then(() => this._add(list, only, pasted))
      .finally(() => this._n_waiting--);
    return this._read;
  }

  async _add(list, only, pasted) {
    const complaints = new Map(); // what is wrong: names of files
    const complain = (name, why) => complaints.set(why, [...(complaints.get(why) ?? []), name]);
    for (const file of list) {
      const name = nameOf(file, pasted);
      try {
        const complainOf = (why) => complain(name, why);
        if (only !== "sound" && (await pictures.isPicture(file))) {
          await this._addHeld("picture", file, name, complainOf);
        } else if (only !== "picture" && (await sounds.isSound(file))) {
          await this._addHeld("sound", file, name, complainOf);
        } else if (only === "picture" || (!only && claims("image", file))) {
          throw new Error(`not a picture: expected ${pictures.FORMATS}`);
        } else if (only || claims("audio", file)) {
          throw new Error(`not a sound: expected ${sounds.FORMATS}`);
        } else this.files.push({ name, text: await read(file) });
      } catch (error) {
        complain(name, error.message);
      }
      this.show();
    }
    if (complaints.size) this.page.notice([...complaints].map(inWords).join("\n"));
  }

  // Reads a picture or a sound, whichever `kind` says.
  async _addHeld(kind, file, name, complain) {
    const refusal = this.page.refusal(kind);
    if (refusal) throw new Error(refusal);
    const n_held = this.page.nHeld() + this.pictures.length + this.sounds.length;
    if (n_held >= pictures.MOST_PICTURES)
      throw new Error(`a conversation can have ${pictures.MOST_PICTURES} ${kind}s`);
    this._reading = name;
    this.show();
    announce(`Reading ${name}`);
    const unstored = ({ message }) =>
      complain(`lost at a reload, since this browser could not store it: ${message}`);
    try {
      if (kind === "picture") {
        const kept = await pictures.keep(await pictures.scaleDown(file), name, unstored);
        this.pictures.push(kept);
        announce(`Picture attached: ${name}, ${kept.width} by ${kept.height} pixels`);
      } else {
        const kept = await sounds.keep(await sounds.toWav(file), name, unstored);
        this.sounds.push(kept);
        announce(`Sound attached: ${sounds.inWords(kept)}`);
      }
    } finally {
      this._reading = "";
    }
  }

  // Takes files, and long texts, from what was pasted; false for a paste like any other.
  paste(data) {
    const text = data.getData("text/plain");
    const files = [...data.files];
    const drawn = files.every(({ type }) => type.startsWith("image/"));
    // Office programs put a picture of what was copied beside its text.
    if (files.length && !(text && drawn)) {
      this.add(files, { pasted: true });
      return true;
    }
    if (text.length < LONG_PASTE) return false;
    this.files.push({ name: "pasted text", text });
    this.show();
    return true;
  }

  // Takes files that are dropped anywhere. A text goes where texts are written.
  drag(event) {
    const { files, types } = event.dataTransfer;
    if (!types.includes("Files") && event.target.closest?.("textarea, input")) return;
    event.preventDefault();
    if (event.type === "drop") this.add([...files]);
  }

  // Returns {files, pictures, sounds}, which are then a message's.
  take() {
    const { files, pictures: seen, sounds: heard } = this;
    this._set([], [], []);
    return { files, pictures: seen, sounds: heard };
  }

  // Puts back what was there before a reload of this tab.
  async restore() {
    const { files = [], pictures: kept = [], sounds: heard = [] } = ofTab.get("attached", {});
    const there = await pictures.stored(kept);
    const audible = await pictures.stored(heard);
    this._set(
      [...files, ...this.files],
      [...there, ...this.pictures],
      [...audible, ...this.sounds],
    );
  }

  _set(files, seen, heard) {
    Object.assign(this, { files, pictures: seen, sounds: heard });
    this.show();
  }

  show() {
    const rows = [...this.pictures, ...this.sounds, ...this.files].map((each) => this._row(each));
    if (this._reading) rows.push(el("li", {}, `Reading ${this._reading}…`));
    this.box.hidden = !rows.length;
    for (const child of [...this.box.children]) if (!rows.includes(child)) child.remove();
    rows.forEach((row, i) => {
      if (this.box.children[i] !== row) this.box.insertBefore(row, this.box.children[i] ?? null);
    });
    this._keep();
  }

  _keep() {
    const kept = { files: this.files, pictures: this.pictures, sounds: this.sounds };
    if (!ofTab.set("attached", this.isEmpty ? null : kept)) ofTab.set("attached", null); // full
  }

  _row(each) {
    if (!this._rows.has(each)) {
      const made = !each.id
        ? this._fileRow(each)
        : each.seconds === undefined
          ? this._pictureRow(each)
          : this._soundRow(each);
      this._rows.set(each, made);
    }
    return this._rows.get(each);
  }

  _soundRow(sound) {
    const gone = () => {
      this.sounds = this.sounds.filter((each) => each !== sound);
      pictures.drop([sound]);
    };
    return el("li", { class: "sound" }, sounds.inWords(sound), this._remover(sound.name, gone));
  }

  _fileRow(file) {
    const gone = () => {
      this.files = this.files.filter((each) => each !== file);
    };
    return el("li", {}, `${file.name} (${size(file.text)})`, this._remover(file.name, gone));
  }

  _pictureRow(picture) {
    const image = pictures.imageOf(picture, THUMB_SIDE);
    const change = ({ target }) => {
      picture.alt = target.value.trim();
      image.alt = pictures.altOf(picture);
      this._keep();
    };
    const leave = (event) => {
      if (event.key !== "Enter" || event.isComposing) return;
      event.preventDefault(); // it would send the message
      this._toEntry();
    };
    const alt = el("input", {
      type: "text",
      value: picture.alt,
      placeholder: "Alt text",
      "aria-label": `Alt text of ${picture.name}`,
      title: "Alt text: read aloud in place of the picture; the model does not get it",
      maxlength: 1000,
      autocomplete: "off",
      oninput: change,
      onkeydown: leave,
    });
    const gone = () => {
      this.pictures = this.pictures.filter((each) => each !== picture);
      pictures.drop([picture]);
    };
    return el("li", { class: "picture" }, image, alt, this._remover(picture.name, gone));
  }

  _remover(name, gone) {
    const remove = () => {
      gone();
      this.show();
      this._toEntry();
    };
    return button("×", remove, { "aria-label": `Remove ${name}` });
  }

  _toEntry() {
    this.box.parentNode.querySelector("textarea").focus();
  }
}

// Browsers name each picture that is pasted alike.
const nameOf = (file, pasted) =>
  pasted && (!file.name || file.name === "image.png") ? "pasted picture" : file.name || "pasted";

// A picture or a sound by its name; a drawing in SVG is a text, which a model can read.
const claims = (kind, { type }) => type.startsWith(`${kind}/`) && type !== "image/svg+xml";

function inWords([why, names]) {
  const rest = names.length - NAMED;
  const more = rest > 0 ? ` and ${rest} more` : "";
  return `${names.slice(0, NAMED).join(", ")}${more}: ${why}`;
}

export const size = (text) =>
  text.length < 1000
    ? `${text.length} characters`
    : `${Math.round(text.length / 1000)}k characters`;

// The files of a message, folded.
export const fileViews = (node) =>
  (node.files ?? []).map(({ name, text }) =>
    el(
      "details",
      { class: "file" },
      el("summary", {}, `${name} (${size(text)})`),
      el("pre", { tabindex: 0 }, text),
    ),
  );

async function read(file) {
  if (file.size > MOST_BYTES) throw new Error("larger than 4 MiB, too large for any context");
  const bytes = await file.arrayBuffer();
  try {
    const text = new TextDecoder("utf-8", { fatal: true }).decode(bytes);
    if (text.includes("\0")) throw new Error();
    return text;
  } catch {
    throw new Error("not a text file, a picture or a sound: nothing else can be attached");
  }
}
