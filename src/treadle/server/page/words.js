// Status line and statistics of an answer.

// The status of a message: its error, its place in the queue, or how far its prompt is.
export function remark(node) {
  if (node.error) return node.error;
  if (node.state === "stopped") return "Stopped";
  if (node.state === "writing" && !node.content && !node.reasoning) {
    return waiting(node.progress ?? {});
  }
  const ended = node.finish === "length" ? "Stopped at the token limit" : "";
  return [ended, node.warning].filter(Boolean).join(" · ");
}

function waiting({ processed, total, queue, media, reads }) {
  if (queue) return `Queued at position ${queue}`;
  const files = media ? encoding(media, reads) : reads ? `Reading ${reads}s…` : "";
  const prompt = total ? `Processing the prompt: ${processed} of ${total} tokens` : "";
  return [files, prompt].filter(Boolean).join(" · ") || "Waiting for the first token…";
}

// How far the server is with a prompt's pictures and sounds; empty once it has read all.
function encoding({ total, encoded, encoding_ms: ms }, reads) {
  if (encoded >= total) return "";
  const took = ms >= 1000 ? `, ${Math.round(ms / 1000)} s` : "";
  return `Reading ${reads || "picture"} ${encoded + 1} of ${total}${took}`;
}

// Statistics of an answer: tokens, speed, prompt, reuse of the prefix cache.
export function figures({ timings: t, reads }) {
  if (!t) return "";
  const parts = [`${t.predicted_n} tokens`];
  if (t.predicted_per_second) parts.push(`${t.predicted_per_second.toFixed(1)} tokens/s`);
  const n_prompt = t.cache_n + t.prompt_n;
  const files = t.cache?.files ? ` (${t.cache.files} from disk)` : "";
  if (n_prompt) parts.push(`Prompt tokens: ${n_prompt}`, `Reused from cache: ${t.cache_n}${files}`);
  if (t.prompt_per_second) parts.push(`Prompt speed: ${t.prompt_per_second.toFixed(0)} tokens/s`);
  if (t.media_ms)
    parts.push(`Reading ${reads || "picture"}s: ${(t.media_ms / 1000).toFixed(1)} s`);
  const left = leaving(t.cache ?? {});
  return [...parts, ...(left ? [left] : [])].join(" · ");
}

const WHY = {
  off: "caching was off for this request",
  new: "no cached text continues this way",
  evicted: "the rest was evicted",
  window: "the sliding window before it is no longer cached",
  state: "no recurrent state was saved at this position",
  room: "the cache is full",
  damaged: "the cache file is damaged",
  "other model": "the cache file belongs to another model",
};

// Where reuse of the cache ended, and why; empty if everything that can be cached was found.
function leaving({ left_at, piece, why }) {
  if (typeof left_at !== "number" || why === "end" || !why) return "";
  return `Reuse ended at token ${left_at} (“${piece}”): ${WHY[why] ?? why}`;
}
