// Talking with the server: requests, streams of events, errors in words.

const SILENT_MS = 30000; // the server sends something each second: after so long it is gone

export class ServerError extends Error {
  constructor(message, { status = 0, code = "", retryS = 0 } = {}) {
    super(message);
    Object.assign(this, { status, code, retryS });
  }
}

const headers = (key) => ({
  "content-type": "application/json",
  ...(key && { authorization: `Bearer ${key}` }),
});

async function send(path, options) {
  let response;
  try {
    response = await fetch(new URL(path, document.baseURI), { cache: "no-store", ...options });
  } catch (error) {
    if (error.name === "AbortError") throw error;
    throw new ServerError("The server does not respond. Is “treadle serve” running?");
  }
  if (!response.ok) throw await refusal(response);
  return response;
}

async function refusal(response) {
  const found = await response.json().catch(() => ({}));
  return inWords(
    found.error ?? {},
    response.status,
    Number(response.headers.get("retry-after")) || 0,
  );
}

// What the server's error object means to somebody who only wanted to talk.
function inWords(error, status = 0, retryS = 0) {
  const said = String(error.message ?? `status ${status}`);
  const told = { status, code: error.code ?? "", retryS };
  if (status === 401) return new ServerError("This server requires an API key.", told);
  if (error.type === "exceed_context_size_error" && error.n_ctx) {
    return new ServerError(
      `The conversation is too long: ${error.n_prompt_tokens} tokens, context ${error.n_ctx}. ` +
        "Shorten an earlier message, or start the server with a larger --context.",
      told,
    );
  }
  if (error.code === "loading") return new ServerError("The model is still loading.", told);
  if (error.code === "overloaded") return new ServerError(`The server is busy: ${said}.`, told);
  return new ServerError(said.charAt(0).toUpperCase() + said.slice(1), told);
}

export async function getJson(path, key) {
  return (await send(path, { headers: headers(key) })).json();
}

export async function postJson(path, body, key) {
  const options = { method: "POST", headers: headers(key), body: JSON.stringify(body) };
  return (await send(path, options)).json();
}

// A response whose body is a stream of events.
export const openStream = (path, key) => send(path, { headers: headers(key) });

// Runs a tool of the server's own servers; `given` is the JSON that the model wrote, `of` names the
// model where the server has several.
export const runTool = (name, given, of, key) =>
  postJson("v1/mcp/call", { ...of, name, arguments: given }, key);

// Ends the reasoning of the answer `id`, which is being written.
export async function endReasoning(id, key) {
  await postJson("v1/chat/completions/control", { id, action: "reasoning_end" }, key);
}

// The data of a response's server-sent events; null for each comment, which only shows that the
// server is alive.
export async function* events(body) {
  const reader = body.pipeThrough(new TextDecoderStream()).getReader();
  let held = "";
  try {
    for (;;) {
      const { done, value } = await inTime(reader.read());
      if (done) return;
      const lines = (held + value).split("\n");
      held = lines.pop();
      for (const line of lines) {
        if (line.startsWith("data: ")) yield line.slice(6);
        else if (line.startsWith(":")) yield null;
      }
    }
  } finally {
    reader.cancel().catch(() => {});
  }
}

function inTime(promise) {
  let timer;
  const late = new Promise((_, reject) => {
    timer = setTimeout(
      () => reject(new ServerError("Connection lost: no data for 30 s.")),
      SILENT_MS,
    );
  });
  return Promise.race([promise, late]).finally(() => clearTimeout(timer));
}

const megabytes = (n) => `${(n / 1e6).toFixed(1)} MB`;

// An answer as it is written. Yields objects with some of: id, text, reasoning, calls, tokens,
// timings, usage, progress, warnings, finish; an empty one where the server only shows that it is
// alive.
// `most`: bytes of a request that the server takes, if it says so.
export async function* answer(path, body, { key, signal, most = Infinity }) {
  const sent = new Blob([JSON.stringify(body)]);
  if (sent.size > most) {
    // The server may end the connection before it could answer that.
    throw new ServerError(
      `The conversation is ${megabytes(sent.size)} with its pictures and files: the server takes ` +
        `${megabytes(most)}. Start a new conversation, or delete messages that have them.`,
      { status: 413 },
    );
  }
  const response = await send(path, { method: "POST", headers: headers(key), body: sent, signal });
  const read = path.endsWith("completions") ? fromChat : fromCompletion;
  let ended = false;
  try {
    for await (const data of events(response.body)) {
      if (data === null) yield {};
      else if (data === "[DONE]") return;
      else {
        const event = JSON.parse(data);
        if (event.error) throw inWords(event.error);
        const told = read(event);
        ended ||= Boolean(told.finish);
        yield told;
      }
    }
  } catch (error) {
    if (error.name === "AbortError" || error instanceof ServerError) throw error;
    throw new ServerError("Connection lost.");
  }
  if (!ended) throw new ServerError("Connection lost: the answer is incomplete.");
}

function fromChat(event) {
  const [choice] = event.choices ?? [];
  const delta = choice?.delta ?? {};
  return {
    id: event.id,
    text: delta.content ?? "",
    reasoning: delta.reasoning_content ?? "",
    calls: delta.tool_calls ?? [],
    tokens: (choice?.logprobs?.content ?? []).map(compact),
    finish: choice?.finish_reason,
    ...shared(event),
  };
}

function fromCompletion(event) {
  return {
    text: event.content ?? "",
    tokens: (event.completion_probabilities ?? []).map(compact),
    finish: event.stop ? ({ limit: "length" }[event.stop_type] ?? "stop") : undefined,
    ...(event.stop && {
      usage: { prompt_tokens: event.tokens_evaluated, completion_tokens: event.tokens_predicted },
    }),
    ...shared(event),
  };
}

// What both kinds of stream have beside the text, where this server sends it.
function shared(event) {
  return {
    ...(event.timings && { timings: event.timings }),
    ...(event.usage && { usage: event.usage }),
    ...(event.prompt_progress && { progress: event.prompt_progress }),
    ...(event.warnings && { warnings: event.warnings }),
  };
}

// [text, logarithm of its probability, [[text, logarithm], ...]]: they are many, and are kept.
const compact = (entry) => [
  entry.token,
  entry.logprob,
  (entry.top_logprobs ?? []).map((top) => [top.token, top.logprob]),
];
