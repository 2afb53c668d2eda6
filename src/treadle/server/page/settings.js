// Settings: one row each, from which the form and the request are made. An empty field uses the
// server's default, which is shown in grey.

import { el } from "./element.js";

const row = (name, label, hint, kind = "number") => ({ name, label, hint, kind });

export const GROUPS = [
  [
    "Generation",
    [
      row(
        "mode",
        "Mode",
        "chat: use the model's chat template; text: continue the text as it is.",
        ["", "chat", "text"],
      ),
      row("max_tokens", "Max tokens", "Empty: up to the end of the context."),
      row("stop", "Stop sequences", "One per line; \\n is a line break.", "lines"),
      row("seed", "Seed", "The same seed repeats an answer; -1 draws a new one each time."),
      row("thinking", "Reasoning", "Turn reasoning on or off, for models that support it.", [
        "",
        "on",
        "off",
      ]),
      row("reasoning_effort", "Reasoning effort", "For models that support it.", [
        "",
        "low",
        "medium",
        "high",
      ]),
      row("alternatives", "Top log probabilities", "Alternatives to show for each token, 1 to 20."),
    ],
  ],
  [
    "Sampling",
    [
      row(
        "temperature",
        "Temperature",
        "Higher is more random; 0 always picks the most likely token.",
      ),
      row("top_k", "Top k", "Keep the k most likely tokens; 0 disables."),
      row(
        "top_p",
        "Top p",
        "Keep the most likely tokens up to a total probability of p; 1 disables.",
      ),
      row(
        "min_p",
        "Min p",
        "Keep tokens at least this fraction as likely as the best; 0 disables.",
      ),
      row("typical_p", "Typical p", "Locally typical sampling; 1 disables."),
      row(
        "top_n_sigma",
        "Top n sigma",
        "Keep logits within n standard deviations of the best; below 0 disables.",
      ),
      row("min_keep", "Min keep", "Truncation keeps at least this many tokens."),
      row(
        "xtc_probability",
        "XTC probability",
        "Chance that XTC removes the top tokens; 0 disables.",
      ),
      row("xtc_threshold", "XTC threshold", "Minimum probability of a token that XTC may remove."),
      row(
        "dynatemp_range",
        "Dynamic temperature",
        "Temperature varies by plus or minus this, with the entropy.",
      ),
      row("dynatemp_exponent", "Dynamic temperature exponent", "Maps entropy to temperature."),
      row("samplers", "Sampler order", "Names, separated by semicolons.", "text"),
      row("logit_bias", "Logit bias", 'JSON: {"123": -5}, or [["word", false]] to forbid.', "json"),
      row("ignore_eos", "Ignore end of text", "Generate until max tokens is reached.", "flag"),
    ],
  ],
  [
    "Repetition",
    [
      row(
        "repeat_last_n",
        "Repeat last n",
        "Tokens that the penalties consider; -1 is the whole context.",
      ),
      row("repeat_penalty", "Repeat penalty", "Divides the logits of repeated tokens; 1 disables."),
      row(
        "presence_penalty",
        "Presence penalty",
        "Subtracted once from the logit of a token that has occurred.",
      ),
      row("frequency_penalty", "Frequency penalty", "Subtracted for each occurrence of the token."),
      row("dry_multiplier", "DRY multiplier", "Penalty on repeated sequences; 0 disables."),
      row("dry_base", "DRY base", "How fast the penalty grows with the length of the sequence."),
      row(
        "dry_allowed_length",
        "DRY allowed length",
        "Longest repeated sequence without a penalty.",
      ),
      row(
        "dry_penalty_last_n",
        "DRY last n",
        "Tokens that DRY considers; -1 is the whole context.",
      ),
      row(
        "dry_sequence_breakers",
        "DRY sequence breakers",
        "One per line; repetitions are not counted across these.",
        "lines",
      ),
    ],
  ],
  [
    "Mirostat and adaptive p",
    [
      row("mirostat", "Mirostat", "Version 1 or 2 keeps the perplexity near a target; 0 disables."),
      row("mirostat_tau", "Mirostat tau", "Target entropy."),
      row("mirostat_eta", "Mirostat eta", "Learning rate."),
      row(
        "adaptive_target",
        "Adaptive target",
        "Prefers tokens near this probability; below 0 disables.",
      ),
      row("adaptive_decay", "Adaptive decay", "Weight of earlier tokens, 0 to 1."),
    ],
  ],
  [
    "Structured output and tools",
    [
      row("json_schema", "JSON schema", "The answer is JSON that matches this schema.", "json"),
      row("grammar", "Grammar", "The answer matches this grammar (GBNF).", "area"),
      row("tools", "Tools", "A JSON list in OpenAI's format; you type in the results.", "json"),
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
    if (!Number.isFinite(Number(text))) throw new Error("not a number");
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
      throw new Error("not valid JSON");
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
  const body = {
    ...shared(set),
    stream_options: { include_usage: true },
    reasoning_control: true,
  };
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
  const { reasoning } = server.treadle ?? {};
  const defaults = { ...server.default_generation_settings?.params };
  if (reasoning && reasoning !== "auto") defaults.thinking = reasoning;
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
        el(
          "option",
          { value: each, selected: each === value },
          each || (own === undefined ? "default" : `default (${own})`),
        ),
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
