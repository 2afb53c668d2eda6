"""Look-ups of stored ``/v1/responses`` by id."""

from __future__ import annotations

from typing import TYPE_CHECKING

from treadle.server.http.api_errors import ApiError
from treadle.server.http.body_fields import Table, one_of, read_fields, text, whole
from treadle.server.http.http_io import Json, Response
from treadle.server.protocols.openai.response_items import listed
from treadle.server.requests.service import service_of

if TYPE_CHECKING:
    from starlette.requests import Request as HttpRequest

    from treadle.server.requests.response_store import StoredResponse


def _limit(name: str, value: str) -> int:
    """Return the query parameter ``limit``, the text ``value``, as an integer from 1 to 100. Raises
    ApiError, with ``name``, for other values.
    """
    number = value.isascii() and value.isdecimal() and len(value) < 10
    return whole(1, 100)(name, int(value) if number else value)


PAGE: Table = {"order": one_of("asc", "desc"), "limit": _limit, "after": text}


async def show(request: HttpRequest) -> Response:
    """``GET /v1/responses/ID``: a stored response."""
    if request.query_params.get("stream", "false") != "false":
        raise ApiError(400, "stream: a stored response cannot be streamed again", param="stream")
    return Json(_kept(request).whole)


async def input_items(request: HttpRequest) -> Response:
    """``GET /v1/responses/ID/input_items``: a page of a response's input items, including those of
    the responses that it continues.
    """
    items = _kept(request).inputs
    given = read_fields(request.query_params, PAGE)
    if given.get("order", "desc") == "desc":
        items = items[::-1]
    names = [item["id"] for item in items]
    after = given.get("after")
    if after is not None and after not in names:
        raise ApiError(400, f"after: no item {after[:80]!r}", param="after")
    begin = len(names) - names[::-1].index(after) if after is not None else 0
    page = [listed(item) for item in items[begin : begin + given.get("limit", 20)]]
    return Json(
        {
            "object": "list",
            "data": page,
            "first_id": page[0]["id"] if page else None,
            "last_id": page[-1]["id"] if page else None,
            "has_more": begin + len(page) < len(items),
        }
    )


async def delete(request: HttpRequest) -> Response:
    """``DELETE /v1/responses/ID``: remove a stored response."""
    name = request.path_params["id"]
    if not service_of(request).responses.drop(name):
        raise _unknown(name)
    return Json({"id": name, "object": "response", "deleted": True})


async def cancel(request: HttpRequest) -> Response:
    """``POST /v1/responses/ID/cancel``: refused (400; 404 for an unknown id), because no response
    runs in the background.
    """
    _kept(request)
    raise ApiError(400, "only background responses can be cancelled, and treadle has none")


def _kept(request: HttpRequest) -> StoredResponse:
    name = request.path_params["id"]
    found = service_of(request).responses.get(name)
    if found is None:
        raise _unknown(name)
    return found


def _unknown(name: str) -> ApiError:
    """Return the 404 error for the response id ``name``, which is not stored: only the latest
    responses are kept, in memory, and none with ``store: false``.
    """
    return ApiError(404, f"no stored response {name[:80]!r} (it may have expired)")
