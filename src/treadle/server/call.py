"""The texts of one HTTP call, as the event loop sees them: they grow elsewhere, and are taken here.

The engine's thread writes into each text's answer and rings the call's bell, once a step. Pieces
wait in the answer. A reader who is slow lets them pile up to ``look_ahead``; then the scheduler
leaves this text alone until some are taken, and goes on with the others.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncIterator, Callable
from typing import TYPE_CHECKING

from treadle.record import dataclass
from treadle.server.problems import ApiError, problem_of

if TYPE_CHECKING:
    from treadle.logprobs import TokenLogprob
    from treadle.request import Request
    from treadle.server.asked import Asked
    from treadle.speech import Said


@dataclass
class Piece:
    """What came of one text since the last time. The last one has a ``finish_reason``."""

    text: Text
    content: str
    ids: list[int]
    logprobs: list[TokenLogprob]  # of each id, where they were asked for
    finish_reason: str | None  # "stop", "length" or "context"

    def said(self) -> list[Said]:
        """Reasoning, content and calls in it. To be asked for once, of pieces in their order."""
        return self.text.scanner.feed(self.content, last=self.finish_reason is not None)

    @classmethod
    def joined(cls, pieces: list[Piece]) -> Piece:
        """Pieces of one text as one."""
        return cls(
            pieces[-1].text,
            "".join(piece.content for piece in pieces),
            [id for piece in pieces for id in piece.ids],
            [entry for piece in pieces for entry in piece.logprobs],
            pieces[-1].finish_reason,
        )


class Text:
    """One request of a call: which choice it is, and when it came and was begun, in seconds."""

    def __init__(self, call: Call, request: Request, index: int, prompt: int = 0) -> None:
        self.call, self.request, self.answer = call, request, request.answer
        self.index, self.prompt = index, prompt  # the choice's, and that of its prompt
        self.scanner = call.asked.speech.scanner()
        self.n_told = 0  # ids that were given out
        self.came_s = time.perf_counter()
        self.first_s = self.last_s = 0.0  # when ids came
        self.counted = False  # in the tally, as one that has ended

    def take(self) -> Piece | None:
        """What is new. Raises ApiError where the text has ended with an error."""
        answer, parts = self.answer, []
        while (piece := answer.take()) is not None:
            parts.append(piece)
        over = answer.over
        if over and answer.error is not None:
            raise problem_of(answer.error)
        if not parts and not over:
            return None
        start, end = self.n_told, len(answer.ids) if over else answer.n_taken
        self.n_told = end
        reason = answer.finish_reason if over else None
        return Piece(
            self, "".join(parts), answer.ids[start:end], answer.logprobs[start:end], reason
        )


class Bell:
    """Wakes the one coroutine that waits; a ring that nobody waits for is kept."""

    def __init__(self, loop: asyncio.AbstractEventLoop) -> None:
        self._loop, self._rung = loop, False
        self._waiter: asyncio.Future[bool] | None = None

    def ring(self, rung: bool = True) -> None:
        """In the loop's thread."""
        if self._waiter is not None and not self._waiter.done():
            self._waiter.set_result(rung)
        elif rung:
            self._rung = True

    async def wait(self, timeout_s: float) -> bool:
        """Until it rings; False where that takes longer."""
        if not self._rung:
            self._waiter = self._loop.create_future()
            timer = self._loop.call_later(timeout_s, self.ring, False)
            try:
                return await self._waiter
            finally:
                timer.cancel()
                self._waiter = None
        self._rung = False
        return True


class Call:
    """One HTTP call's texts. ``drop`` cancels a request, ``wake`` tells the engine's thread that
    pieces were taken.
    """

    def __init__(
        self,
        drop: Callable[[Text], None],
        wake: Callable[[], None],
        *,
        asked: Asked,
        timeout_s: float | None = None,
    ) -> None:
        self.asked = asked  # what it wants
        self.on_close: Callable[[], None] = _nothing
        self.loop = asyncio.get_running_loop()
        self.bell = Bell(self.loop)
        self.texts: list[Text] = []
        self.stream = asked.stream  # else only ends are of interest
        self.ended: BaseException | None = None  # why it was given up
        self._drop, self._wake = drop, wake
        self._timer: asyncio.TimerHandle | None = None
        if timeout_s is not None:
            late = ApiError(504, f"not done within {timeout_s:g} s", code="timeout")
            self._timer = self.loop.call_later(timeout_s, self.give_up, late)

    async def pieces(self, ping_s: float) -> AsyncIterator[Piece | None]:
        """What comes, of whichever text; None each time that nothing comes for ``ping_s``.

        Raises ApiError where a text ends with an error, and what ``give_up`` was told.
        """
        left = list(self.texts)
        while left:
            for text in tuple(left):
                if (piece := text.take()) is not None:
                    self._wake()
                    if piece.finish_reason is not None:
                        left.remove(text)
                        self._drop(text)
                    yield piece
            if self.ended is not None:
                raise self.ended
            if left and not await self.bell.wait(ping_s):
                yield None

    def give_up(self, why: BaseException) -> None:
        """End it: the engine computes for it for one more step at most, and ``pieces`` raises
        ``why``.
        """
        if self.ended is None:
            self.ended = why
            self.close()
            self.bell.ring()

    def close(self) -> None:
        """Nobody reads on. What is still being written is cancelled."""
        if self._timer is not None:
            self._timer.cancel()
        self.on_close()
        for text in self.texts:
            self._drop(text)


def _nothing() -> None:
    pass


class GoneError(Exception):
    """The client has left."""
