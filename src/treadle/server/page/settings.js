// What can be set: a row for each setting, from which the form and the request are made. An empty
// field leaves the choice to the server, whose own value it shows.

import { el } from "./element.js";

const row = (name, label, hint, kind = "number") => ({ name, label, hint, kind });

export const GROUPS = [
  [
    "Answers",
    [
      row("mode", "Mode", "Talk by the model's chat template, or let it go on with a text.", [
        "",
        "chat",
        "text",
      ]),
      row("max_tokens", "Most tokens", "The room left, if empty."),
      row("stop", "Stop texts", "One a line; \\n is a line break.", "lines"),
      row("seed", "Seed", "Makes an answer repeatable; -1 is a new one each time."),
      row("thinking", "Reasoning", "For models that can be told to reason, or not to.", [
        "",
        "on",
        "off",
      ]),
      row("reasoning_effort", "Reasoning effort", "For models that know it.", [
        "",
        "low",
        "medium",
        "high",
      ]),
      row(
        "alternatives",
        "Alternatives of each token",
        "Keeps so many, 1 to 20, to be looked at and taken.",
      ),
    ],
  ],
  [
    "Sampling",
    [
      row(
        "temperature",
        "Temperature",
        "Above 1 bolder, below 1 safer; 0 always takes the likeliest.",
      ),
      row("top_k", "Top k", "Keeps the k likeliest tokens; 0 keeps all."),
      row("top_p", "Top p", "Keeps the likeliest until they reach p; 1 keeps all."),
      row("min_p", "Min p", "Keeps tokens this fraction as likely as the likeliest; 0 keeps all."),
      row("typical_p", "Typical p", "Locally typical sampling; 1 is off."),
      row("top_n_sigma", "Top n sigma", "Keeps logits n deviations from the best; below 0 is off."),
      row("min_keep", "Keep at least", "Truncation leaves at least this many tokens."),
      row("xtc_probability", "XTC probability", "How often XTC drops the likeliest; 0 is off."),
      row("xtc_threshold", "XTC threshold", "What is likely, to XTC."),
      row("dynatemp_range", "Dynamic temperature", "Temperature plus or minus this, by entropy."),
      row("dynatemp_exponent", "Its exponent", "How the entropy is mapped to it."),
      row("samplers", "Order of the stages", "Names, with semicolons between.", "text"),
      row(
        "logit_bias",
        "Bias of tokens",
        'JSON: {"123": -5}, or [["word", false]] to forbid.',
        "json",
      ),
      row("ignore_eos", "Never end early", "Goes on until the most tokens are written.", "flag"),
    ],
  ],
  [
    "Repetition",
    [
      row("repeat_last_n", "Look back", "How many tokens the penalties look at; -1 is everything."),
      row("repeat_penalty", "Repeat penalty", "Divides the logits of repeated tokens; 1 is off."),
      row("presence_penalty", "Presence penalty", "Taken from every repeated token."),
      row("frequency_penalty", "Frequency penalty", "Taken for every time it was repeated."),
      row("dry_multiplier", "DRY", "Penalty on repeated sequences; 0 is off."),
      row("dry_base", "DRY base", "How fast that penalty grows with the sequence."),
      row("dry_allowed_length", "DRY allowed length", "The longest sequence that costs nothing."),
      row("dry_penalty_last_n", "DRY look back", "How far back DRY looks; -1 is everything."),
      row(
        "dry_sequence_breakers",
        "DRY breakers",
        "One a line; no repetition reaches across them.",
        "lines",
      ),
    ],
  ],
  [
    "Mirostat and adaptive p",
    [
      row("mirostat", "Mirostat", "1 or 2 hold the surprise of the text; 0 is off."),
      row("mirostat_tau", "Mirostat surprise", "The surprise that it holds."),
      row("mirostat_eta", "Mirostat rate", "How fast it learns."),
      row("adaptive_target", "Adaptive target", "Prefers tokens this likely; below 0 is off."),
      row("adaptive_decay", "Adaptive decay", "How slowly it forgets."),
    ],
  ],
  [
    "Form and tools",
    [
      row("json_schema", "JSON schema", "The answer is JSON of this schema.", "json"),
      row("grammar", "Grammar", "The answer is what this GBNF allows.", "area"),
      row("tools", "Tools", "JSON, a list as OpenAI has it; you give the results.", "json"),
    ],
  ],
];
const ROWS = GROUPS.flatMap(([, rows]) => rows);
// Those that are not fields of every request.
const OURS = new Set([
  "mode",
  "thinking",
  "alternatives",
  "tools",
  "json_schema",
  "reasoning_effort",
]);

const lines = (text) =>
  text
    .split("\n")
    .filter(Boolean)
    .map((line) => line.replaceAll("\\n", "\n"));
const KINDS = {
  // from what was typed to a value; throws where it is none
  number: (text) => {
    if (!Number.isFinite(Number(text))) throw new Error("a number, please");
    return Number(text);
  },
  text: (text) => text,
  area: (text) => text,
  lines,
  flag: () => true,
  json: (text) => {
    try {
      return JSON.parse(text);
    } catch {
      throw new Error("this is no JSON");
    }
  },
};

// The values of all settings that are set; `typed` is name to text.
function values(typed) {
  const found = {};
  for (const { name, kind } of ROWS) {
    const text = typed[name];
    if (text) found[name] = Array.isArray(kind) ? text : KINDS[kind](text);
  }
  return found;
}

// Whether a text is gone on with, instead of talking: for models that know no conversation.
export const completes = (typed, server) =>
  typed.mode ? typed.mode === "text" : server.treadle?.builtin_template === "plain";

function shared(set) {
  const body = { stream: true, timings_per_token: true, return_progress: true };
  for (const [name, value] of Object.entries(set)) if (!OURS.has(name)) body[name] = value;
  return body;
}

// The body of a request that goes on with a text, but for the text.
export function completion(typed) {
  const set = values(typed);
  const body = shared(set);
  if (set.json_schema) body.json_schema = set.json_schema;
  if (set.alternatives) body.n_probs = set.alternatives;
  return body;
}

// The body of a request that talks, but for the messages.
export function chat(typed) {
  const set = values(typed);
  const body = { ...shared(set), stream_options: { include_usage: true } };
  if (set.json_schema)
    body.response_format = { type: "json_schema", json_schema: { schema: set.json_schema } };
  if (set.alternatives) Object.assign(body, { logprobs: true, top_logprobs: set.alternatives });
  if (set.tools) body.tools = set.tools;
  if (set.reasoning_effort) body.reasoning_effort = set.reasoning_effort;
  if (set.thinking) body.chat_template_kwargs = { enable_thinking: set.thinking === "on" };
  return body;
}

// Fills `box` with the form; `changed(name, text)` is told of each change that can be read.
export function show(box, typed, server, changed) {
  const defaults = server.default_generation_settings?.params ?? {};
  box.replaceChildren(
    ...GROUPS.map(([title, rows]) =>
      el(
        "fieldset",
        {},
        el("legend", {}, title),
        ...rows.map((each) => field(each, typed, defaults, changed)),
      ),
    ),
  );
}

function field({ name, label, hint, kind }, typed, defaults, changed) {
  const id = `set-${name}`;
  const shared = { id, name, "aria-describedby": `${id}-hint` };
  const value = typed[name] ?? "";
  const own = defaults[name];
  const placeholder =
    own === undefined
      ? ""
      : Array.isArray(own)
        ? own
            .map((each) => String(each).replaceAll("\n", "\\n"))
            .join(kind === "lines" ? "\n" : ";")
        : String(own);
  let input;
  if (Array.isArray(kind)) {
    input = el(
      "select",
      shared,
      ...kind.map((each) =>
        el("option", { value: each, selected: each === value }, each || "as the model likes"),
      ),
    );
  } else if (kind === "flag") {
    input = el("input", { ...shared, type: "checkbox", checked: Boolean(value) });
  } else if (["lines", "area", "json"].includes(kind)) {
    input = el("textarea", { ...shared, rows: 2, value, placeholder, spellcheck: "false" });
  } else {
    input = el("input", {
      ...shared,
      type: "text",
      value,
      placeholder,
      autocomplete: "off",
      inputmode: kind === "number" ? "decimal" : "text",
    });
  }
  const wrong = el("span", { class: "wrong", role: "alert" });
  input.addEventListener("change", () => {
    const text = kind === "flag" ? (input.checked ? "yes" : "") : input.value.trim();
    try {
      if (text && !Array.isArray(kind)) KINDS[kind](text);
      wrong.textContent = "";
      input.removeAttribute("aria-invalid");
      changed(name, text);
    } catch (error) {
      wrong.textContent = error.message;
      input.setAttribute("aria-invalid", "true");
    }
  });
  return el(
    "div",
    { class: "field" },
    el("label", { for: id }, label),
    input,
    el("span", { class: "hint", id: `${id}-hint` }, hint),
    wrong,
  );
}

// How many settings differ from the server's, to be shown beside their button.
export const nSet = (typed) => ROWS.filter(({ name }) => typed[name]).length;
