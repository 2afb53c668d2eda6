// One answer while it is written: from the request to the message that grows.

import { dataUrls, heldBy } from "./pictures.js";
import { answer, endReasoning } from "./stream.js";
import { chat, completion } from "./settings.js";
import { messages, path, text } from "./talk.js";

const SAVE_MS = 1000; // what is lost at most if the browser dies

// `told` has grow(node), save(talk), end(node, error).
export class Writer {
  constructor(talk, node, { server, servers, typed, key }, told) {
    Object.assign(this, { talk, node, server, servers, typed, key, told });
    this._abort = new AbortController();
    this._saved = 0;
    // What the message has that is answered; the server has kept what it read of earlier ones.
    const { pictures, sounds } = talk.nodes[node.parent] ?? {};
    const words = [...(pictures?.length ? ["picture"] : []), ...(sounds?.length ? ["sound"] : [])];
    this._reads = words.length > 1 ? "file" : (words[0] ?? "");
  }

  // Resolves when it has stopped.
  stop() {
    this._abort.abort();
    return this._ended;
  }

  // Ends the reasoning: the model answers now.
  async answerNow() {
    await endReasoning(this.node.answer, this.key);
  }

  // Stops, and keeps nothing: the conversation is deleted.
  forget() {
    this.told = { ...this.told, save: async () => {} };
    this.stop();
  }

  // Writes to the end. An answer that has content is gone on with.
  run() {
    return (this._ended = this._run());
  }

  async _run() {
    const { node } = this;
    let failed = null;
    try {
      if (node.calls?.length || !node.content)
        Object.assign(node, { content: "", reasoning: "", calls: [], tokens: [] });
      Object.assign(node, {
        state: "writing",
        finish: "",
        error: "",
        warning: "",
        progress: this._reads ? { reads: this._reads } : null,
        reads: this._reads,
        model: this.server.model_alias,
      });
      const [address, body] = await this._request();
      await this.told.save(this.talk);
      this.told.grow(node);
      const most = this.server.treadle?.max_body_bytes;
      const { signal } = this._abort;
      for await (const part of answer(address, body, { key: this.key, signal, most }))
        this._take(part);
      node.state = "done";
    } catch (error) {
      node.state = error.name === "AbortError" ? "stopped" : "broken";
      if (node.state === "broken") [failed, node.error] = [error, error.message];
    }
    node.progress = null;
    delete node.answer;
    this.talk.changed = Date.now();
    await this.told.save(this.talk);
    this.told.end(node, failed);
  }

  async _request() {
    const { node, talk } = this;
    const upto = node.content ? node.id : node.parent;
    const nodes = path(talk, upto);
    const shown = heldBy(nodes);
    const { vision, audio } = this.server.modalities ?? {};
    this._unread = nodes.some(
      ({ pictures, sounds }) => (pictures?.length && !vision) || (sounds?.length && !audio),
    );
    const which = this.server.several ? { model: this.server.model_alias } : {};
    if (node.mode === "text") {
      if (shown.length)
        throw new Error(
          "Text mode has no pictures or sounds: set Mode to chat, or delete their messages.",
        );
      return ["completion", { ...which, ...completion(this.typed), prompt: text(talk, upto) }];
    }
    const preserve = this.server.treadle?.reasoning_preserve;
    const said = messages(talk, upto, await dataUrls(shown), preserve);
    const body = { ...which, ...chat(this.typed), messages: said };
    const tools = this.servers.join(body.tools);
    return ["v1/chat/completions", tools.length ? { ...body, tools } : body];
  }

  _take(part) {
    const { node, told } = this;
    if (part.id) node.answer = part.id;
    if (part.text) node.content += part.text;
    if (part.reasoning) node.reasoning = (node.reasoning ?? "") + part.reasoning;
    for (const { index, id, function: said } of part.calls ?? []) {
      node.calls[index] ??= { id: id ?? "", name: "", arguments: "" };
      if (id) node.calls[index].id = id;
      node.calls[index].name += said?.name ?? "";
      node.calls[index].arguments += said?.arguments ?? "";
    }
    if (part.tokens?.length) (node.tokens ??= []).push(...part.tokens);
    if (part.timings) node.timings = part.timings;
    if (part.usage) node.used = part.usage.prompt_tokens + part.usage.completion_tokens;
    if (part.progress) node.progress = { ...part.progress, reads: this._reads };
    // What the model was told in place of pictures and sounds that it does not read.
    if (part.warnings && this._unread) node.warning = part.warnings.join(" ");
    if (part.finish) node.finish = part.finish;
    told.grow(node);
    if (Date.now() - this._saved > SAVE_MS) {
      this._saved = Date.now();
      told.save(this.talk);
    }
  }
}
