"""Responses to generation requests: whole ones as JSON, and streams with keep-alives."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable
from contextlib import aclosing
from typing import TYPE_CHECKING, Any, Protocol

from treadle.server.http.api_errors import ApiError, GoneError, problem_of
from treadle.server.http.http_io import Json, Response, encode_large, event, watched
from treadle.server.requests.request_stream import OutputStream, RequestStream, StreamPiece

if TYPE_CHECKING:
    from starlette.requests import Request as HttpRequest
    from starlette.types import Receive, Scope, Send

    from treadle.server.requests.kept_streams import KeptStream

PING_S = 1.0  # of silence, after which a stream sends a keep-alive
MANY = 20_000  # log-probabilities, which take about 0.1 s to encode
PING = b": ping\n\n"
DONE = b"data: [DONE]\n\n"
STREAM_HEADERS = {"cache-control": "no-cache", "x-accel-buffering": "no"}
_writers = set[asyncio.Task[None]]()  # of kept answers; the event loop has only weak references
Render = Callable[[ApiError], bytes]  # formats an error within a stream


async def whole_json(
    make: Callable[[list[StreamPiece]], Any], pieces: list[StreamPiece]
) -> Response:
    """Return ``make(pieces)`` as a JSON response; ``pieces``: one for each output. If there are
    many log-probabilities, which take seconds to encode, another thread encodes it.
    """
    tops = [piece.output.request.n_top or 0 for piece in pieces]
    n_told = [len(piece.logprobs) + n_echoed(piece) for piece in pieces]
    if sum(n * (1 + top) for n, top in zip(n_told, tops, strict=True)) < MANY:
        return Json(make(pieces))
    body = await asyncio.to_thread(lambda: encode_large(make(pieces)))
    return Response(body, media_type="application/json")


def n_echoed(piece: StreamPiece) -> int:
    """Return how many tokens of the prompt of ``piece`` are returned with their log-probabilities,
    for ``echo``; 0 without it.
    """
    measured = piece.output.stream.generation.more.get("measured")
    return len(measured[piece.output.prompt]) if measured else 0


def pieces_with_pings(stream: RequestStream) -> AsyncIterator[StreamPiece | None]:
    """Iterate over a request's pieces for a streamed response; None means that a keep-alive is
    due.
    """
    return stream.pieces(PING_S if stream.generation.ping_s is None else stream.generation.ping_s)


async def finished(request: HttpRequest, stream: RequestStream) -> list[StreamPiece]:
    """Read a request to its end; return one piece for each output. Raises ApiError, and GoneError
    if the client disconnects.
    """
    async with watched(request.receive, lambda: stream.abort(GoneError())):
        return await read_to_end(stream)


async def read_to_end(stream: RequestStream) -> list[StreamPiece]:
    """Read a request to its end; return one piece for each output. Raises ApiError, and the error
    that was passed to ``abort``.
    """
    got: dict[OutputStream, list[StreamPiece]] = {output: [] for output in stream.outputs}
    try:
        async for piece in stream.pieces(ping_s=60.0):
            if piece is not None:
                got[piece.output].append(piece)
    finally:
        stream.close()
    return [StreamPiece.joined(pieces) for pieces in got.values()]


class AbortableStream(Protocol):
    """The interface of a request's stream by which a streamed response ends it when the client has
    left. ``kept``: its kept answer, None if that does not outlive the connection.
    """

    kept: KeptStream | None

    def abort(self, why: BaseException) -> None:
        """Abort the request: its iterator of parts raises ``why``."""

    def close(self) -> None:
        """Cancel the outputs that are unfinished."""


class StreamedResponse(Response):
    """A streamed response to a generation request; ``parts`` yields its bytes.

    The headers are sent before the first part exists. A later error is formatted by ``render`` and
    sent as the last part, because the status can no longer change.
    """

    def __init__(
        self,
        stream: AbortableStream,
        parts: AsyncIterator[bytes],
        render: Render,
        media_type: str = "text/event-stream",
    ) -> None:
        super().__init__(None, 200, STREAM_HEADERS, media_type)
        self._stream = stream
        self._media_type = media_type
        self._parts = parts
        self._render = render

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Send the parts until their end, or until the client disconnects. A kept answer is written
        to its end in any case; this client is then one of its readers.
        """
        stream = self._stream
        if stream.kept is not None:
            stream.kept.media_type = self._media_type
            _writers.add(task := asyncio.ensure_future(self._write(stream.kept, scope)))
            task.add_done_callback(_writers.discard)
            await KeptResponse(stream.kept)(scope, receive, send)
            return
        try:
            await send(self.head)
            async with watched(receive, lambda: stream.abort(GoneError())):
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
            stream.close()
        await send({"type": "http.response.body", "body": b"", "more_body": False})

    async def _write(self, kept: KeptStream, scope: Scope) -> None:
        """Write all parts to ``kept``, whether or not a client reads them. A server that stops
        waits for this, because it counts as an open request.
        """
        service = scope["app"].state.service
        service.n_open += 1
        try:
            async for part in self._parts:
                kept.append(part)
        except GoneError:  # it was replaced or stopped
            pass
        except Exception as error:
            kept.append(self._render(problem_of(error)))
            if not isinstance(error, ApiError):
                raise
        finally:
            service.n_open -= 1
            self._stream.close()
            kept.finish()
            if "treadle.lease" in scope:
                scope["treadle.lease"].end()


class KeptResponse(Response):
    """A response that sends a kept answer from byte ``offset`` on."""

    def __init__(self, kept: KeptStream, offset: int = 0) -> None:
        super().__init__(None, 200, STREAM_HEADERS, kept.media_type)
        self._kept = kept
        self._offset = offset
        self._has_left = False

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Send the answer until its end, or until the client disconnects, which does not end the
        answer.
        """
        await send(self.head)
        try:
            async with watched(receive, self._leave):
                read = self._kept.read(self._offset, lambda: self._has_left)
                async with aclosing(read) as parts:
                    async for part in parts:
                        await send({"type": "http.response.body", "body": part, "more_body": True})
        except ApiError as error:  # a slow reader's bytes have been dropped
            last = event(error.as_dict())
            await send({"type": "http.response.body", "body": last, "more_body": True})
        finally:
            scope["treadle.detached"] = not self._kept.completed
        if not self._has_left:
            await send({"type": "http.response.body", "body": b"", "more_body": False})

    def _leave(self) -> None:
        self._has_left = True
        self._kept.wake()
