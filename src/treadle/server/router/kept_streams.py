"""``/v1/stream`` of a router: streams that outlive their connection are kept by the engines that
write them.
"""

from __future__ import annotations

import json
from functools import partial
from typing import TYPE_CHECKING, Any

from treadle.server.http.api_errors import ApiError, busy
from treadle.server.http.http_io import Json, Response, read_json
from treadle.server.protocols.kept_stream_actions import id_of
from treadle.server.router.forwarding import (
    Forwarding,
    read_call,
    returned_error,
    stopped,
    target_of,
)
from treadle.server.router.service import service_of

if TYPE_CHECKING:
    from starlette.requests import Request as HttpRequest

    from treadle.server.router.pool import LoadedEngine
    from treadle.server.router.service import RouterService

LOOK_UP = b"/v1/streams/lookup"


async def resume(request: HttpRequest) -> Any:
    """``GET /v1/stream``: the conversation's bytes, from the engine that keeps its stream. Raises
    ApiError if none does.
    """
    service = service_of(request)
    id = id_of(request)
    asked = json.dumps({"conversation_ids": [id]}).encode()
    for engine in service.pool.text_engines():
        found = await _ask(service, request, engine, LOOK_UP, "POST", asked)
        if any(each.get("conversation_id") == id for each in found or ()):
            call = await read_call(request, service.bodies)
            return Forwarding(service, call, partial(service.acquire, engine.model))
    if (request.scope.get("treadle.owner", ""), id) in service.loading_streams:
        raise busy("conv_id: the model of this stream is being loaded: retry later")
    raise ApiError(404, "conv_id: no stream of this conversation is kept", param="conv_id")


async def look_up(request: HttpRequest) -> Response:
    """``POST /v1/streams/lookup``: the states of the conversations' kept streams, of all
    engines.
    """
    service = service_of(request)
    body = json.dumps(await read_json(request)).encode()
    found: list[Any] = []
    for engine in service.pool.text_engines():
        found += await _ask(service, request, engine, LOOK_UP, "POST", body) or []
    return Json(found)


async def stop(request: HttpRequest) -> Response:
    """``DELETE /v1/stream``: stop the conversation's stream, in whichever engine it is, or while
    the model is being loaded.
    """
    service = service_of(request)
    loading = (request.scope.get("treadle.owner", ""), id_of(request))
    if loading in service.loading_streams:
        service.loading_streams[loading](stopped())
    target = target_of(request.scope)
    for engine in service.pool.text_engines():
        await _ask(service, request, engine, target, "DELETE")
    return Response(status=204)


async def _ask(
    service: RouterService,
    request: HttpRequest,
    engine: LoadedEngine,
    target: bytes,
    method: str,
    body: bytes = b"",
) -> Any:
    """Return an engine's response to ``method`` with the path and query ``target``, as a JSON
    value; None if the engine has ended, or for an empty response. Raises ApiError if the engine
    refuses the call.
    """
    owner = request.scope.get("treadle.owner", "")
    found = await service.ask(engine, target, method, body, owner)
    if found is None:
        return None
    if found.status >= 400:
        raise returned_error(found.status, found.body)
    return json.loads(found.body) if found.body else None
