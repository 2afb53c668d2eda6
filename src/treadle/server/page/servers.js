// Tools of MCP servers that the operator has named: offered to the model, and run here one call at
// a time, each allowed by the user.

import { getJson, runTool } from "./stream.js";

export class ToolServers {
  constructor() {
    this._tools = []; // as functions of a request
    this._always = new Set(); // names that the user allows until this tab is closed
    this._running = new Set(); // ids of calls
    this._of = {}; // the model whose tools they are, where the server has several
  }

  // Reads the tools, if the server says that it has servers. Resolves to a notice of those that
  // fail.
  async load(server, key) {
    this._tools = [];
    this._of = server.several ? { model: server.model_alias } : {};
    if (!server.treadle?.mcp?.length) return "";
    const { data, servers } = await getJson(`v1/mcp/tools?${new URLSearchParams(this._of)}`, key);
    this._tools = data.map(({ type, function: own }) => ({ type, function: own }));
    return servers
      .filter(({ error }) => error)
      .map(({ name, error }) => `Tool server ${name}: ${error}.`)
      .join(" ");
  }

  // The tools of a request: the user's own, and those of the servers.
  join(tools = []) {
    const own = new Set(tools.map(({ function: each }) => each?.name));
    return [...tools, ...this._tools.filter(({ function: each }) => !own.has(each.name))];
  }

  has(call) {
    return this._tools.some(({ function: each }) => each.name === call.name);
  }

  allow(call) {
    this._always.add(call.name);
  }

  isAllowed(call) {
    return this._always.has(call.name) && this.has(call);
  }

  isRunning(call) {
    return this._running.has(call.id);
  }

  // Resolves to the result of a call, which may tell an error of the tool.
  async run(call, key) {
    this._running.add(call.id);
    try {
      return (await runTool(call.name, call.arguments, this._of, key)).output;
    } finally {
      this._running.delete(call.id);
    }
  }
}
