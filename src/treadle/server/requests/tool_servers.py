"""Tools of MCP servers that a request asks for: entries of type ``mcp`` in its ``tools``."""

from __future__ import annotations

import asyncio
from collections.abc import Iterable, Mapping
from typing import TYPE_CHECKING, Any

from treadle.base.fast_classes import dataclass
from treadle.server.http.api_errors import ApiError
from treadle.server.http.body_fields import array, mapping, one_of, text

if TYPE_CHECKING:
    from treadle.mcp.toolbox import ServerTool, Toolbox
    from treadle.server.requests.service import Service

KIND = "mcp"
# Fields by which OpenAI's service reaches a server: here the operator's file says how.
ELSEWHERE = ("server_url", "connector_id", "authorization", "headers", "tunnel_id")


@dataclass(frozen=True)
class RequestedServers:
    """The tools of MCP servers in one request. ``tools``: by their names for the model. ``asking``:
    those of these names whose calls the client must approve; the server runs the others by itself.
    ``labels``: the servers' names, in the order of the request.
    """

    toolbox: Toolbox
    tools: dict[str, ServerTool]
    asking: frozenset[str]
    labels: tuple[str, ...]

    def is_free(self, names: Iterable[str]) -> bool:
        """Return whether ``names`` are all functions of MCP servers whose calls need no approval,
        so that the server may run them by itself.
        """
        return all(name in self.tools and name not in self.asking for name in names)

    def without_entries(self, tools: list[Any]) -> list[Any]:
        """Return those of a request's ``tools`` that are not entries for MCP servers."""
        return [each for each in tools if not is_entry(each)]

    def listing(self, label: str) -> list[dict[str, Any]]:
        """Return the offered tools of the server ``label``, as items of type ``mcp_list_tools``
        have them.
        """
        return [
            {
                "name": each.tool,
                "description": each.description,
                "input_schema": each.schema,
                "annotations": None,
            }
            for each in self.tools.values()
            if each.server == label
        ]


def is_entry(tool: Any) -> bool:
    """Return whether an element of a request's ``tools`` stands for the tools of an MCP server."""
    return isinstance(tool, dict) and tool.get("type") == KIND


async def requested_servers(service: Service, body: Mapping[str, Any]) -> RequestedServers | None:
    """Return the MCP servers' tools that a body asks for; None if it asks for none, or the server
    was started without ``--mcp``. Waits until the MCP servers have started. Raises ApiError.
    """
    toolbox = service.toolbox
    tools = body.get("tools")
    if toolbox is None or not isinstance(tools, list) or not any(map(is_entry, tools)):
        return None
    await asyncio.shield(asyncio.wrap_future(toolbox.started()))
    found: dict[str, ServerTool] = {}
    asking: set[str] = set()
    labels: list[str] = []
    for i, entry in enumerate(tools):
        if is_entry(entry):
            where = f"tools[{i}]"
            label = _label(where, entry, toolbox)
            if label in labels:
                raise ApiError(400, f"{where}: two have the server_label {label!r}", param="tools")
            labels.append(label)
            own = _allowed(where, entry, toolbox.known_tools([label]))
            found |= {tool.name: tool for tool in own}
            asking |= _asking(where, entry, own)
    return RequestedServers(toolbox, found, frozenset(asking), tuple(labels))


def _label(where: str, entry: Mapping[str, Any], toolbox: Toolbox) -> str:
    """Return the name of the MCP server in ``toolbox`` that ``entry`` stands for. ``where``: the
    entry's place in the body. Raises ApiError for an unknown or failed server.
    """
    for key in ELSEWHERE:
        if entry.get(key) is not None:
            message = f"{where}.{key}: not supported: servers are those of the file of --mcp"
            raise ApiError(400, message, param="tools")
    label = text(f"{where}.server_label", entry.get("server_label"))
    if label not in toolbox.servers:
        known = ", ".join(toolbox.servers) or "none"
        message = f"{where}.server_label: no server {label!r:.80}; there are: {known}"
        raise ApiError(400, message, param="tools")
    if (why := toolbox.problems().get(label)) and not toolbox.known_tools([label]):
        raise ApiError(424, f"{where}: server {label!r:.80} cannot be used: {why}", param="tools")
    return label


def _allowed(where: str, entry: Mapping[str, Any], tools: list[ServerTool]) -> list[ServerTool]:
    """Return those of the server's ``tools`` that the entry's ``allowed_tools`` names; all without
    it. ``where``: the entry's place in the body. Raises ApiError for unknown names.
    """
    given = entry.get("allowed_tools")
    if given is None:
        return tools
    names = _names(f"{where}.allowed_tools", given)
    known = {tool.tool for tool in tools}
    if missing := sorted(names - known):
        message = f"{where}.allowed_tools: the server has no tool {missing[0]!r:.80}"
        raise ApiError(400, message, param="tools")
    return [tool for tool in tools if tool.tool in names]


def _asking(where: str, entry: Mapping[str, Any], tools: list[ServerTool]) -> set[str]:
    """Return the names of tools whose calls the client must approve, by the entry's
    ``require_approval``: all, none, or all but those under ``never``. ``where``: the entry's place
    in the body. Raises ApiError.
    """
    name = f"{where}.require_approval"
    given = entry.get("require_approval", "always")
    if isinstance(given, dict):
        never = _names(f"{name}.never", given.get("never") or [])
        return {tool.name for tool in tools if tool.tool not in never}
    free = one_of("always", "never")(name, given) == "never"
    return set() if free else {tool.name for tool in tools}


def _names(where: str, given: Any) -> set[str]:
    """Return the names of tools in ``given``, a list, or an object with ``tool_names``; ``where``:
    its place in the body. Raises ApiError.
    """
    if isinstance(given, dict):
        given = mapping(where, given).get("tool_names") or []
    return {text(where, name) for name in array(where, given)}
