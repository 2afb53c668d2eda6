"""Responses of ``/v1/responses`` by their ids: those that are still in memory."""

from __future__ import annotations

from typing import TYPE_CHECKING

from treadle.server.problems import ApiError
from treadle.server.service import service_of
from treadle.server.wire import Json, Response

if TYPE_CHECKING:
    from starlette.requests import Request

    from treadle.server.talks import Kept


async def show(request: Request) -> Response:
    """``GET /v1/responses/ID``."""
    if request.query_params.get("stream", "false") != "false":
        raise ApiError(400, "stream: a response is streamed once, when it is made", param="stream")
    return Json(_kept(request).whole)


async def delete(request: Request) -> Response:
    """``DELETE /v1/responses/ID``."""
    name = request.path_params["id"]
    if not service_of(request).talks.drop(name):
        raise _unknown(name)
    return Json({"id": name, "object": "response", "deleted": True})


async def cancel(request: Request) -> Response:
    """``POST /v1/responses/ID/cancel``: a response is whole, or its client has left."""
    _kept(request)
    raise ApiError(400, "only a response in the background could be cancelled: there are none")


def _kept(request: Request) -> Kept:
    name = request.path_params["id"]
    found = service_of(request).talks.get(name)
    if found is None:
        raise _unknown(name)
    return found


def _unknown(name: str) -> ApiError:
    """The last ones are kept, if ``store`` is not false, until the server ends."""
    return ApiError(404, f"a response {name[:80]!r} is not kept here (any more)")
