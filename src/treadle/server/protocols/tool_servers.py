"""``/v1/mcp/tools`` and ``/v1/mcp/call``: tools of MCP servers for clients that ask their user
before each call, as treadle's web page does.
"""

from __future__ import annotations

import asyncio
from typing import TYPE_CHECKING, Any

from treadle.server.http.api_errors import ApiError
from treadle.server.http.body_fields import Table, read_fields, text
from treadle.server.http.http_io import Json, read_json
from treadle.server.requests.service import Service, service_of

if TYPE_CHECKING:
    from starlette.requests import Request as HttpRequest

    from treadle.mcp.toolbox import Toolbox

FIELDS: Table = {"name": text, "arguments": text}


async def tools(request: HttpRequest) -> Json:
    """``GET /v1/mcp/tools``: the MCP servers, and their tools as functions; empty lists without
    ``--mcp``.
    """
    service = service_of(request)
    if service.toolbox is None:
        return Json({"object": "list", "servers": [], "data": []})
    toolbox = await _started(service)
    problems = toolbox.problems()
    servers = [{"name": name, "error": problems.get(name)} for name in toolbox.servers]
    data = [{**tool.function, "server_label": tool.server} for tool in toolbox.known_tools()]
    return Json({"object": "list", "servers": servers, "data": data})


async def call(request: HttpRequest) -> Json:
    """``POST /v1/mcp/call``: run the tool ``name`` with ``arguments``, a JSON text, and return its
    output.
    """
    service = service_of(request)
    given: dict[str, Any] = read_fields(await read_json(request), FIELDS)
    toolbox = await _started(service)
    name = text("name", given.get("name"))
    if name not in {tool.name for tool in toolbox.known_tools()}:
        raise ApiError(404, f"name: no tool {name!r:.80}", param="name")
    found = await asyncio.wrap_future(toolbox.submit(name, given.get("arguments", "{}")))
    return Json({"output": found.text, "is_error": found.is_error})


async def _started(service: Service) -> Toolbox:
    """Return the toolbox, once its MCP servers have started. Raises ApiError without ``--mcp``."""
    if service.toolbox is None:
        raise ApiError(501, "the server was started without --mcp FILE")
    await asyncio.shield(asyncio.wrap_future(service.toolbox.started()))
    return service.toolbox
