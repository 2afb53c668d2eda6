// Elements, made without HTML: text is text.

// el("p", {class: "x", onclick: f}, "text", child)
export function el(tag, attributes = {}, ...children) {
  const made = document.createElement(tag);
  for (const [name, value] of Object.entries(attributes)) {
    if (name.startsWith("on")) made.addEventListener(name.slice(2), value);
    else if (name === "value") made.value = value;
    else if (value === true) made.setAttribute(name, "");
    else if (value !== false && value !== null && value !== undefined)
      made.setAttribute(name, value);
  }
  made.append(...children.filter((child) => child !== null && child !== undefined));
  return made;
}

export const button = (label, act, attributes = {}) =>
  el("button", { type: "button", onclick: act, ...attributes }, label);

export const byId = (id) => document.getElementById(id);

// Said to those who hear the page instead of seeing it.
export function announce(text) {
  byId("status").textContent = text;
}

// Copies a text, and says so on the button that was pressed.
export async function copy(text, pressed) {
  const before = pressed.textContent;
  const copied = await clip(text);
  pressed.textContent = copied ? "Copied" : "Not allowed";
  announce(copied ? "Copied" : "The browser does not allow copying");
  setTimeout(() => (pressed.textContent = before), 1500);
}

async function clip(text) {
  try {
    await navigator.clipboard.writeText(text);
    return true;
  } catch {
    // over plain HTTP from another machine there is no clipboard
    const area = el("textarea", { class: "unseen", value: text, "aria-hidden": "true" });
    document.body.append(area);
    const focused = document.activeElement;
    area.select();
    const copied = document.execCommand("copy");
    area.remove();
    focused?.focus();
    return copied;
  }
}

// Has the browser save a text as a file.
export function download(name, text) {
  const url = URL.createObjectURL(new Blob([text], { type: "application/json" }));
  el("a", { href: url, download: name }).click();
  setTimeout(() => URL.revokeObjectURL(url), 1000);
}
