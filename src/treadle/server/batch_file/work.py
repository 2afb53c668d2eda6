"""Runs many lines at once and writes their answers in input order.

An answer waits until those before it are written. So the file always holds the answers of the first
lines without a gap, and a job can resume after them.
"""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Awaitable, Callable, Iterator
from functools import partial

from treadle.base.fast_classes import dataclass
from treadle.server.batch_file.lines import InputLine

IN_HAND = 256  # lines being answered at once
AHEAD = 4096  # lines that were started but not written
HELD = 64 << 20  # bytes of unwritten answers, above which no further line is started
MAX_LINES = 256 << 20  # bytes of lines being answered; one larger line is answered alone


@dataclass(frozen=True)
class OutputLine:
    """A line of the output: ``data``, its bytes with the newline. ``n_tokens``: generated tokens;
    ``failed``: it holds an error, not an answer.
    """

    data: bytes
    n_tokens: int = 0
    failed: bool = False


Answer = Callable[[InputLine], Awaitable[OutputLine]]


class AsyncLines:
    """Iterator of lines for an event loop. A thread of its own reads them, because ``lines`` may
    block on a pipe.
    """

    def __init__(self, lines: Iterator[InputLine]) -> None:
        self._lines, self._loop = lines, asyncio.get_running_loop()
        self._asked = threading.Semaphore(0)
        self._queue: asyncio.Queue[InputLine | BaseException | None] = asyncio.Queue()
        threading.Thread(target=self._read, daemon=True, name="treadle-lines").start()

    def _read(self) -> None:
        while True:
            self._asked.acquire()
            found: InputLine | BaseException | None
            try:
                found = next(self._lines, None)
            except BaseException as error:
                found = error
            try:
                self._loop.call_soon_threadsafe(self._queue.put_nowait, found)
            except RuntimeError:  # the loop is closed
                return
            if not isinstance(found, InputLine):
                return

    async def next(self) -> InputLine | None:
        """Return the next line, None at the end. Raises the error of the iterator."""
        self._asked.release()
        found = await self._queue.get()
        if isinstance(found, BaseException):
            raise found
        return found


async def work(
    lines: Iterator[InputLine], answer: Answer, write: Callable[[OutputLine], None]
) -> None:
    """Answer all ``lines``, many at once: call ``answer`` for each, and ``write`` with the results
    in input order. Stops at the first error of ``lines``, ``answer`` or ``write``, and raises it.
    """
    order: asyncio.Queue[asyncio.Task[OutputLine] | None] = asyncio.Queue(AHEAD)
    slots = asyncio.Semaphore(IN_HAND)
    below = asyncio.Event()
    held = 0
    n_bytes = 0  # of lines in hand
    below.set()
    ended = asyncio.Event()
    begun: set[asyncio.Task[OutputLine]] = set()

    def done(task: asyncio.Task[OutputLine], line: InputLine) -> None:
        nonlocal held, n_bytes
        n_bytes -= len(line.raw)
        ended.set()
        slots.release()
        if not task.cancelled() and task.exception() is None:
            held += len(task.result().data)
            if held > HELD:
                below.clear()

    async def read() -> None:
        nonlocal n_bytes
        source = AsyncLines(lines)
        try:
            while (line := await source.next()) is not None:
                await below.wait()
                await slots.acquire()
                while n_bytes and n_bytes + len(line.raw) > MAX_LINES:
                    ended.clear()
                    await ended.wait()
                n_bytes += len(line.raw)
                task = asyncio.ensure_future(answer(line))
                begun.add(task)
                task.add_done_callback(partial(done, line=line))
                await order.put(task)
        finally:
            await order.put(None)

    reader = asyncio.ensure_future(read())
    try:
        while (task := await order.get()) is not None:
            written = await task
            begun.discard(task)
            write(written)
            held -= len(written.data)
            if held <= HELD:
                below.set()
        await reader
    finally:
        for left in (reader, *begun):
            left.cancel()
        await asyncio.gather(reader, *begun, return_exceptions=True)
