"""``Generation``: the result of ``generate`` and ``chat``, produced while it is iterated."""

from __future__ import annotations

from collections import deque
from collections.abc import AsyncIterator, Callable, Iterable, Iterator, Sequence
from math import inf
from typing import TYPE_CHECKING, NoReturn, TypeVar

from treadle.base.fork_safety import UseLock

if TYPE_CHECKING:
    from treadle.sampling.logprobs import TokenLogprob
    from treadle.scheduler.request import MediaUsage, Request
    from treadle.scheduler.scheduler import CooperativeStepper

T = TypeVar("T")
LOOK_AHEAD = 4  # pieces written ahead of the reader
AHEAD = 256  # requests of ``in_order`` in flight: more than run at once


class Generation:
    """An iterator over pieces of generated text, each of whole characters; ``text`` and ``ids``
    hold the output so far.

    ``finish_reason`` is None until the iterator has ended, then "stop" (end of text, or a stop
    string), "length" (``max_tokens``) or "context" (the context is full). ``logprobs``, if
    requested, has an entry for each of ``ids``: its log-probability and the likeliest alternatives,
    by the model's own logits before sampling settings and grammars. ``media`` has the prompt's
    pictures and sounds in order: tokens, size, and the size that the model sees.

    Nothing runs before the first piece is requested. Generations that are iterated by several
    threads, or alternately by one, are batched together. Each runs at most a few pieces ahead of
    its reader.

    As the value of a notebook's cell it is shown while it is generated; with ``logprobs`` the
    tokens are then coloured by their probabilities.

    ``async for`` and ``await afinish()`` work too: each step runs in a thread. Cancelling them ends
    the generation after the current step (at most a token or one batch of the prompt); its session
    stays consistent.
    """

    def __init__(self, request: Request, stepper: CooperativeStepper) -> None:
        answer = request.answer
        self.prompt_ids: list[int] = list(request.source or request.ids)
        self.ids: list[int] = []
        self.text = ""
        self.finish_reason: str | None = None
        self.logprobs: list[TokenLogprob] | None = None if request.n_top is None else []
        self.timings = answer.timings
        self.media: Sequence[MediaUsage] = answer.media
        self._request = request
        self._answer = answer
        self._stepper = stepper
        self._lock = UseLock()  # one thread at a time

    _begun = _ended = False

    def __reduce__(self) -> NoReturn:  # the end of a copy would end the generation
        raise TypeError("a Generation cannot be pickled or copied: its text, ids and timings can")

    def __repr__(self) -> str:
        end = f"finish_reason {self.finish_reason!r}" if self.finish_reason else "not finished"
        text = repr(self.text) if len(self.text) <= 60 else f"{self.text[:59]!r}..."
        return f"Generation({text}, {len(self.ids)} tokens, {end})"

    def _repr_html_(self) -> str:
        from treadle.api.notebook import answer_html

        return answer_html(self)

    def _ipython_display_(self) -> None:
        from treadle.api.notebook import display

        display(self)

    def __iter__(self) -> Iterator[str]:
        return self

    def __next__(self) -> str:
        with self._lock:
            if self._ended:
                raise StopIteration
            self.wait(self._answer.has_news)
            piece = self._take()
        if piece is None:
            raise StopIteration
        return piece

    def __aiter__(self) -> AsyncIterator[str]:
        return self

    async def __anext__(self) -> str:
        piece = await self.in_thread(lambda: next(self, None))
        if piece is None:
            raise StopAsyncIteration
        return piece

    async def afinish(self) -> str:
        """Generate to the end in a thread; return the whole text. Cancelling it ends the generation
        after the current step.
        """
        if not self._ended:
            self.begin(look_ahead=inf)  # joins the batch at once, however busy the threads are
        return await self.in_thread(self.finish)

    async def in_thread(self, work: Callable[[], T]) -> T:
        """Return ``work()``, called in a thread of asyncio. If the task is cancelled, the
        generation is closed, and ``work`` is awaited before the cancellation goes on.
        """
        import asyncio  # takes 30 ms, and is rarely needed

        step = asyncio.ensure_future(asyncio.to_thread(work))
        try:
            return await asyncio.shield(step)
        except asyncio.CancelledError:
            self.close()
            step.add_done_callback(lambda done: done.cancelled() or done.exception())
            await asyncio.wait([step])
            raise

    def __del__(self) -> None:
        if self._begun and not self._ended:  # the rest will not be read
            self._stepper.scheduler.cancel(self._request)

    def close(self) -> None:
        """End the generation: the iterator yields no more. A prompt that another thread is
        processing stops after the current batch.
        """
        self._ended = True
        self._stepper.scheduler.cancel(self._request)
        self._stepper.scheduler.process_inbox()

    def finish(self) -> str:
        """Generate to the end; return the whole text."""
        with self._lock:
            if not self._ended:
                try:
                    self.begin(look_ahead=inf)
                    self.wait(lambda: self._answer.done)
                finally:
                    while self._take() is not None:
                        pass
        return self.text

    def begin(self, *, look_ahead: float) -> None:
        """Add the request to the scheduler's queue: from now on steps of other callers generate it
        too, up to ``look_ahead`` pieces that the reader has not taken.
        """
        self._request.look_ahead = look_ahead
        if not self._begun and not self._answer.done:
            self._begun = True
            self._stepper.scheduler.add(self._request)

    def wait(self, enough: Callable[[], bool]) -> None:
        """Run steps until ``enough()`` is true, or the generation is closed."""
        if not self._begun:
            self.begin(look_ahead=LOOK_AHEAD)
        try:
            self._stepper.step_until(enough, self._request)
        except BaseException:
            self.close()
            raise

    def _take(self) -> str | None:
        """Return the next piece, and append it and its ids to the output; None at the end, if
        closed, and if no piece is ready. Raises the request's error.
        """
        answer = self._answer
        piece = answer.take()
        start = len(self.ids)
        end = len(answer.ids) if piece is None else answer.n_taken
        self.ids += answer.ids[start:end]
        if self.logprobs is not None:
            self.logprobs += answer.logprobs[start:end]
        if piece is not None:
            self.text += piece
        elif answer.is_drained:
            self._ended = True
            self.finish_reason = answer.finish_reason
            if isinstance(answer.error, StopIteration):  # of a sampler
                raise RuntimeError("a sampler raised StopIteration") from answer.error
            if answer.error is not None:
                raise answer.error
        return piece


def in_order(generations: Iterable[Generation]) -> Iterator[Generation]:
    """Yield generations in order, each when it is finished. At most AHEAD unfinished ones are
    queued at once; as many of them run as there are pages for. An error raised by iterating
    ``generations`` is raised after the generations that came before it.
    """
    queue: deque[Generation] = deque()
    source = iter(generations)
    failure: Exception | None = None  # a StopIteration at the end of the source

    def room() -> bool:
        return failure is None and sum(not made._answer.done for made in queue) < AHEAD

    def enough() -> bool:
        return queue[0]._answer.done or room()

    try:
        while True:
            while room():
                try:
                    queue.append(next(source))
                    queue[-1].begin(look_ahead=inf)
                except Exception as error:
                    failure = error
            if not queue:
                break
            queue[0].wait(enough)
            if queue[0]._answer.done:
                made = queue.popleft()
                made.finish()
                yield made
    finally:
        for made in queue:
            made.close()
    if failure is not None and not isinstance(failure, StopIteration):
        raise failure
