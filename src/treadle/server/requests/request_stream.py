"""Event-loop side of one HTTP request: receives the output that the engine thread produces.

The engine thread appends to each request's output and wakes the stream once a step. Pieces wait in
the output. A slow reader lets them pile up to ``look_ahead``; then the scheduler pauses this
request until some are taken, and goes on with the others.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncIterator, Callable, Sequence
from typing import TYPE_CHECKING, Any, NamedTuple

from treadle.base.fast_classes import dataclass
from treadle.chat.tools.output import merged
from treadle.server.http.api_errors import problem_of, timed_out
from treadle.server.requests.client_slots import NONE

if TYPE_CHECKING:
    from treadle.chat.tools import OutputPiece
    from treadle.kvcache.media import MediaEntry
    from treadle.sampling.logprobs import TokenLogprob
    from treadle.scheduler.request import Request
    from treadle.server.requests.generation_request import GenerationRequest
    from treadle.server.requests.kept_streams import KeptStream


class MediaProgress(NamedTuple):
    """Progress of a prompt's pictures and sounds: ``encoded`` of ``total``, cached ones included,
    and ``encoding_ms``, the milliseconds of encoding so far, in steps of 100.
    """

    total: int
    encoded: int
    encoding_ms: int


@dataclass(frozen=True)
class Progress:
    """Prompt progress: ``processed`` of ``total`` tokens, ``cached`` of them reused. ``place``:
    position in the queue, 0 once prefill has begun. ``media``: progress of its pictures and sounds.
    """

    total: int
    cached: int
    processed: int
    place: int
    media: MediaProgress | None = None

    def as_dict(self, since_s: float) -> dict[str, Any]:
        """Return llama.cpp's ``prompt_progress`` object: ``total``, ``cache`` and ``processed``
        tokens, and ``time_ms`` since ``since_s``, the request's arrival by ``perf_counter``. Own
        fields: ``queue``, the position in the queue, and ``media``, left out if None.
        """
        taken = round(1e3 * (time.perf_counter() - since_s))
        told: dict[str, Any] = {
            "total": self.total,
            "cache": self.cached,
            "processed": self.processed,
            "time_ms": taken,
            "queue": self.place,
        }
        if self.media is not None:
            told["media"] = self.media._asdict()
        return told


@dataclass
class StreamPiece:
    """New text (``content``) and token ``ids`` of one output, since its previous piece. The last
    piece has a ``finish_reason``, all others None. If progress is requested, pieces with
    ``progress`` alone come before the first token.
    """

    output: OutputStream
    content: str
    ids: list[int]
    logprobs: list[TokenLogprob]  # if requested: for each id before a stop string
    finish_reason: str | None  # "stop", "length" or "context"
    progress: Progress | None = None
    starts: Sequence[int] = ()  # character offset in the whole output of each ``logprobs`` entry
    parts: Sequence[tuple[str, int]] = ()  # of ``content``, each with its number of ids

    def parsed_parts(self) -> list[OutputPiece]:
        """Return the piece's reasoning, content and tool calls, by the output's parser. Call it
        once for each piece, in order.
        """
        scanner = self.output.scanner
        out = []
        for part, n_ids in self.parts:
            out += self.output.scan(part, n_ids)
        if self.finish_reason is not None:
            if scanner.in_reasoning:  # ids not decoded to text yet
                self.output.n_reasoning += len(self.ids) - sum(n_ids for _, n_ids in self.parts)
            out += self.output.scan("", 0, last=True)
        return merged(out)

    @classmethod
    def joined(cls, pieces: list[StreamPiece]) -> StreamPiece:
        """Return the pieces of one output as one piece."""
        return cls(
            pieces[-1].output,
            "".join(piece.content for piece in pieces),
            [id for piece in pieces for id in piece.ids],
            [entry for piece in pieces for entry in piece.logprobs],
            pieces[-1].finish_reason,
            starts=[at for piece in pieces for at in piece.starts],
            parts=[part for piece in pieces for part in piece.parts],
        )


class OutputStream:
    """One output of an HTTP request: its scheduler's request, the ``index`` of its choice and of
    its ``prompt``, its parser, and how much of it was already returned. Times are seconds of
    ``perf_counter``.
    """

    def __init__(
        self, stream: RequestStream, request: Request, index: int, prompt: int = 0
    ) -> None:
        self.stream = stream
        self.request = request
        self.answer = request.answer
        self.index = index  # of the choice
        self.prompt = prompt  # index of its prompt
        self.scanner = stream.generation.planned.marks.scanner()
        self.n_returned = 0  # ids returned so far
        self.n_reasoning = 0  # ids of reasoning and of its end mark: see ``parsed_parts``
        self._n_open = 0  # ids not yet known to be reasoning or not
        self.last_progress: Progress | None = None  # the last that was returned
        # By picture or sound of the prompt: how many tokens there are up to its end.
        self._media_ends: dict[MediaEntry, int] = {}
        if request.media and stream.generation.progress:
            last = {entry.ids[-1]: entry for entry in request.media}
            ends = {last[id]: n for n, id in enumerate(request.ids, 1) if id in last}
            self._media_ends = ends
        self.slot = NONE  # its current or last slot
        self.arrival_s = stream.arrival_s
        self.first_s = self.last_s = 0.0  # when ids came
        # Already counted in ``ServerStats``: ids, seconds of decoding, its end.
        self.n_counted = 0
        self.counted_s = 0.0
        self.counted = False
        self.drafts_counted: tuple[int, int, list[int]] = (0, 0, [])

    def scan(self, part: str, n_ids: int, *, last: bool = False) -> list[OutputPiece]:
        """Feed text ``part``, which has ``n_ids`` tokens, to the parser; return the pieces that are
        certain by now. Counts the tokens of reasoning in ``n_reasoning``. ``last``: the output
        ends.
        """
        scanner = self.scanner
        reasons = scanner.in_reasoning
        open = scanner.undecided
        out = scanner.feed(part, last=last)
        if reasons:
            self.n_reasoning += n_ids
        elif open or scanner.undecided:
            self._n_open += n_ids
        if not scanner.undecided:
            if any(said.kind == "reasoning" for said in out):
                self.n_reasoning += self._n_open
            self._n_open = 0
        return out

    def take(self) -> StreamPiece | None:
        """Return the new output since the last call as a piece, or a piece of progress; None if
        there is nothing new. Raises ApiError if the request has failed.
        """
        if self.stream.generation.progress and (moved := self._take_progress()) is not None:
            return moved
        answer = self.answer
        parts = []
        n = self.n_returned
        while (piece := answer.take()) is not None:
            parts.append((piece, answer.n_taken - n))
            n = answer.n_taken
        over = answer.is_drained
        if over and answer.error is not None:
            raise problem_of(answer.error)
        if not parts and not over:
            return None
        start = self.n_returned
        end = len(answer.ids) if over else answer.n_taken
        shown = answer.n_shown if over else end  # a stop string is never returned
        self.n_returned = end
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
        """Return the prompt's progress; None after the first token, or before any is known."""
        timings = self.answer.timings
        request = self.request
        media = self._media_progress()
        found = Progress(
            timings.n_prompt, timings.n_cached, request.n_read, request.queue_position, media
        )
        begun = self.answer.ids or self.answer.done
        known = found.processed or found.place or (media is not None and media.encoding_ms)
        return found if known and not begun else None

    def _media_progress(self) -> MediaProgress | None:
        """Return the progress of the prompt's pictures and sounds; None for a prompt without
        any.
        """
        if not self._media_ends:
            return None
        n_read = self.request.n_read
        ends = self._media_ends.items()
        n_encoded = sum(end <= n_read or entry.rows is not None for entry, end in ends)
        encoding_ms = int(10 * self.answer.timings.media_s) * 100
        return MediaProgress(len(self._media_ends), n_encoded, encoding_ms)

    def _take_progress(self) -> StreamPiece | None:
        """Return a piece with the prompt's progress if it has changed, else None. Before the first
        token at least one comes, and the last one has all tokens of the prompt, however fast the
        prefill was.
        """
        now = self.progress()
        timings = self.answer.timings
        begun = self.answer.ids or self.answer.done
        if begun and self.answer.error is None:
            n = timings.n_prompt if self.answer.ids else timings.n_cached
            if self.last_progress is None or self.last_progress.processed < n:
                now = Progress(timings.n_prompt, timings.n_cached, n, 0, self._media_progress())
        if now is None or now == self.last_progress:
            return None
        self.last_progress = now
        return StreamPiece(self, "", [], [], None, now)


class Wakeup:
    """Wakes the one coroutine that waits. A ``notify`` while none waits is kept for the next
    ``wait``.
    """

    def __init__(self, loop: asyncio.AbstractEventLoop) -> None:
        self._loop = loop
        self._notified = False
        self._waiter: asyncio.Future[bool] | None = None

    def notify(self, result: bool = True) -> None:
        """Wake the waiting coroutine, whose ``wait`` returns ``result``. If none waits, only a True
        is kept for the next ``wait``. Call it in the loop's thread.
        """
        if self._waiter is not None and not self._waiter.done():
            self._waiter.set_result(result)
        elif result:
            self._notified = True

    async def wait(self, timeout_s: float) -> bool:
        """Wait until ``notify``, and return its ``result``, usually True; return False after
        ``timeout_s`` seconds.
        """
        if not self._notified:
            self._waiter = self._loop.create_future()
            timer = self._loop.call_later(timeout_s, self.notify, False)
            try:
                return await self._waiter
            finally:
                timer.cancel()
                self._waiter = None
        self._notified = False
        return True


class RequestStream:
    """The outputs of one HTTP request, read in the event loop. ``drop(output)`` is called to cancel
    an output, ``wake()`` to tell the engine thread that pieces were taken. ``arrival_s``: arrival
    by ``perf_counter``; ``timeout_s``: seconds from then until the request is aborted, None for no
    limit.
    """

    def __init__(
        self,
        drop: Callable[[OutputStream], None],
        wake: Callable[[], None],
        *,
        generation: GenerationRequest,
        arrival_s: float,
        timeout_s: float | None = None,
    ) -> None:
        self.generation = generation
        self.arrival_s = arrival_s  # its arrival time
        self.on_close: Callable[[], None] = _nothing
        self.loop = asyncio.get_running_loop()
        self.wakeup = Wakeup(self.loop)
        self.outputs: list[OutputStream] = []
        self.is_streamed = generation.is_streamed  # else only finished outputs matter
        self.ids: set[str] = set()  # by which clients name it: its answer's, its HTTP request's
        self.n_prepared = 0  # bytes of its prepared pictures and sounds
        self.ended: BaseException | None = None  # the error of ``abort``
        self.kept: KeptStream | None = None  # its answer, if it outlives the connection
        self._drop = drop
        self._wake = wake
        self._timer: asyncio.TimerHandle | None = None
        if timeout_s is not None:
            left_s = arrival_s + timeout_s - time.perf_counter()
            self._timer = self.loop.call_later(max(left_s, 0), self.abort, timed_out(timeout_s))

    async def pieces(self, ping_s: float) -> AsyncIterator[StreamPiece | None]:
        """Yield new pieces of any output; None whenever nothing comes for ``ping_s`` seconds.

        Raises ApiError if an output ends with an error, and the error that was passed to
        ``abort``.
        """
        left = list(self.outputs)
        while left:
            for output in tuple(left):
                if (piece := output.take()) is not None:
                    self._wake()
                    if piece.finish_reason is not None:
                        left.remove(output)
                        self._drop(output)
                    yield piece
            if self.ended is not None:
                raise self.ended
            if left and not await self.wakeup.wait(ping_s):
                yield None

    def abort(self, why: BaseException) -> None:
        """Abort the request: the engine computes at most one more step for it, and ``pieces``
        raises ``why``.
        """
        if self.ended is None:
            self.ended = why
            self.close()
            self.wakeup.notify()

    def close(self) -> None:
        """Cancel the unfinished outputs: nobody reads them any more."""
        if self._timer is not None:
            self._timer.cancel()
        self.on_close()
        for output in self.outputs:
            self._drop(output)


def _nothing() -> None:
    pass
