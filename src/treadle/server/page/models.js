// The models of a server that has several: what each one is, whether it is loaded, and the dialog
// in which one is chosen, loaded and unloaded.

import { announce, button, byId, el } from "./element.js";
import { events, getJson, openStream, postJson } from "./stream.js";
import { newId } from "./talk.js";

const RETRY_MS = 2000;
const KINDS = { vectors: "computes vectors", scores: "ranks documents" };
const IDLE = { unloaded: "not loaded", sleeping: "unloaded while idle" };

const megabytes = (n) => (n < 1e9 ? `${(n / 1e6).toFixed(0)} MB` : `${(n / 1e9).toFixed(1)} GB`);

export const stateOf = (model) => model.status?.value ?? "loaded";
export const isLoaded = (model) => stateOf(model) === "loaded";
const isBusy = (model) => ["loading", "downloading"].includes(stateOf(model));
// Whether it can answer; unknown before a model is downloaded.
export const writes = (model) => (model.meta?.kind ?? "text") === "text";

// The state of a model in words: "loading 40 %".
export function stateInWords(model) {
  const { failed, error, progress } = model.status ?? {};
  if (failed) return `failed: ${error}`;
  if (!isBusy(model)) return IDLE[stateOf(model)] ?? stateOf(model);
  const share = progress?.value ?? downloaded(progress);
  return share === undefined ? stateOf(model) : `${stateOf(model)} ${Math.round(100 * share)} %`;
}

// The share of a download's files that has arrived.
function downloaded(files) {
  const parts = Object.values(files ?? {}).filter((each) => each?.total);
  if (!parts.length) return undefined;
  const sum = (name) => parts.reduce((n, each) => n + each[name], 0);
  return sum("done") / sum("total");
}

function facts(model) {
  const { size, n_ctx, kind } = model.meta ?? {};
  const reads = (model.architecture?.input_modalities ?? []).filter((each) => each !== "text");
  const senses = reads.map((each) => (each === "image" ? "pictures" : "sounds"));
  return [
    size && megabytes(size),
    n_ctx && writes(model) && `context ${n_ctx}`,
    senses.length && `reads ${senses.join(" and ")}`,
    KINDS[kind],
    model.aliases?.length && `also ${model.aliases.join(", ")}`,
    model.treadle?.problem,
  ].filter(Boolean);
}

// `page` has key(); chosen(), the name of the conversation's model; choose(name); changed(), told
// when a model's state or the list has changed; notice(text).
export class Models {
  constructor(page) {
    this.page = page;
    this.list = [];
    this._rows = new Map(); // of each model by its name: {box, show}
    this._stated = new Map(); // the last state of each that was announced
    byId("models-open").addEventListener("click", () => {
      this.draw();
      byId("models").showModal();
    });
    byId("models-close").addEventListener("click", () => byId("models").close());
  }

  find(name) {
    return this.list.find(({ id, aliases = [] }) => id === name || aliases.includes(name));
  }

  // The name of the model for a conversation that has `wanted`, or of the usual one.
  pick(...wanted) {
    const able = this.list.filter(writes);
    for (const name of wanted) {
      const found = this.find(name);
      if (found && writes(found)) return found.id;
    }
    return (able.find(isLoaded) ?? able[0])?.id ?? "";
  }

  async refresh() {
    const { data } = await getJson("v1/models", this.page.key());
    this.list = data;
    this._told();
  }

  // Follows the server's events, for as long as the page is open.
  async follow() {
    for (;;) {
      try {
        const response = await openStream("models/sse", this.page.key());
        for await (const data of events(response.body)) {
          if (data) await this._take(JSON.parse(data));
        }
      } catch {
        // the server has gone, or was stopped
      }
      await new Promise((resolve) => setTimeout(resolve, RETRY_MS));
      await this.refresh().catch(() => {});
    }
  }

  async _take({ model: name, event, data }) {
    const model = this.find(name);
    const busy = ["loading", "downloading"].includes(data?.status);
    if (!model || event !== "model_status" || !busy) return this.refresh();
    model.status = { value: data.status, progress: data.progress };
    this._told();
  }

  _told() {
    for (const model of this.list) {
      const before = this._stated.get(model.id);
      const state = model.status?.failed ? "failed" : stateOf(model);
      if (before && before !== state) announce(`${model.id}: ${stateInWords(model)}`);
      this._stated.set(model.id, state);
    }
    this.draw();
    this.page.changed();
  }

  // Rows that are there already are changed in place, so that the focus stays.
  draw() {
    const names = this.list.map(({ id }) => id);
    for (const name of this._rows.keys()) if (!names.includes(name)) this._rows.delete(name);
    const boxes = this.list.map((model) => {
      if (!this._rows.has(model.id)) this._rows.set(model.id, this._row(model.id));
      const row = this._rows.get(model.id);
      row.show(model);
      return row.box;
    });
    const box = byId("models-list");
    const shown = [...box.children].slice(1); // behind the legend
    if (boxes.length !== shown.length || boxes.some((each, i) => each !== shown[i]))
      box.replaceChildren(box.firstElementChild, ...boxes);
  }

  _row(name) {
    const hint = el("span", { class: "hint", id: `model-${newId()}` });
    const radio = el("input", {
      type: "radio",
      name: "model",
      value: name,
      onchange: () => this.page.choose(name),
      "aria-describedby": hint.id,
    });
    const act = button("Load", () => this._act(name));
    const show = (model) => {
      radio.checked = name === this.page.chosen();
      radio.disabled = !writes(model);
      hint.textContent = [stateInWords(model), ...facts(model)].join(" · ");
      hint.classList.toggle("wrong", Boolean(model.status?.failed));
      act.textContent = isLoaded(model) ? "Unload" : isBusy(model) ? "Cancel" : "Load";
      act.setAttribute("aria-label", `${act.textContent} ${name}`);
    };
    const box = el("div", { class: "model" }, el("label", {}, radio, ` ${name}`), hint, act);
    return { box, show };
  }

  async _act(name) {
    const model = this.find(name);
    const path = isLoaded(model) || isBusy(model) ? "models/unload" : "models/load";
    try {
      await postJson(path, { model: name }, this.page.key());
    } catch ({ message }) {
      this.page.notice(message);
    }
    await this.refresh().catch(() => {});
  }
}
