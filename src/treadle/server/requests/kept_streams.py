"""Streamed answers that outlive their connection, as llama.cpp keeps them.

A request with the header ``X-Conversation-Id`` is written to its end even if its client leaves, and
``/v1/stream`` reads the same bytes again from any offset. One answer is kept for each conversation;
the next one replaces it, and cancels it if it is still being written.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncGenerator, Callable
from typing import TYPE_CHECKING

from treadle.server.http.api_errors import ApiError, GoneError, busy

if TYPE_CHECKING:
    from treadle.server.requests.http_responses import AbortableStream

MAX_BYTES = 4 << 20  # of one answer; the oldest are dropped
MOST_KEPT = 64  # answers
KEPT_S = 300.0  # after its end
UNREAD_S = 600.0  # after which an answer that nobody reads is no longer written
CHUNK = 1 << 16  # bytes that a reader gets at once
MAX_ID = 256  # characters


class KeptStream:
    """The bytes of one streamed answer, at most the last ``MAX_BYTES``. ``conversation``: its id.
    ``stream``: the request that writes them, cancelled when nobody has read for ``UNREAD_S``
    seconds.
    """

    def __init__(self, conversation: str, stream: AbortableStream) -> None:
        self.conversation = conversation
        self.media_type = "text/event-stream"
        self.started = int(time.time())
        self.completed = 0  # Unix time; 0 while it is written
        self.first = 0  # offset of the first byte that is still there
        self.on_done: Callable[[], object] = _nothing
        self._stream = stream
        self._bytes = bytearray()
        self._more = asyncio.Event()
        self._loop = asyncio.get_running_loop()
        self._n_readers = 0
        self._timer: asyncio.TimerHandle | None = None

    @property
    def total(self) -> int:
        """Number of bytes written so far, dropped ones included."""
        return self.first + len(self._bytes)

    def append(self, part: bytes) -> None:
        """Add bytes, drop the oldest above ``MAX_BYTES``, and wake the readers."""
        self._bytes += part
        n_over = len(self._bytes) - MAX_BYTES
        if n_over > 0:
            del self._bytes[:n_over]
            self.first += n_over
        self.wake()

    def finish(self) -> None:
        """Mark the answer as complete, and wake the readers."""
        self.completed = int(time.time())
        self._stop_timer()
        self.wake()
        self.on_done()

    def cancel(self) -> None:
        """Abort the request, unless its answer is complete; readers then come to an end."""
        if not self.completed:
            self._stream.abort(GoneError())

    def wake(self) -> None:
        """Wake all readers, which look for new bytes and whether their client has left."""
        self._more.set()
        self._more = asyncio.Event()

    async def read(self, offset: int, has_left: Callable[[], bool]) -> AsyncGenerator[bytes, None]:
        """Yield the bytes from ``offset`` on, as they come, until the answer is complete or
        ``has_left()`` is true after a ``wake``. Raises ApiError if bytes at the offset have been
        dropped.
        """
        self._n_readers += 1
        self._stop_timer()
        try:
            while not has_left():
                self.check_offset(offset)
                start = offset - self.first
                chunk = bytes(self._bytes[start : start + CHUNK])
                if chunk:
                    offset += len(chunk)
                    yield chunk
                elif self.completed:
                    return
                else:
                    await self._more.wait()
        finally:
            self._n_readers -= 1
            if not self._n_readers and not self.completed:
                self._timer = self._loop.call_later(UNREAD_S, self.cancel)

    def check_offset(self, offset: int) -> None:
        """Raise ApiError for an offset whose bytes have been dropped, or that is beyond the end."""
        if not self.first <= offset <= self.total:
            raise ApiError(
                400,
                f"from: the bytes {self.first} to {self.total} of this stream are there, not "
                f"{offset}",
                param="from",
                code="offset_lost",
            )

    def _stop_timer(self) -> None:
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None


class KeptStreams:
    """The kept answers of a server, by ``owner`` (the name of the API key, "" without keys) and
    ``conversation`` (its id).
    """

    def __init__(self) -> None:
        self._kept: dict[tuple[str, str], KeptStream] = {}
        self._timers = set[asyncio.TimerHandle]()

    def open(self, owner: str, conversation: str, stream: AbortableStream) -> KeptStream:
        """Return a new kept stream for the answer of ``stream``, in place of the conversation's
        former one, which is cancelled. Raises ApiError (503) if ``MOST_KEPT`` are all still being
        written.
        """
        self.drop(owner, conversation)
        if len(self._kept) >= MOST_KEPT:
            oldest = next((name for name, kept in self._kept.items() if kept.completed), None)
            if oldest is None:
                raise busy(f"{MOST_KEPT} streams are being kept for clients that may come back")
            del self._kept[oldest]
        name = (owner, conversation)
        kept = self._kept[name] = KeptStream(conversation, stream)
        kept.on_done = lambda: self._expire_later(name, kept)
        return kept

    def find(self, owner: str, conversation: str) -> KeptStream | None:
        """Return a conversation's kept answer; None if it never was, or is no longer, kept."""
        return self._kept.get((owner, conversation))

    def of_conversation(self, owner: str, conversation: str) -> list[KeptStream]:
        """Return the kept answers whose id is ``conversation``, or that followed by a model's name:
        ``ID::MODEL``.
        """
        return [
            kept
            for (whose, id), kept in self._kept.items()
            if whose == owner and (id == conversation or id.startswith(f"{conversation}::"))
        ]

    def drop(self, owner: str, conversation: str) -> None:
        """Cancel and forget a conversation's answer, if there is one."""
        kept = self._kept.pop((owner, conversation), None)
        if kept is not None:
            kept.cancel()

    def close(self) -> None:
        """Forget all answers, without cancelling their requests."""
        for timer in self._timers:
            timer.cancel()
        self._timers.clear()
        self._kept.clear()

    def _expire_later(self, name: tuple[str, str], kept: KeptStream) -> None:
        def expire() -> None:
            self._timers.discard(timer)
            if self._kept.get(name) is kept:
                del self._kept[name]

        timer = asyncio.get_running_loop().call_later(KEPT_S, expire)
        self._timers.add(timer)


def conversation_id(given: str | None) -> str | None:
    """Return the conversation's id from ``given``, the header ``X-Conversation-Id``; None without
    it. Raises ApiError for one that is too long.
    """
    if not given:
        return None
    if len(given) > MAX_ID:
        raise ApiError(400, f"X-Conversation-Id: more than {MAX_ID} characters")
    return given


def _nothing() -> None:
    pass
