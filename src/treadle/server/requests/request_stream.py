"""The texts of one HTTP call, as the event loop sees them: they grow elsewhere, and are taken here.

The engine's thread writes into each text's answer and rings the call's bell, once a step. Pieces
wait in the answer. A reader who is slow lets them pile up to ``look_ahead``; then the scheduler
leaves this text alone until some are taken, and goes on with the others.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncIterator, Callable, Sequence
from typing import TYPE_CHECKING

from treadle.base.fast_dataclass import dataclass
from treadle.chat.tools.output import merged
from treadle.server.http.api_errors import ApiError, problem_of
from treadle.server.requests.client_slots import NONE

if TYPE_CHECKING:
    from treadle.chat.tools import OutputPiece
    from treadle.sampling.logprobs import TokenLogprob
    from treadle.scheduler.request import Request
    from treadle.server.requests.generation_request import GenerationRequest


@dataclass(frozen=True)
class Progress:
    """How far a prompt is: of ``total`` tokens ``processed``, ``cached`` of them found. ``place``:
    in the queue, 0 where it is being read.
    """

    total: int
    cached: int
    processed: int
    place: int

    def as_dict(self, since_s: float) -> dict[str, int]:
        """llama.cpp's object, and the place."""
        taken = round(1e3 * (time.perf_counter() - since_s))
        return {
            "total": self.total,
            "cache": self.cached,
            "processed": self.processed,
            "time_ms": taken,
            "queue": self.place,
        }


@dataclass
class StreamPiece:
    """What came of one text since the last time. The last one has a ``finish_reason``. Before the
    first there are some with ``progress`` alone, where that was asked for.
    """

    text: OutputStream
    content: str
    ids: list[int]
    logprobs: list[TokenLogprob]  # where asked for: of each id whose text is not cut off
    finish_reason: str | None  # "stop", "length" or "context"
    progress: Progress | None = None
    starts: Sequence[int] = ()  # of each entry of ``logprobs``, in characters of the whole text
    parts: Sequence[tuple[str, int]] = ()  # of ``content``, each with how many ids it took

    def said(self) -> list[OutputPiece]:
        """Reasoning, content and calls in it. To be asked for once, of pieces in their order."""
        scanner, out = self.text.scanner, []
        for part, n_ids in self.parts:
            out += self.text.scan(part, n_ids)
        if self.finish_reason is not None:
            if scanner.in_reasoning:  # ids without a text yet
                self.text.n_thought += len(self.ids) - sum(n_ids for _, n_ids in self.parts)
            out += self.text.scan("", 0, last=True)
        return merged(out)

    @classmethod
    def joined(cls, pieces: list[StreamPiece]) -> StreamPiece:
        """Pieces of one text as one."""
        return cls(
            pieces[-1].text,
            "".join(piece.content for piece in pieces),
            [id for piece in pieces for id in piece.ids],
            [entry for piece in pieces for entry in piece.logprobs],
            pieces[-1].finish_reason,
            starts=[at for piece in pieces for at in piece.starts],
            parts=[part for piece in pieces for part in piece.parts],
        )


class OutputStream:
    """One request of a call: which choice it is, and when it came and was begun, in seconds."""

    def __init__(self, call: RequestStream, request: Request, index: int, prompt: int = 0) -> None:
        self.call, self.request, self.answer = call, request, request.answer
        self.index, self.prompt = index, prompt  # the choice's, and that of its prompt
        self.scanner = call.asked.planned.speech.scanner()
        self.n_told = 0  # ids that were given out
        self.n_thought = 0  # ids of reasoning, and of the mark that ends it: see ``said``
        self._n_open = 0  # ids of which it is not known yet whether they are reasoning
        self.told: Progress | None = None  # that was given out last
        self.slot = NONE  # that it is in, or has been in
        self.came_s = call.came_s
        self.first_s = self.last_s = 0.0  # when ids came
        # In the tally: ids, seconds of writing, and whether it has ended.
        self.n_counted, self.counted_s, self.counted = 0, 0.0, False
        self.drafts_counted: tuple[int, int, list[int]] = (0, 0, [])

    def scan(self, part: str, n_ids: int, *, last: bool = False) -> list[OutputPiece]:
        """What is certain of the text with a ``part`` of ``n_ids``; its reasoning is counted."""
        scanner = self.scanner
        reasons, open = scanner.in_reasoning, scanner.undecided
        out = scanner.feed(part, last=last)
        if reasons:
            self.n_thought += n_ids
        elif open or scanner.undecided:
            self._n_open += n_ids
        if not scanner.undecided:
            if any(said.kind == "reasoning" for said in out):
                self.n_thought += self._n_open
            self._n_open = 0
        return out

    def take(self) -> StreamPiece | None:
        """What is new. Raises ApiError where the text has ended with an error."""
        if self.call.asked.progress and (moved := self._take_progress()) is not None:
            return moved
        answer, parts, n = self.answer, [], self.n_told
        while (piece := answer.take()) is not None:
            parts.append((piece, answer.n_taken - n))
            n = answer.n_taken
        over = answer.over
        if over and answer.error is not None:
            raise problem_of(answer.error)
        if not parts and not over:
            return None
        start, end = self.n_told, len(answer.ids) if over else answer.n_taken
        shown = answer.n_shown if over else end  # a stop string is told to nobody
        self.n_told = end
        logprobs = answer.logprobs[start:shown]
        reason = answer.finish_reason if over else None
        return StreamPiece(
            self,
            "".join(part for part, _ in parts),
            answer.ids[start:end],
            logprobs,
            reason,
            starts=answer.starts[start:shown] if logprobs else (),
            parts=parts,
        )

    def progress(self) -> Progress | None:
        """How far the prompt is; None once the text has begun, or where nothing is known yet."""
        timings, request = self.answer.timings, self.request
        found = Progress(timings.n_prompt, timings.n_cached, request.n_read, request.place)
        begun = self.answer.ids or self.answer.done
        return None if begun or not (found.processed or found.place) else found

    def _take_progress(self) -> StreamPiece | None:
        """A piece that tells it, where it has changed; one at least before the text begins, however
        quickly the prompt was read.
        """
        now, timings = self.progress(), self.answer.timings
        begun = self.answer.ids or self.answer.done
        if begun and self.told is None and self.answer.error is None:
            n = timings.n_prompt if self.answer.ids else timings.n_cached
            now = Progress(timings.n_prompt, timings.n_cached, n, 0)
        if now is None or now == self.told:
            return None
        self.told = now
        return StreamPiece(self, "", [], [], None, now)


class Wakeup:
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


class RequestStream:
    """One HTTP call's texts. ``drop`` cancels a request, ``wake`` tells the engine's thread that
    pieces were taken.
    """

    def __init__(
        self,
        drop: Callable[[OutputStream], None],
        wake: Callable[[], None],
        *,
        asked: GenerationRequest,
        came_s: float,
        timeout_s: float | None = None,
    ) -> None:
        self.asked, self.came_s = asked, came_s  # what it wants, and when it came
        self.on_close: Callable[[], None] = _nothing
        self.loop = asyncio.get_running_loop()
        self.bell = Wakeup(self.loop)
        self.texts: list[OutputStream] = []
        self.stream = asked.stream  # else only ends are of interest
        self.ended: BaseException | None = None  # why it was given up
        self._drop, self._wake = drop, wake
        self._timer: asyncio.TimerHandle | None = None
        if timeout_s is not None:
            left_s = came_s + timeout_s - time.perf_counter()
            self._timer = self.loop.call_later(max(left_s, 0), self.give_up, late(timeout_s))

    async def pieces(self, ping_s: float) -> AsyncIterator[StreamPiece | None]:
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


def late(timeout_s: float) -> ApiError:
    """What a call is told whose time is over."""
    return ApiError(504, f"not done within {timeout_s:g} s", code="timeout")


class GoneError(Exception):
    """The client has left."""
