// Files that are attached to a message, as text.

import { button, el } from "./element.js";

const MOST_BYTES = 4 << 20; // a file larger than this fits no context
const LONG_PASTE = 4000; // characters; more of them are shown as a file

// The files that wait for the next message, shown in `box`. `complain` is told of what cannot be
// read.
export class Attached {
  constructor(box, complain) {
    Object.assign(this, { box, complain, files: [] });
  }

  async add(list) {
    for (const file of list) {
      try {
        this.files.push({ name: file.name || "pasted", text: await read(file) });
      } catch (error) {
        this.complain(`${file.name}: ${error.message}`);
      }
    }
    this.show();
  }

  // Takes files, and long texts, from what was pasted; false for a paste like any other.
  paste(data) {
    const text = data.getData("text/plain");
    const files = [...data.files];
    const pictures = files.every(({ type }) => type.startsWith("image/"));
    // Office programs put a picture of what was copied beside its text.
    if (files.length && !(text && pictures)) {
      this.add(files);
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

  take() {
    const taken = this.files;
    this.set([]);
    return taken;
  }

  set(files) {
    this.files = files;
    this.show();
  }

  show() {
    this.box.hidden = !this.files.length;
    this.box.replaceChildren(
      ...this.files.map((file) =>
        el(
          "li",
          {},
          `${file.name} (${size(file.text)})`,
          button(
            "×",
            () => {
              this.set(this.files.filter((each) => each !== file));
            },
            { "aria-label": `Remove ${file.name}` },
          ),
        ),
      ),
    );
  }
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
    throw new Error("not a text file: only text can be attached");
  }
}
