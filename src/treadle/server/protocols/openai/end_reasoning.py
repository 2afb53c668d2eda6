"""llama.cpp's ``/v1/chat/completions/control``: ends the reasoning of an answer that is being
written.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from treadle.chat.tools.constrained_decoding import ConstrainedDecoder
from treadle.server.http.api_errors import ApiError
from treadle.server.http.body_fields import Table, one_of, read_fields, text
from treadle.server.http.http_io import Json, Response, read_json
from treadle.server.requests.service import Service, service_of

if TYPE_CHECKING:
    from starlette.requests import Request as HttpRequest

    from treadle.server.requests.request_stream import RequestStream

FIELDS: Table = {"id": text, "action": one_of("reasoning_end")}


async def control(request: HttpRequest) -> Response:
    """``POST /v1/chat/completions/control``: ``id`` of the answer or of its HTTP request, and the
    ``action`` "reasoning_end". Answers of any protocol can be named. If nothing changes,
    ``success`` is false, and ``message`` has the reason.
    """
    service = service_of(request)
    given = read_fields(await read_json(request), FIELDS)
    for name in FIELDS:
        if not given.get(name):
            raise ApiError(400, f"{name}: required", param=name)
    stream = find_stream(service, given["id"], request.scope.get("treadle.key"))
    why = "no active completion has this id" if stream is None else end_reasoning(stream)
    return Json({"success": True} if why is None else {"success": False, "message": why})


def find_stream(service: Service, id: str, key: int | None) -> RequestStream | None:
    """Return the running request that clients know by this id, None if there is none. With several
    API keys it must have the same number ``key``.
    """
    return next(
        (
            stream
            for stream in service.streams
            if id in stream.ids and all(output.request.key == key for output in stream.outputs)
        ),
        None,
    )


def end_reasoning(stream: RequestStream) -> str | None:
    """End the reasoning of all outputs of a request. Return None if that changes any output, else a
    text with the reason why it does not.
    """
    found = [output.request.sampler.constraint for output in stream.outputs]
    guides = [each for each in found if isinstance(each, ConstrainedDecoder)]
    ended = [guide.end_reasoning() for guide in guides]
    if any(ended):
        return None
    if any(guide.may_reason for guide in guides):
        return "the reasoning of this completion is over"
    if not stream.generation.options.control:
        return "reasoning control is not enabled for this completion: send reasoning_control: true"
    return "this completion has no reasoning"
