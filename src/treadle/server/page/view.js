// Messages as elements. One that has not changed keeps its element, and with it the focus.

import { button, byId, copy, el } from "./element.js";
import { fileViews } from "./files.js";
import { Markdown } from "./markdown.js";
import { pictureViews } from "./pictures.js";
import { soundViews } from "./sounds.js";
import { siblings, unanswered } from "./talk.js";
import { tokenView } from "./tokens.js";
import { figures, remark } from "./words.js";

const NEAR = 80; // pixels from the end: whoever reads further up is not moved

export class View {
  // `actions` are what buttons do: again, edit, enlarge, reply, resume, remove, turn, result, take.
  constructor(log, actions) {
    Object.assign(this, { log, actions });
    this._shown = new Map(); // of each message: {key, box, body, grow}
    this._pending = new Set();
    this._cost = 0;
    log.addEventListener("scroll", () => (byId("newest").hidden = this._near()));
  }

  // Shows these messages of a conversation.
  show(talk, nodes) {
    const focus = this._focus();
    const follow = this._near();
    const fresh = new Map();
    nodes.forEach((node, i) => {
      const place = siblings(talk, node);
      const last = i === nodes.length - 1;
      const open = unanswered(talk, node);
      const key = JSON.stringify([
        place.map((each) => each.id),
        last,
        open.length,
        node.state,
        node.error,
        node.finish,
        node.calls,
        node.state === "writing" ? 0 : node.content,
      ]);
      const old = this._shown.get(node.id);
      fresh.set(
        node.id,
        old?.key === key ? old : { key, ...this._message(node, place, last, open, old?.body) },
      );
    });
    this._shown = fresh;
    const boxes = [...fresh.values()].map(({ box }) => box);
    for (const child of [...this.log.children]) if (!boxes.includes(child)) child.remove();
    boxes.forEach((box, i) => {
      if (this.log.children[i] !== box) this.log.insertBefore(box, this.log.children[i] ?? null);
    });
    if (follow) this.toEnd();
    if (focus) this._refocus(focus);
  }

  // A message has grown. Drawing takes at most a fifth of the time, however long the text is.
  grow(node) {
    if (!this._pending.size)
      setTimeout(() => requestAnimationFrame(() => this._draw()), Math.max(40, 4 * this._cost));
    this._pending.add(node);
  }

  _draw() {
    const began = performance.now();
    const follow = this._near();
    for (const node of this._pending) this._shown.get(node.id)?.grow(node);
    this._pending.clear();
    if (follow) this.toEnd();
    this._cost = performance.now() - began;
  }

  toEnd() {
    this.log.scrollTop = this.log.scrollHeight;
  }

  _near() {
    return this.log.scrollHeight - this.log.scrollTop - this.log.clientHeight < NEAR;
  }

  // What has the focus in a message, for `_refocus` once it is drawn anew; null if nothing has.
  _focus() {
    const at = document.activeElement;
    const box = at && this.log.contains(at) && at.closest(".message");
    if (!box || !at.dataset.does) return null;
    const place = `#${CSS.escape(box.id)} [data-does="${at.dataset.does}"]`;
    return { place, from: at.selectionStart, to: at.selectionEnd };
  }

  _refocus({ place, from, to }) {
    const found = this.log.querySelector(place) ?? byId("entry");
    found.focus();
    if (found.matches("textarea") && found !== byId("entry")) found.setSelectionRange(from, to);
  }

  // `body` is the element of its text, where there is one already: what is selected in it stays so.
  _message(node, place, last, open, body = this._body(node)) {
    const writing = node.state === "writing";
    body.box.hidden = false; // its tokens may have stood there
    const who =
      { user: "You", tool: `Tool result: ${node.name || "unnamed tool"}` }[node.role] ??
      node.model ??
      "Assistant";
    const box = el(
      "article",
      {
        class: `message ${node.role}`,
        id: `m-${node.id}`,
        "aria-label": who,
        "aria-busy": String(writing),
      },
      el("div", { class: "row" }, el("strong", {}, who), this._branches(node, place)),
    );
    const buttons = el("div", { class: "row" }, this._buttons(node, last, body));
    if (node.role !== "assistant") {
      const shown = [...pictureViews(node, this.actions.enlarge), ...soundViews(node)];
      box.append(...shown, body.box, ...fileViews(node), buttons);
      body.show(node);
      return { box, body, grow: body.show };
    }
    const thought = el(
      "details",
      { class: "reasoning" },
      el("summary", {}),
      el("div", { class: "plain" }),
    );
    const calls = el("div", { class: "calls" });
    const note = el("p", { class: "note" });
    const stats = el("p", { class: "stats" });
    const waits = el("progress", { "aria-label": "Prompt progress", hidden: true });
    const now = button("Answer now", () => this.actions.answerNow(node), {
      "data-does": "answer-now",
    });
    box.append(thought, now, body.box, calls, waits, note, buttons);
    buttons.append(stats);
    const grow = (grown) => {
      body.show(grown);
      showThought(thought, grown);
      now.hidden = !(grown.answer && grown.reasoning && reasons(grown));
      const asked = grown.calls ?? [];
      const focus = this._focus();
      calls.replaceChildren(...asked.map((call) => this._call(grown, call, open.includes(call))));
      if (focus && !document.activeElement?.closest(".message")) this._refocus(focus);
      showWaiting(waits, grown);
      note.textContent = remark(grown);
      note.classList.toggle("wrong", Boolean(grown.error));
      stats.textContent = figures(grown);
    };
    grow(node);
    return { box, body, grow };
  }

  _body(node) {
    if (node.role !== "assistant" || node.mode === "text") {
      const box = el("div", { class: node.mode === "text" ? "plain code-text" : "plain" });
      return {
        box,
        show: (now) => {
          if (box.textContent !== now.content) box.textContent = now.content;
        },
      };
    }
    const markdown = new Markdown();
    return {
      box: markdown.box,
      show: (now) => markdown.show(now.content, now.state !== "writing"),
    };
  }

  _branches(node, place) {
    if (place.length < 2) return null;
    const at = place.indexOf(node);
    const turn = (label, sign, step) =>
      button(sign, () => this.actions.turn(node, step), {
        "aria-label": label,
        "data-does": label,
        disabled: !place[at + step],
      });
    return el(
      "span",
      { class: "branches" },
      turn("Previous version", "‹", -1),
      ` ${at + 1} of ${place.length} `,
      turn("Next version", "›", 1),
    );
  }

  _buttons(node, last, body) {
    if (node.state === "writing") return el("span", {});
    const act = (label, does, run) => button(label, run, { "data-does": does });
    const { actions } = this;
    const row = el(
      "span",
      { class: "actions" },
      act("Copy", "copy", (event) => copy(node.content, event.currentTarget)),
    );
    if (node.role !== "tool") row.append(act("Edit", "edit", () => this._edit(node, body.box)));
    if (node.role === "assistant") {
      row.append(act("Regenerate", "again", () => actions.again(node)));
      if (last && node.content && !node.calls?.length)
        row.append(act("Continue", "resume", () => actions.resume(node)));
      if (node.tokens?.length) {
        row.append(act("Tokens", "tokens", () => this._tokens(node, body.box)));
      }
    } else if (last) row.append(act("Generate answer", "answer", () => actions.reply(node)));
    row.append(act("Delete", "delete", () => actions.remove(node)));
    return row;
  }

  _tokens(node, body) {
    const there = body.parentNode.querySelector(".token-view");
    body.hidden = !there;
    if (there) return there.remove();
    body.after(tokenView(node, (prefix) => this.actions.take(node, prefix)));
    body.nextSibling.querySelector(".token").focus();
  }

  _edit(node, body) {
    const text = el("textarea", {
      value: node.content,
      rows: Math.min(15, node.content.split("\n").length + 1),
      "aria-label": "Edit message",
    });
    const back = () => {
      form.remove();
      body.hidden = false;
      byId(`m-${node.id}`)?.querySelector('[data-does="edit"]')?.focus();
    };
    const form = el(
      "form",
      {
        class: "edit",
        onsubmit: (event) => {
          event.preventDefault();
          back();
          this.actions.edit(node, text.value);
        },
        onkeydown: (event) => {
          if (event.key === "Escape") {
            event.stopPropagation();
            back();
          }
        },
      },
      text,
      el(
        "div",
        { class: "row" },
        button("Cancel", back),
        el("button", { type: "submit" }, node.role === "user" ? "Send" : "Save"),
      ),
    );
    body.hidden = true;
    body.after(form);
    text.focus();
  }

  _call(node, call, open) {
    let shown = call.arguments;
    try {
      shown = JSON.stringify(JSON.parse(call.arguments), null, 2);
    } catch {
      /* not whole yet */
    }
    const box = el(
      "div",
      { class: "call" },
      el("strong", {}, `Tool call: ${call.name}`),
      el("pre", { tabindex: 0 }, shown),
    );
    if (open && node.state === "done" && this.actions.isRunning(call)) {
      box.append(el("span", { role: "status" }, "Running…"));
    } else if (open && node.state === "done") {
      if (this.actions.canRun(call)) {
        const run = (always) => () => this.actions.run(node, call, always);
        box.append(
          button("Run once", run(false), { "data-does": "run" }),
          button("Always allow this tool", run(true), { "data-does": "allow" }),
        );
      }
      const text = el("textarea", {
        rows: 2,
        "aria-label": `Result of tool ${call.name}`,
        "data-does": `result-${node.calls.indexOf(call)}`, // who writes there goes on
      });
      text.value = typed.get(call) ?? "";
      text.addEventListener("input", () => typed.set(call, text.value));
      box.append(
        text,
        // What was written may be in a box that is no longer shown: see below.
        button("Submit result", () => this.actions.result(node, call, typed.get(call) ?? ""), {
          "data-does": "result",
        }),
      );
    }
    return box;
  }
}

// What has been written as a call's result: a message may be drawn anew meanwhile.
const typed = new WeakMap();

const reasons = (node) => node.state === "writing" && !node.content && !node.calls?.length;

function showThought(box, node) {
  box.hidden = !node.reasoning;
  if (box.hidden) return;
  const n_words = node.reasoning.trim().split(/\s+/).length;
  box.firstChild.textContent = `${reasons(node) ? "Reasoning…" : "Reasoning"} (${n_words} words)`;
  box.lastChild.textContent = node.reasoning;
}

function showWaiting(bar, node) {
  const { processed, total, queue } = node.progress ?? {};
  bar.hidden = !total || queue > 0 || Boolean(node.content || node.reasoning);
  if (!bar.hidden) Object.assign(bar, { max: total, value: processed });
}
