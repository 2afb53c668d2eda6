// Markdown to elements that are safe to show. HTML in a text stays text; images become links, so
// that nothing is fetched. DOMPurify has the last word.

import { Marked } from "./vendor/marked.esm.js";
import DOMPurify from "./vendor/purify.es.mjs";
import hljs from "./vendor/highlight.min.js";
import { button, copy, el } from "./element.js";

const MOST_COLOURED = 50000; // characters of a block of code
const TAGS = [
  "p",
  "br",
  "hr",
  "h2",
  "h3",
  "h4",
  "h5",
  "h6",
  "strong",
  "em",
  "del",
  "code",
  "pre",
  "blockquote",
  "ul",
  "ol",
  "li",
  "table",
  "thead",
  "tbody",
  "tr",
  "th",
  "td",
  "a",
];
const SAFE = {
  ALLOWED_TAGS: TAGS,
  ALLOWED_ATTR: ["href", "title", "start", "align", "class"],
  ALLOW_DATA_ATTR: false,
  ALLOW_ARIA_ATTR: false,
  ALLOWED_URI_REGEXP: /^(https?|mailto):/i,
  RETURN_DOM_FRAGMENT: true,
};
const COLOURS = { ALLOWED_TAGS: ["span"], ALLOWED_ATTR: ["class"], RETURN_DOM_FRAGMENT: true };

const escaped = (text) =>
  text.replace(
    /[&<>"']/g,
    (c) => ({ "&": "&amp;", "<": "&lt;", ">": "&gt;", '"': "&quot;", "'": "&#39;" })[c],
  );

const marked = new Marked({
  gfm: true,
  renderer: {
    html: ({ text }) => escaped(text),
    image: ({ href, text }) => `<a href="${escaped(href)}">${escaped(text || href)}</a>`,
    checkbox: ({ checked }) => (checked ? "☑ " : "☐ "),
    heading({ tokens, depth }) {
      const level = Math.min(6, depth + 2); // the page has h1 and h2
      return `<h${level}>${this.parser.parseInline(tokens)}</h${level}>`;
    },
    code: ({ text, lang }) => {
      const language = (lang ?? "").match(/^[\w+#.-]{1,30}/)?.[0] ?? "";
      return `<pre><code class="language-${language}">${escaped(text)}</code></pre>`;
    },
  },
});

// A text that grows. Only blocks that have changed are made anew, so a long answer stays quick.
export class Markdown {
  constructor() {
    this.box = el("div", { class: "markdown" });
    this._blocks = [];
  }

  // Shows `text`; code is coloured where its block is whole, all of it if `last`.
  show(text, last) {
    const tokens = marked.lexer(text);
    const again = last && Object.keys(tokens.links).length > 0; // a link's target may come late
    const shown = tokens.filter((token) => token.type !== "space" && token.type !== "def");
    shown.forEach((token, i) => {
      const whole = last || i < shown.length - 1;
      const old = this._blocks[i];
      if (old && old.raw === token.raw && old.whole === whole && !again) return;
      const node = block(token, whole);
      if (old) old.node.replaceWith(node);
      else this.box.append(node);
      this._blocks[i] = { raw: token.raw, whole, node };
    });
    for (const { node } of this._blocks.splice(shown.length)) node.remove();
  }
}

function block(token, whole) {
  const box = el("div", { class: "block" }, DOMPurify.sanitize(marked.parser([token]), SAFE));
  for (const link of box.querySelectorAll("a")) {
    link.target = "_blank";
    link.rel = "noopener noreferrer nofollow";
  }
  for (const pre of box.querySelectorAll("pre")) frame(pre, whole);
  for (const table of box.querySelectorAll("table")) {
    const scroll = el("div", {
      class: "scroll",
      tabindex: 0,
      role: "region",
      "aria-label": "Table",
    });
    table.replaceWith(scroll);
    scroll.append(table);
  }
  return box;
}

// Code with its language and a button that copies it.
function frame(pre, whole) {
  const code = pre.querySelector("code");
  const text = code.textContent;
  const language = code.className.replace("language-", "");
  const head = el("div", { class: "code-head" }, el("span", {}, language || "text"));
  const action = button("Copy", (event) => copy(text, event.currentTarget), {
    "aria-label": "Copy code",
  });
  head.append(action);
  pre.replaceWith(el("div", { class: "code" }, head, pre.cloneNode(false)));
  const inside = head.nextSibling;
  inside.tabIndex = 0; // it scrolls, also by the keyboard
  inside.append(code);
  if (whole && language && text.length < MOST_COLOURED && hljs.getLanguage(language)) {
    const html = hljs.highlight(text, { language, ignoreIllegals: true }).value;
    code.replaceChildren(DOMPurify.sanitize(html, COLOURS));
  }
}
