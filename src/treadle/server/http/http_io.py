"""Reads bodies, writes JSON and event streams, and detects clients that disconnect early.

Plain ASGI: a middleware that wraps ``receive`` would hide disconnects. Nothing here imports
Starlette, so that ``treadle batch`` makes the same responses without it.
"""

from __future__ import annotations

import asyncio
import codecs
import json
import math
import time
from collections.abc import AsyncIterator, Callable, Coroutine, Iterator, Mapping
from contextlib import asynccontextmanager, contextmanager, suppress
from contextvars import ContextVar
from datetime import datetime, timezone
from typing import TYPE_CHECKING, Any

from treadle.base.gc_pause import garbage_kept
from treadle.server.http import json_pieces
from treadle.server.http.api_errors import ApiError, GoneError, busy, timed_out

if TYPE_CHECKING:
    from starlette.requests import Request as HttpRequest
    from starlette.types import Receive, Scope, Send

MAX_BODY = 16 << 20  # bytes
MAX_MEDIA_BODY = 64 << 20  # of a server whose model reads pictures or sounds
MAX_SOUND_BODY = 200 << 20  # of a transcription: three hours of compressed sound
MAX_BODIES = 256 << 20  # of all large bodies being read: slow clients cannot fill memory
BODY_S = 30.0  # longest wait for the next bytes of a body
WHOLE_BODY_S = 120.0  # longest time for a whole body
LARGE = 1 << 16  # bytes of JSON from which it is parsed in another thread: 1 MB takes 10 ms
is_large = ContextVar("is_large", default=False)  # whether the task's request has a large body


# Unicode's line ends that JSON allows within a string. httpx's ``iter_lines`` splits at them, and
# Ollama's client reads lines with it.
ENDS = {end: f"\\u{ord(end):04x}" for end in "\x85\u2028\u2029"}


def encode(value: Any) -> bytes:
    """Return ``value`` as JSON on one line, in UTF-8. Lone surrogates, which UTF-8 lacks, become
    question marks; Unicode's line ends are escaped. Raises ValueError for NaN and infinity, which
    JSON lacks.
    """
    made = json.dumps(value, ensure_ascii=False, separators=(",", ":"), allow_nan=False)
    if not made.isascii():
        for end, escaped in ENDS.items():
            made = made.replace(end, escaped)
    return made.encode("utf-8", "replace")


def event(value: Any, name: str = "") -> bytes:
    """Return a server-sent event with ``value`` as JSON in its data; ``name``: the event's type, if
    any.
    """
    head = b"event: " + name.encode() + b"\n" if name else b""
    return head + b"data: " + encode(value) + b"\n\n"


def encode_large(value: Any, depth: int = 5) -> bytes:
    """Return the same bytes as ``encode``, but encode ``value`` part by part, down to ``depth``
    levels of nesting: json's encoder holds the GIL until it is done, which may take seconds.
    """
    if depth and isinstance(value, dict):
        made = [encode(key) + b":" + encode_large(each, depth - 1) for key, each in value.items()]
        return b"{" + b",".join(made) + b"}"
    if depth and isinstance(value, list):
        return b"[" + b",".join(encode_large(each, depth - 1) for each in value) + b"]"
    return encode(value)


class Response:
    """An ASGI response. ``body``: all its bytes; None for a stream, whose length is not known
    beforehand, so that the response has no ``content-length``.
    """

    def __init__(
        self,
        body: bytes | None = b"",
        status: int = 200,
        headers: Mapping[str, str] | None = None,
        media_type: str = "text/plain",
    ) -> None:
        if media_type.startswith("text/"):
            media_type += "; charset=utf-8"
        named = {"content-type": media_type, **(headers or {})}
        if body is not None:
            named["content-length"] = str(len(body))
        self.body = body
        self.status = status
        self.head = {
            "type": "http.response.start",
            "status": status,
            "headers": [
                (name.lower().encode("latin-1"), value.encode("latin-1"))
                for name, value in named.items()
            ],
        }

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Send the response."""
        await send(self.head)
        await send({"type": "http.response.body", "body": self.body or b""})


class Json(Response):
    """A JSON response with ``value``, which is encoded when the response is constructed."""

    def __init__(
        self, value: Any, status: int = 200, headers: Mapping[str, str] | None = None
    ) -> None:
        super().__init__(encode(value), status, headers, "application/json")


# -- bodies ---------------------------------------------------------------------------------------


class Bodies:
    """Counts the bytes of all large request bodies (over 64 KiB) that are being read, and bounds
    their total. Small bodies are not counted, so slow senders of large ones block only other large
    ones. ``most``: maximum bytes of one body.
    """

    n_bytes = 0

    def __init__(self, most: int = MAX_BODY) -> None:
        self.most = most  # bytes of one body

    @contextmanager
    def weighing(self) -> Iterator[Callable[[int], None]]:
        """Yield a function to call with the number of bytes of one body read so far; it raises
        ApiError (503) if all large bodies together exceed ``MAX_BODIES``. After the block the body
        no longer counts.
        """
        held = 0

        def weigh(n: int) -> None:
            nonlocal held
            if n > LARGE:
                held, self.n_bytes = n, self.n_bytes + n - held
            if held and self.n_bytes > MAX_BODIES:
                raise busy("too many large bodies are being read")

        try:
            yield weigh
        finally:
            self.n_bytes -= held


async def read_body(
    request: HttpRequest, weigh: Callable[[int], None], most: int = MAX_BODY
) -> bytes:
    """Return the whole body of a request. ``weigh`` is called with the number of bytes so far;
    ``most``: bytes allowed. Raises ApiError if the body is too large, compressed or late, GoneError
    if the client left.
    """
    packed = request.headers.get("content-encoding", "identity")
    if packed.lower() != "identity":
        raise ApiError(
            415, f"content-encoding {packed[:40]!r} is not supported: send the body uncompressed"
        )
    told = request.headers.get("content-length", "0")
    if told.isdigit() and int(told[:20]) > most:
        raise _too_large(most)
    out = bytearray()
    loop = asyncio.get_running_loop()
    end = loop.time() + WHOLE_BODY_S
    while True:
        try:
            patience = min(BODY_S, end - loop.time())
            message = await asyncio.wait_for(request.receive(), patience)
        except asyncio.TimeoutError:
            raise ApiError(
                408, f"the body was incomplete after {len(out)} bytes: timed out"
            ) from None
        if message["type"] == "http.disconnect":
            raise GoneError
        out += message.get("body", b"")
        if len(out) > most:
            raise _too_large(most)
        weigh(len(out))
        if not message.get("more_body", False):
            return bytes(out)


def _too_large(most: int) -> ApiError:
    return ApiError(413, f"the body is larger than {most >> 20} MiB", code="too_large")


async def read_json(request: HttpRequest) -> dict[str, Any]:
    """Return the body as a JSON object, whatever its content type. Raises ApiError if it is none or
    cannot be read, GoneError if the client left.
    """
    return _object(await read_any(request))


async def read_any(request: HttpRequest) -> Any:
    """Return the body as any JSON value. Raises ApiError if it is not valid JSON or cannot be read,
    GoneError if the client left.
    """
    bodies: Bodies = request.app.state.service.bodies
    with bodies.weighing() as weigh:
        raw = await read_body(request, weigh, bodies.most)
        is_large.set(len(raw) > LARGE)
        return await asyncio.to_thread(parse_any, raw) if len(raw) > LARGE else parse_any(raw)


def parse(raw: bytes) -> dict[str, Any]:
    """Return the JSON object in ``raw``, the bytes of a body. Raises ApiError that says where it is
    broken, or that it is no object.
    """
    return _object(parse_any(raw))


def _object(found: Any) -> dict[str, Any]:
    if not isinstance(found, dict):
        raise ApiError(400, f"the body is {type(found).__name__}: expected a JSON object")
    return found


def parse_any(raw: bytes) -> Any:
    """Return the JSON value in ``raw``, the bytes of a body. Raises ApiError that says where it is
    broken.
    """
    try:
        # .NET and PowerShell write a byte order mark first.
        said = raw.removeprefix(codecs.BOM_UTF8).decode("utf-8")
        with garbage_kept():  # nothing in it is garbage
            return json_pieces.loads(said, _no_number)
    except UnicodeDecodeError as error:
        raise ApiError(400, f"the body is not UTF-8: byte {error.start}") from None
    except RecursionError:
        raise ApiError(400, "the body is nested too deeply") from None
    except ValueError as error:  # JSONDecodeError, and numbers of 5000 digits
        raise ApiError(400, f"the body is not valid JSON: {str(error)[:200]}") from None


def _no_number(name: str) -> None:
    raise ValueError(f"{name} is not a JSON number")


# -- client disconnects ---------------------------------------------------------------------------


@asynccontextmanager
async def watched(receive: Receive, leave: Callable[[], object]) -> AsyncIterator[None]:
    """Within the block, read ``receive`` for the client's disconnect, and call ``leave`` as soon as
    it comes.
    """

    async def watch() -> None:
        while (await receive())["type"] != "http.disconnect":
            pass
        leave()

    task = asyncio.ensure_future(watch())
    try:
        yield
    finally:
        task.cancel()
        with suppress(asyncio.CancelledError, Exception):
            await task


def seconds_of(request: HttpRequest) -> float:
    """Return the seconds in the request's header ``X-Request-Timeout``, infinity without it. Raises
    ApiError for a value that is no positive number.
    """
    said = request.headers.get("x-request-timeout")
    if said is None:
        return math.inf
    try:
        seconds = float(said)
    except ValueError:
        seconds = -1.0
    if not 0 < seconds < 1e6:
        raise ApiError(400, "X-Request-Timeout: expected a positive number of seconds")
    return seconds


def utc(seconds: float | None = None) -> str:
    """Return the Unix time ``seconds``, None for the present one, as RFC 3339 text in UTC."""
    when = time.time() if seconds is None else seconds
    return datetime.fromtimestamp(when, timezone.utc).isoformat().replace("+00:00", "Z")


async def result(request: HttpRequest, work: Coroutine[Any, Any, Any]) -> Any:
    """Return the result of ``work``, which is cancelled if the client disconnects (GoneError).
    Raises ApiError (504) if the time limit of ``X-Request-Timeout`` is over first.
    """
    try:
        seconds = seconds_of(request)
    except ApiError:
        work.close()
        raise
    task = asyncio.ensure_future(work)
    left_s = request.scope["treadle.came"] + seconds - time.perf_counter()
    async with watched(request.receive, task.cancel):
        try:
            return await asyncio.wait_for(task, None if seconds == math.inf else left_s)
        except asyncio.TimeoutError:
            raise timed_out(seconds) from None
        except asyncio.CancelledError:
            raise GoneError from None
