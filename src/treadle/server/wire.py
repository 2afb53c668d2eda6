"""Bodies in, JSON and events out, and the clients that leave before their answer is whole.

Plain ASGI: a middleware that wraps ``receive`` would hide that a client has gone. Nothing here
imports Starlette, so that ``treadle batch`` makes the same answers without it.
"""

from __future__ import annotations

import asyncio
import codecs
import json
from collections.abc import AsyncIterator, Awaitable, Callable, Mapping
from contextlib import asynccontextmanager, suppress
from typing import TYPE_CHECKING, Any

from treadle.server.call import Call, GoneError, Piece, Text
from treadle.server.problems import ApiError, problem_of

if TYPE_CHECKING:
    from starlette.requests import Request
    from starlette.types import Receive, Scope, Send

MAX_BODY = 16 << 20  # bytes
BODY_S = 30.0  # a client that sends nothing for so long is not waited for
WHOLE_BODY_S = 120.0  # nor one that sends a little now and then
PING_S = 1.0  # after so long without a piece a stream shows that it is alive
LARGE = 1 << 16  # bytes of JSON that are read in another thread: 1 MB takes 10 ms
Render = Callable[[ApiError], bytes]  # of an error within a stream


# Of Unicode's ends of lines, those that JSON has within a text. httpx's ``iter_lines`` ends a line
# there, and Ollama's client reads lines by it.
ENDS = {end: f"\\u{ord(end):04x}" for end in "\x85\u2028\u2029"}


def encode(value: Any) -> bytes:
    """JSON on one line. Lone surrogates, which UTF-8 has not, become question marks."""
    made = json.dumps(value, ensure_ascii=False, separators=(",", ":"))
    if not made.isascii():
        for end, escaped in ENDS.items():
            made = made.replace(end, escaped)
    return made.encode("utf-8", "replace")


def event(value: Any, name: str = "") -> bytes:
    """A server-sent event."""
    head = b"event: " + name.encode() + b"\n" if name else b""
    return head + b"data: " + encode(value) + b"\n\n"


PING = b": ping\n\n"
DONE = b"data: [DONE]\n\n"


class Response:
    """An answer, as ASGI sends it. A ``body`` of None has a length that nobody knows yet."""

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
        self.body, self.status = body, status
        self.head = {
            "type": "http.response.start",
            "status": status,
            "headers": [
                (name.lower().encode("latin-1"), value.encode("latin-1"))
                for name, value in named.items()
            ],
        }

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Send it."""
        await send(self.head)
        await send({"type": "http.response.body", "body": self.body or b""})


class Json(Response):
    """An answer in JSON."""

    def __init__(
        self, value: Any, status: int = 200, headers: Mapping[str, str] | None = None
    ) -> None:
        super().__init__(encode(value), status, headers, "application/json")


# -- bodies ---------------------------------------------------------------------------------------


async def read_body(request: Request) -> bytes:
    """The whole body. Raises ApiError where it is too large, packed, or does not come."""
    most = MAX_BODY
    packed = request.headers.get("content-encoding", "identity")
    if packed.lower() != "identity":
        raise ApiError(415, f"a body with content-encoding {packed[:40]!r}: send it as it is")
    told = request.headers.get("content-length", "0")
    if told.isdigit() and int(told[:20]) > most:
        raise _too_large()
    out, loop = bytearray(), asyncio.get_running_loop()
    end = loop.time() + WHOLE_BODY_S
    while True:
        try:
            patience = min(BODY_S, end - loop.time())
            message = await asyncio.wait_for(request.receive(), patience)
        except asyncio.TimeoutError:
            raise ApiError(408, f"the body is not whole after {len(out)} bytes") from None
        if message["type"] == "http.disconnect":
            raise GoneError
        out += message.get("body", b"")
        if len(out) > most:
            raise _too_large()
        if not message.get("more_body", False):
            return bytes(out)


def _too_large() -> ApiError:
    return ApiError(413, f"the body is larger than {MAX_BODY >> 20} MiB", code="too_large")


async def read_json(request: Request) -> dict[str, Any]:
    """The body as an object of JSON, whatever its content type says. Raises ApiError."""
    raw = await read_body(request)
    return await asyncio.to_thread(parse, raw) if len(raw) > LARGE else parse(raw)


def parse(raw: bytes) -> dict[str, Any]:
    """An object of JSON. Raises ApiError that says where it is broken."""
    found = parse_any(raw)
    if not isinstance(found, dict):
        raise ApiError(400, f"the body is {type(found).__name__}: expected an object")
    return found


def parse_any(raw: bytes) -> Any:
    """A value of JSON. Raises ApiError as ``parse`` does."""
    try:
        # .NET's and PowerShell's writers put a byte order mark before it.
        said = raw.removeprefix(codecs.BOM_UTF8).decode("utf-8")
        return json.loads(said, parse_constant=_no_number)
    except UnicodeDecodeError as error:
        raise ApiError(400, f"the body is not UTF-8: byte {error.start}") from None
    except RecursionError:
        raise ApiError(400, "the body is nested too deep") from None
    except ValueError as error:  # JSONDecodeError, and numbers of 5000 digits
        raise ApiError(400, f"the body is no JSON: {str(error)[:200]}") from None


def _no_number(name: str) -> None:
    raise ValueError(f"{name} is no number of JSON")


# -- clients that leave ---------------------------------------------------------------------------


@asynccontextmanager
async def watched(receive: Receive, leave: Callable[[], object]) -> AsyncIterator[None]:
    """Within it, ``leave`` is called at once when the client goes."""

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


def ticking(call: Call) -> AsyncIterator[Piece | None]:
    """A call's pieces for a stream; None where it is time to show that it is alive."""
    return call.pieces(PING_S)


async def finished(request: Request, call: Call) -> list[Piece]:
    """Read a call to its end: each text as one piece. Raises ApiError, and GoneError."""
    async with watched(request.receive, lambda: call.give_up(GoneError())):
        return await read_to_end(call)


async def read_to_end(call: Call) -> list[Piece]:
    """Each text of a call as one piece. Raises ApiError, and what ``give_up`` was told."""
    got: dict[Text, list[Piece]] = {text: [] for text in call.texts}
    try:
        async for piece in call.pieces(ping_s=60.0):
            if piece is not None:
                got[piece.text].append(piece)
    finally:
        call.close()
    return [Piece.joined(pieces) for pieces in got.values()]


async def result(request: Request, work: Awaitable[Any]) -> Any:
    """What ``work`` gives, which is cancelled when the client goes."""
    task = asyncio.ensure_future(work)
    async with watched(request.receive, task.cancel):
        try:
            return await task
        except asyncio.CancelledError:
            raise GoneError from None


class Stream(Response):
    """An answer that comes in parts, as ``parts`` makes them of a call's pieces.

    The headers go out before the first piece is there. An error behind them is ``render``ed as the
    protocol's last part: the status cannot be changed any more.
    """

    def __init__(
        self,
        call: Call,
        parts: AsyncIterator[bytes],
        render: Render,
        media_type: str = "text/event-stream",
    ) -> None:
        headers = {"cache-control": "no-cache", "x-accel-buffering": "no"}
        super().__init__(None, 200, headers, media_type)
        self._call, self._parts, self._render = call, parts, render

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Send it, until the client leaves."""
        call = self._call
        try:
            await send(self.head)
            async with watched(receive, lambda: call.give_up(GoneError())):
                async for part in self._parts:
                    await send({"type": "http.response.body", "body": part, "more_body": True})
        except GoneError:
            return
        except Exception as error:
            last = self._render(problem_of(error))
            await send({"type": "http.response.body", "body": last, "more_body": True})
            if not isinstance(error, ApiError):
                raise
        finally:
            call.close()
        await send({"type": "http.response.body", "body": b"", "more_body": False})
