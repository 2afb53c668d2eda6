"""llama.cpp's ``/v1/stream``: kept answers, which clients read again after a broken connection."""

from __future__ import annotations

from typing import TYPE_CHECKING

from treadle.server.http.api_errors import ApiError
from treadle.server.http.body_fields import array, wrong
from treadle.server.http.http_io import Json, Response, read_json
from treadle.server.requests.http_responses import KeptResponse
from treadle.server.requests.service import service_of

if TYPE_CHECKING:
    from starlette.requests import Request as HttpRequest

MAX_IDS = 1024  # in one lookup


async def resume(request: HttpRequest) -> Response:
    """``GET /v1/stream?conv_id=ID&from=N``: the bytes of the conversation's answer from offset
    ``N`` on, while it is being written and some minutes after.
    """
    service = service_of(request)
    kept = service.kept_streams.find(service.owner_of(request), id_of(request))
    if kept is None:
        raise ApiError(404, "conv_id: no stream of this conversation is kept", param="conv_id")
    text = request.query_params.get("from") or "0"
    if not (text.isascii() and text.isdigit() and len(text) < 16):
        raise wrong("from", text, "a number of bytes")
    kept.check_offset(int(text))
    return KeptResponse(kept, int(text))


async def look_up(request: HttpRequest) -> Response:
    """``POST /v1/streams/lookup``: state, size and times of the kept answers of
    ``conversation_ids``.
    """
    service = service_of(request)
    body = await read_json(request)
    ids = array("conversation_ids", body.get("conversation_ids"))
    if len(ids) > MAX_IDS or not all(isinstance(id, str) for id in ids):
        raise wrong("conversation_ids", ids, f"at most {MAX_IDS} strings")
    owner = service.owner_of(request)
    return Json(
        [
            {
                "conversation_id": kept.conversation,
                "is_done": bool(kept.completed),
                "total_bytes": kept.total,
                "started_at": kept.started,
                "completed_at": kept.completed,
            }
            for id in ids
            for kept in service.kept_streams.of_conversation(owner, id)
        ]
    )


async def stop(request: HttpRequest) -> Response:
    """``DELETE /v1/stream?conv_id=ID``: cancel the conversation's answer, and forget it."""
    service = service_of(request)
    service.kept_streams.drop(service.owner_of(request), id_of(request))
    return Response(status=204)


def id_of(request: HttpRequest) -> str:
    """Return the conversation's id in a request's ``conv_id``. Raises ApiError without one."""
    name = request.query_params.get("conv_id")
    if not name:
        raise ApiError(400, "conv_id: required", param="conv_id")
    return name
