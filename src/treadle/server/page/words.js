// What the page says of an answer beside its text.

// What there is to say of a message's state.
export function remark(node) {
  if (node.error) return node.error;
  if (node.state === "stopped") return "Stopped.";
  if (node.state === "writing" && !node.content && !node.reasoning) {
    const { processed, total, queue } = node.progress ?? {};
    if (queue) return `Place ${queue} in the queue`;
    return total
      ? `Reading the prompt: ${processed} of ${total} tokens`
      : "Waiting for the first token…";
  }
  if (node.finish === "length") return "The answer stops at the limit of tokens.";
  return "";
}

// What an answer cost.
export function figures({ timings: t }) {
  if (!t) return "";
  const parts = [`${t.predicted_n} tokens`];
  if (t.predicted_per_second) parts.push(`${t.predicted_per_second.toFixed(1)} tokens/s`);
  const n_prompt = t.cache_n + t.prompt_n;
  const files = t.cache?.files ? ` (${t.cache.files} from files)` : "";
  if (n_prompt) parts.push(`prompt ${n_prompt}, of it ${t.cache_n} from the cache${files}`);
  if (t.prompt_per_second) parts.push(`read at ${t.prompt_per_second.toFixed(0)} tokens/s`);
  const left = leaving(t.cache ?? {});
  return [...parts, ...(left ? [left] : [])].join(" · ");
}

const WHY = {
  off: "this answer was to use nothing of it",
  new: "no text went on like this",
  evicted: "it had given way to others",
  window: "its window was gone",
  state: "this model's state was not kept for this place",
  room: "there was no room to hold it",
  damaged: "its file was damaged",
  "other model": "its file is of another model",
};

// Where a prompt left the cache, and why; nothing where all was found that could be.
function leaving({ left_at, piece, why }) {
  if (typeof left_at !== "number" || why === "end" || !why) return "";
  return `left the cache at token ${left_at}, “${piece}”: ${WHY[why] ?? why}`;
}
