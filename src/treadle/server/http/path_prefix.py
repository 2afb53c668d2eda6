"""A prefix before all paths, for servers that share an address behind a proxy."""

from __future__ import annotations

import re
from collections.abc import Callable
from typing import TYPE_CHECKING

from treadle.server.http.api_errors import ApiError
from treadle.server.http.http_io import Json, Response

if TYPE_CHECKING:
    from starlette.types import ASGIApp, Receive, Scope, Send

_SEGMENTS = re.compile(r"(/[\w.~-]+)+", re.ASCII)


def read_prefix(text: str) -> str:
    """Return the prefix in ``text``, such as ``/a/b``, without a slash at its end; "" for none.
    Raises ValueError for any other form.
    """
    prefix = text.rstrip("/")
    if prefix and (not _SEGMENTS.fullmatch(prefix) or {".", ".."} & set(prefix.split("/"))):
        raise ValueError(f"{text!r}: expected /NAME, of letters, digits, '.', '_', '~' and '-'")
    return prefix


class PathPrefix:
    """ASGI middleware that serves ``app`` below the path ``prefix``. Other paths get the response
    that ``refuse(path, error)`` returns for a 404 error. The prefix without a slash is redirected
    to that with one, because the page names its files by relative addresses.
    """

    def __init__(self, app: ASGIApp, prefix: str, refuse: Callable[[str, ApiError], Json]) -> None:
        self._app = app
        self._prefix = prefix
        self._refuse = refuse

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Strip the prefix from the request's path and pass the request to ``app``, or refuse
        it.
        """
        if scope["type"] != "http":
            return await self._app(scope, receive, send)
        path: str = scope["path"]
        below = path.removeprefix(self._prefix)
        if len(below) < len(path) and below.startswith("/"):
            raw = scope.get("raw_path")
            inner = {"path": below}
            if raw is not None:
                inner["raw_path"] = raw.removeprefix(self._prefix.encode())
            return await self._app({**scope, **inner}, receive, send)
        if path == self._prefix:
            await Response(b"", 308, {"location": f"{self._prefix}/"})(scope, receive, send)
            return
        message = f"{path[:200]}: unknown path: this server's paths begin with {self._prefix}"
        await self._refuse(path, ApiError(404, message))(scope, receive, send)
