"""The engine thread: it alone steps the scheduler, and notifies the event loop once a step.

Handlers add requests (``add``) and are woken by their call's ``bell``. Work other than generation,
such as embeddings, runs as jobs, which alternate with steps.
"""

from __future__ import annotations

import asyncio
import threading
import time
import traceback
from collections import deque
from collections.abc import Callable
from concurrent.futures import Future
from contextlib import suppress
from typing import TYPE_CHECKING, Any, TypeVar

from treadle.engine.engine import CHUNK, OUTPUTS
from treadle.errors import FileError
from treadle.models.graphs import main_output
from treadle.server.requests.client_slots import ClientSlots

if TYPE_CHECKING:
    from collections.abc import Iterable

    from treadle.api.media import ModelMedia
    from treadle.api.model import Model
    from treadle.engine.engine import Engine
    from treadle.scheduler.request import Request
    from treadle.server.requests.request_stream import OutputStream, RequestStream
    from treadle.server.requests.stats import ServerStats

T = TypeVar("T")
_Job = tuple[Callable[[], Any], "Future[Any]"]


class EngineThread:
    """Steps ``model``'s scheduler from ``start`` to ``stop``.

    ``state`` is "loading" until the plans are compiled, then "ok"; "error" if the model can no
    longer be used, with the reason in ``why``.
    """

    def __init__(self, model: Model, tally: ServerStats) -> None:
        self.model = model
        self.tally = tally
        self.stepper = model.stepper
        self.scheduler = model.stepper.scheduler
        self.state = "loading"
        self.why = ""
        self.warmed: Future[None] = Future()
        # A waiter that gives up (Ctrl-C while kernels are compiled) must not cancel it.
        self.warmed.set_running_or_notify_cancel()
        self.texts: dict[Request, OutputStream] = {}  # running and queued
        self.slots = ClientSlots(model.engine.cache.n_sequences)
        # Dropped after they were done, perhaps before ``_tell``.
        self._dropped: deque[OutputStream] = deque()
        self._news: deque[RequestStream] = deque()  # calls with new output, not yet woken
        self._jobs: deque[_Job] = deque()
        self._bell = threading.Event()
        self._stopping = False
        media = model.media
        # Without its projector's file the model still reads text.
        self._projector = (
            () if media is None else {*map(str, media.projector.gguf.paths)} - {str(model.path)}
        )
        self._thread = threading.Thread(target=self._work, name="treadle-engine", daemon=True)

    def start(self) -> None:
        """Compile, then serve."""
        self._thread.start()

    def stop(self, timeout_s: float = 30.0) -> None:
        """End the thread after the current step. Idempotent."""
        self._stopping = True
        self._bell.set()
        if self._thread.is_alive():
            self._thread.join(timeout_s)

    def wake(self) -> None:
        """Wake the thread: something has changed. Any thread may call this."""
        self._bell.set()

    def add(self, texts: Iterable[OutputStream]) -> None:
        """Queue these outputs. One that is done before it begins (``max_tokens`` 0) wakes its call
        at once.
        """
        for text in texts:
            if text.answer.done:
                text.call.bell.ring()
            else:
                self.texts[text.request] = text
                self.slots.take(text, text.call.asked.slot)
                self.scheduler.add(text.request)
        self._bell.set()

    def drop(self, text: OutputStream) -> None:
        """Forget an output; cancel it if it is not done."""
        if self.texts.pop(text.request, None) is None:
            return
        self.slots.leave(text)
        if text.answer.done:
            self._dropped.append(text)
        else:
            self.scheduler.cancel(text.request)
            self.tally.n_cancelled += 1
        self._bell.set()

    def submit(self, job: Callable[[], T]) -> Future[T]:
        """Run ``job`` between two steps. Its future may be cancelled before it begins."""
        future: Future[T] = Future()
        self._jobs.append((job, future))
        self._bell.set()
        return future

    # -- the thread -----------------------------------------------------------------------------

    def _work(self) -> None:
        try:
            self._warm()
        except BaseException as error:
            self.state, self.why = "error", str(error)
            self.warmed.set_exception(error)
            return
        self.state = "ok"
        self.warmed.set_result(None)
        while not self._stopping:
            self._bell.clear()  # before checking for work: later arrivals set it again
            if self._jobs:
                self._ring()
                self._do(*self._jobs.popleft())
            if not self.scheduler.idle:
                self._step()
            elif not self._jobs:
                # Another thread of this program may have stepped them for its own request.
                self._tell([r for r, text in list(self.texts.items()) if text.answer.done])
                self._ring()
                self._bell.wait()
        self._ring()
        while self._jobs:
            self._jobs.popleft()[1].cancel()

    def _warm(self) -> None:
        """Compile the plans of every batch size, so that no first token waits for a compilation."""
        drafting = self.scheduler.drafting
        engines = [(self.model.engine, drafting.observer.output)]
        if drafting.drafter is not None:
            engines.append((drafting.drafter.engine, drafting.drafter.own_observer.output))
        for engine, output in engines:
            adapted = bool(engine.adapters)  # if deterministic, only these plans are run
            for lora in {adapted, adapted and engine.deterministic}:
                self._warm_engine(engine, output, lora)
        if self.model.media is not None and not self._stopping:
            self._warm_media(self.model.media)

    def _warm_media(self, media: ModelMedia) -> None:
        """Compile the plans of pictures, and those of prompts with rows of pictures."""
        media.warm()
        engine = self.model.engine
        output = self.scheduler.drafting.observer.output
        for n_tokens in (*engine.few, CHUNK, engine.max_tokens):
            if n_tokens <= engine.max_tokens and not self._stopping:
                engine.plan_for(n_tokens, 1, output, bool(engine.adapters), media=True)

    def _warm_engine(self, engine: Engine, output: str, lora: bool) -> None:
        sizes = engine.few
        if main_output(engine.config) != "logits":
            for n_tokens in (*sizes, min(engine.max_tokens, CHUNK)):  # longer inputs are rare
                engine.plan_for(n_tokens, 1, "embedding", lora)
            return
        for n_tokens in (*sizes, engine.max_tokens):
            for n_outputs in (*sizes, OUTPUTS):
                large = n_tokens == engine.max_tokens
                if (large or n_outputs <= n_tokens) and not self._stopping:
                    engine.plan_for(n_tokens, n_outputs, output, lora)

    def _do(self, job: Callable[[], Any], future: Future[Any]) -> None:
        if not future.set_running_or_notify_cancel():
            return
        try:
            future.set_result(job())
        except BaseException as error:
            future.set_exception(error)

    def _step(self) -> None:
        began = time.perf_counter()
        try:
            # The event loop writes to clients while a run is computed: between two runs its Python
            # code would delay the next run.
            fed, others = self.stepper.step(self._ring)
            if others:
                fed = list(self.texts)
        except BaseException as error:  # an internal error: all requests fail, none waits forever
            traceback.print_exc()
            fed = list(self.texts)
            for request in fed:
                request.answer.fail(error)
                self.scheduler.cancel(request)
        seconds = time.perf_counter() - began
        self._ring()  # if the step ran nothing
        self.tally.note_step(len(fed), self.scheduler.n_tokens, seconds)
        self._tell(fed)
        self._tell_progress()

    def _tell_progress(self) -> None:
        """Note the calls whose streams report prompt progress that has changed."""
        waiting = [text for text in list(self.texts.values()) if text.call.asked.progress]
        moved = {
            text.call: None for text in waiting if text.progress() not in (None, text.last_progress)
        }
        self._news += moved

    def queued_s(self) -> float:
        """Return the estimated seconds until the prompts of all requests are processed."""
        texts = list(self.texts.values())
        waiting = [text for text in texts if not text.answer.ids]
        left = sum(text.answer.timings.n_prompt - text.request.n_read for text in waiting)
        entries = {entry for text in waiting for entry in text.request.media if entry.rows is None}
        row_s = self.scheduler.media.row_s
        return left * self.scheduler.token_s + row_s * sum(entry.n_rows for entry in entries)

    def _tell(self, fed: list[Request]) -> None:
        """Note all calls with new output, to be woken together."""
        now = time.perf_counter()
        for request in fed:
            text = self.texts.get(request)
            if text is None:
                continue
            self.tally.note_news(text, now)
            error = request.answer.error
            if isinstance(error, FileError) and error.path not in self._projector:
                self.state, self.why = "error", str(error)
            if text.call.stream or request.answer.done:
                self._news.append(text.call)
        while self._dropped:
            self.tally.note_news(self._dropped.popleft(), now)

    def _ring(self) -> None:
        """Wake calls with new output: one hand-over for each event loop."""
        calls: dict[RequestStream, None] = {}
        while self._news:  # a thread that steps for its own request may be here too
            with suppress(IndexError):
                calls[self._news.popleft()] = None
        by_loop: dict[asyncio.AbstractEventLoop, list[RequestStream]] = {}
        for call in calls:
            by_loop.setdefault(call.loop, []).append(call)
        for loop, of_loop in by_loop.items():
            try:
                loop.call_soon_threadsafe(_ring, of_loop)
            except RuntimeError:  # its loop is closed
                for call in of_loop:
                    call.close()


def _ring(calls: list[RequestStream]) -> None:
    for call in calls:
        call.bell.ring()
