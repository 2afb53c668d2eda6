// The tokens of an answer, with the most likely alternatives of each.

import { button, el } from "./element.js";

const percent = (logprob) => {
  const p = 100 * Math.exp(logprob);
  return p >= 0.1 ? `${p.toFixed(1)} %` : "under 0.1 %";
};
const visible = (text) =>
  text.replaceAll("\n", "⏎").replaceAll("\t", "⇥").replaceAll(" ", "␣") || "(empty)";
// A button holds no line break: those at a token's ends stand beside it.
const inLine = (text) => text.replace(/^\n+|\n+$/g, "").replaceAll("\n", "⏎") || "⏎";
const breaks = (text, where) => text.match(where)?.[0] ?? "";
const level = (logprob) => `p${Math.min(4, Math.floor(-logprob / 0.7))}`; // halves of probability

// Where the text of each token begins in an answer's content; null where they do not make it up, as
// when a character has several tokens. `tokens` may begin with reasoning.
function starts(tokens, content) {
  const joined = tokens.map(([text]) => text).join("");
  const before = content ? joined.lastIndexOf(content) : -1;
  if (before < 0) return null;
  let at = -before;
  return tokens.map(([text]) => (at += text.length) - text.length);
}

// `take(prefix)` is called when somebody takes an alternative: the answer begins anew with it.
export function tokenView(node, take) {
  const panel = el(
    "div",
    { class: "alternatives", "aria-live": "polite" },
    "Select a token: click, or use the arrow keys.",
  );
  const at = starts(node.tokens, node.content);
  const boxes = node.tokens.map((token, i) =>
    button(inLine(token[0]), () => choose(i), {
      class: `token ${level(token[1])}`,
      tabindex: i ? -1 : 0,
      "aria-label": `${visible(token[0])}, ${percent(token[1])}`,
    }),
  );
  const row = el(
    "div",
    { class: "tokens", role: "group", "aria-label": "Tokens of this answer", onkeydown: walk },
    ...boxes.flatMap((box, i) => [
      breaks(node.tokens[i][0], /^\n+(?=[^\n])/),
      box,
      breaks(node.tokens[i][0], /\n+$/),
    ]),
  );

  function walk(event) {
    const step = { ArrowRight: 1, ArrowLeft: -1, ArrowDown: 10, ArrowUp: -10 }[event.key];
    const now = boxes.indexOf(document.activeElement);
    if (!step || now < 0) return;
    event.preventDefault();
    choose(Math.max(0, Math.min(boxes.length - 1, now + step)));
  }

  function choose(i) {
    for (const each of boxes) {
      each.tabIndex = -1;
      each.removeAttribute("aria-current");
    }
    boxes[i].tabIndex = 0;
    boxes[i].setAttribute("aria-current", "true");
    boxes[i].focus();
    const [own, , others] = node.tokens[i];
    const items = others.map(([text, logprob]) => {
      const said = `${visible(text)} ${percent(logprob)}`;
      const can = at && at[i] >= 0 && text !== own && !text.includes("\ufffd");
      return el(
        "li",
        {},
        can
          ? button(said, () => take(node.content.slice(0, at[i]) + text), {
              title: "Regenerate from this token",
            })
          : el("span", { class: text === own ? "own" : "" }, said),
      );
    });
    panel.replaceChildren(`Alternatives to “${visible(own)}”:`, el("ol", {}, ...items));
  }

  return el("div", { class: "token-view" }, panel, row);
}
