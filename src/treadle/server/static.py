"""The web page: files of the package, sent unchanged.

``/`` serves the page to browsers, which accept HTML. Ollama clients probe ``/`` to find out if a
server runs, and get Ollama's response.
"""

from __future__ import annotations

import hashlib
from collections.abc import Awaitable, Callable, Iterator
from importlib import resources
from typing import TYPE_CHECKING

from starlette.requests import Request as HttpRequest
from starlette.routing import Route

from treadle.server.http.http_io import Response
from treadle.server.protocols import ollama

if TYPE_CHECKING:
    from importlib.resources.abc import Traversable  # type: ignore[import-not-found, unused-ignore]

FOLDER = "page"
INDEX = "index.html"
KINDS = {
    ".html": "text/html",
    ".css": "text/css",
    ".js": "text/javascript",
    ".mjs": "text/javascript",
    ".svg": "image/svg+xml",
    ".txt": "text/plain",
}
# Nothing is loaded from elsewhere, nothing inline runs, and text becomes HTML only through
# DOMPurify. So a script that a model writes, or that is pasted, stays text. Attached pictures and
# sounds have blob: addresses, which only the page's own scripts can make.
POLICY = (
    "default-src 'self'; base-uri 'none'; form-action 'none'; frame-ancestors 'none'; "
    "object-src 'none'; img-src 'self' blob:; media-src blob:; require-trusted-types-for 'script'; "
    "trusted-types dompurify"
)
HEADERS = {
    "content-security-policy": POLICY,
    "x-content-type-options": "nosniff",
    "referrer-policy": "no-referrer",
    "cross-origin-opener-policy": "same-origin",
    "cache-control": "no-cache",  # revalidate each time: another version may run
    "vary": "Accept",
}
Handler = Callable[[HttpRequest], Awaitable[Response]]


def page_files() -> dict[str, tuple[bytes, str]]:
    """Return the web page's files: bytes and media type, by path below ``page/``."""

    def walk(folder: Traversable, above: str) -> Iterator[tuple[str, tuple[bytes, str]]]:
        for each in sorted(folder.iterdir(), key=lambda file: file.name):
            if each.is_dir():
                yield from walk(each, f"{above}{each.name}/")
            elif (kind := KINDS.get(each.name[each.name.rfind(".") :])) is not None:
                yield above + each.name, (each.read_bytes(), kind)

    return dict(walk(resources.files("treadle.server") / FOLDER, ""))


def page_routes() -> list[Route]:
    """Return the routes of the page: ``/`` and one for each of its files."""
    files = page_files()
    routes = [
        Route(f"/{FOLDER}/{name}", _sending(*file)) for name, file in files.items() if name != INDEX
    ]
    return [Route("/", _by_accept_header(_sending(*files[INDEX]), ollama.root)), *routes]


def _sending(content: bytes, kind: str) -> Handler:
    tag = f'"{hashlib.sha256(content).hexdigest()[:32]}"'
    headers = {**HEADERS, "etag": tag}

    async def send(request: HttpRequest) -> Response:
        if tag in request.headers.get("if-none-match", ""):
            return Response(None, 304, headers, kind)
        return Response(content, 200, headers, kind)

    return send


def _by_accept_header(page: Handler, other: Handler) -> Handler:
    """Return a handler: ``page`` for clients that accept HTML, ``other`` for the rest."""

    async def choose(request: HttpRequest) -> Response:
        html = "text/html" in request.headers.get("accept", "")
        return await (page if html else other)(request)

    return choose
