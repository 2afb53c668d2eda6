"""The engine thread: it steps the scheduler, and notifies the event loop once a step.

Handlers add requests (``add``) and are woken through their stream's ``wakeup``. Work other than
generation, such as embeddings, runs as jobs, which alternate with steps. Another thread of the
program may step the same scheduler for a request of its own (``scheduler/scheduler.py``).
"""

from __future__ import annotations

import asyncio
import threading
import time
import traceback
from collections import deque
from collections.abc import Callable
from concurrent.futures import Future
from contextlib import AbstractContextManager, nullcontext, suppress
from functools import partial
from itertools import islice
from typing import TYPE_CHECKING, Any, TypeVar

from treadle.api.engine_plans import EnginePlan, media_plans, probe_plans, text_plans
from treadle.errors import FileError
from treadle.jit.kernel import compile_processes_held, end_compile_processes
from treadle.server.requests.client_slots import ClientSlots

if TYPE_CHECKING:
    from collections.abc import Generator, Iterable

    from treadle.api.media import ModelMedia
    from treadle.api.model import Model
    from treadle.scheduler.request import Request
    from treadle.server.requests.request_stream import OutputStream, RequestStream
    from treadle.server.requests.stats import ServerStats

T = TypeVar("T")
_Job = tuple[Callable[[], Any], "Future[Any]"]


class EngineThread:
    """Steps ``model``'s scheduler from ``start`` to ``stop``.

    ``state`` is "loading" until the plans are compiled, then "ok"; "error" if the model can no
    longer be used, with the reason in ``why``. ``turns`` is entered for every step and job, so that
    engines of several processes can compute in turns. With ``warms_when_idle`` only the first plan
    (one sequence) is compiled before "ok", the others while there is no request.
    """

    def __init__(self, model: Model, stats: ServerStats) -> None:
        self.model = model
        self.stats = stats
        self.stepper = model.stepper
        self.scheduler = model.stepper.scheduler
        self.state = "loading"
        self.why = ""
        self.warmed: Future[None] = Future()
        # A waiter that gives up (Ctrl-C while kernels are compiled) must not cancel it.
        self.warmed.set_running_or_notify_cancel()
        self.outputs: dict[Request, OutputStream] = {}  # running and queued
        self.slots = ClientSlots(model.engine.cache.n_sequences)
        # Dropped after they were done, perhaps before ``_publish``.
        self._dropped: deque[OutputStream] = deque()
        self._news: deque[RequestStream] = deque()  # streams with new output, not yet woken
        self._jobs: deque[_Job] = deque()
        self._work_event = threading.Event()
        self._stopping = False
        self.turns: AbstractContextManager[None] = nullcontext()
        self.warms_when_idle = False
        self._compiles_ahead = False  # other processes compile
        media = model.media
        # Without its projector's file the model still reads text, unless both are one folder.
        own = {*map(str, (model.path, *model.gguf.paths))}
        projector = () if media is None else map(str, media.projector.gguf.paths)
        self._projector = {*projector} - own
        self._thread = threading.Thread(target=self._work, name="treadle-engine", daemon=True)

    def start(self) -> None:
        """Start the thread: it compiles plans, then serves. Processes that compile are forked here,
        in the caller's thread: once the engine thread runs, no fork is safe.
        """
        with suppress(Exception):  # the thread meets the same error, and reports it
            self._compiles_ahead = any([plan.compile_ahead() for plan in probe_plans(self.model)])
        self._thread.start()

    def stop(self, timeout_s: float = 30.0) -> None:
        """End the thread after the current step, and wait for it, ``timeout_s`` seconds at most.
        Idempotent.
        """
        self._stopping = True
        self._work_event.set()
        if self.state == "loading":
            end_compile_processes()
        if self._thread.is_alive():
            self._thread.join(timeout_s)

    def wake(self) -> None:
        """Wake the thread if it waits for work. Any thread may call this."""
        self._work_event.set()

    def add(self, outputs: Iterable[OutputStream]) -> None:
        """Queue the outputs in the scheduler. For one that is done already (``max_tokens`` 0) only
        wake its stream.
        """
        for output in outputs:
            if output.answer.done:
                output.stream.wakeup.notify()
            else:
                self.outputs[output.request] = output
                self.slots.take(output, output.stream.generation.slot)
                self.scheduler.add(output.request)
        self._work_event.set()

    def drop(self, output: OutputStream) -> None:
        """Remove an output and free its slot; cancel its request if it is not done. Idempotent."""
        if self.outputs.pop(output.request, None) is None:
            return
        self.slots.leave(output)
        if output.answer.done:
            self._dropped.append(output)
        else:
            self.scheduler.cancel(output.request)
            self.stats.n_cancelled += 1
        self._work_event.set()

    def submit(self, job: Callable[[], T]) -> Future[T]:
        """Run ``job`` in the engine thread, between two steps; return the future of its result. The
        future may be cancelled before the job begins: the job is then not run.
        """
        future: Future[T] = Future()
        self._jobs.append((job, future))
        self._work_event.set()
        return future

    # -- the thread -----------------------------------------------------------------------------

    def _work(self) -> None:
        """Compile the plans; then, until ``stop``, run jobs and scheduler's steps in turn, and
        sleep while there are none.
        """
        plans = self._warmings()
        try:
            with compile_processes_held():
                if self._compiles_ahead:
                    self._compile_ahead()
                for compile in islice(plans, 1) if self.warms_when_idle else plans:
                    compile()
        except BaseException as error:
            self.state, self.why = "error", str(error)
            self.warmed.set_exception(error)
            return
        self.state = "ok"
        self.warmed.set_result(None)
        while not self._stopping:
            self._work_event.clear()  # before checking for work: later arrivals set it again
            if self._jobs:
                self._wake_streams()
                with self.turns:
                    self._do(*self._jobs.popleft())
            if not self.scheduler.idle:
                with self.turns:
                    self._step()
            elif not self._jobs:
                # Another thread of this program may have stepped them for its own request.
                self._publish([r for r, output in list(self.outputs.items()) if output.answer.done])
                self._wake_streams()
                if not self._warm_next(plans):
                    self._work_event.wait()
        self._wake_streams()
        while self._jobs:
            self._jobs.popleft()[1].cancel()

    def _warm_next(self, plans: Generator[Callable[[], object], None, None]) -> bool:
        """Compile the next of ``plans``, while there is no request; return False if none is left.
        An error makes the model unusable.
        """
        try:
            if (compiles := next(plans, None)) is not None:
                compiles()
                return True
        except Exception as error:
            traceback.print_exc()
            self.state, self.why = "error", str(error)
            plans.close()
        return False

    def _compile_ahead(self) -> None:
        """Let other processes compile all plans together, the slowest kernel first. With
        ``warms_when_idle`` the first plan comes before all others.
        """
        for i, plan in enumerate(text_plans(self.model)):
            if not self._stopping:
                plan.compile_ahead(later=self.warms_when_idle and i > 0)

    def _warmings(self) -> Generator[Callable[[], object], None, None]:
        """Yield functions that compile the plans of every batch size, so that no first token waits
        for a compilation: those of one sequence first, then of larger batches, the tokenizer's
        tables, and the plans for pictures.
        """
        for plan in text_plans(self.model):
            yield partial(self._make, plan)
        yield self.model.tokenizer.prepare
        if self.model.media is not None:
            yield partial(self._warm_media, self.model.media)

    def _warm_media(self, media: ModelMedia) -> None:
        """Compile the plans by which the projector of ``media`` encodes pictures and sounds, and
        those of prompts with them.
        """
        media.warm()
        for plan in media_plans(self.model):
            self._make(plan)

    def _make(self, plan: EnginePlan) -> None:
        """Compile a plan and wait for it, unless the thread is to stop."""
        if not self._stopping:
            plan.make()

    def _do(self, job: Callable[[], Any], future: Future[Any]) -> None:
        """Run a job, unless its future was cancelled, and set the future's result or error."""
        if not future.set_running_or_notify_cancel():
            return
        try:
            future.set_result(job())
        except BaseException as error:
            future.set_exception(error)

    def _step(self) -> None:
        """Run one step of the scheduler, count its output, and list the streams to wake."""
        began = time.perf_counter()
        try:
            # The event loop writes to clients while a run is computed: between two runs its Python
            # code would delay the next run.
            fed, others = self.stepper.step(self._wake_streams)
            if others:
                fed = list(self.outputs)
        except BaseException as error:  # an internal error: all requests fail, none waits forever
            traceback.print_exc()
            fed = list(self.outputs)
            for request in fed:
                request.answer.fail(error)
                self.scheduler.cancel(request)
        seconds = time.perf_counter() - began
        self._wake_streams()  # if the step ran nothing
        self.stats.note_step(len(fed), self.scheduler.n_tokens, seconds)
        self._publish(fed)
        self._publish_progress()

    def _publish_progress(self) -> None:
        """Put streams whose prompt progress has changed, and that report it, into the list for
        ``_wake_streams``.
        """
        waiting = [
            output for output in list(self.outputs.values()) if output.stream.generation.progress
        ]
        moved = {
            output.stream: None
            for output in waiting
            if output.progress() not in (None, output.last_progress)
        }
        self._news += moved

    def queued_s(self) -> float:
        """Return the estimated seconds until the prompts of all queued and running requests are
        processed.
        """
        outputs = list(self.outputs.values())
        waiting = [output for output in outputs if not output.answer.ids]
        left = sum(output.answer.timings.n_prompt - output.request.n_read for output in waiting)
        entries = {
            entry for output in waiting for entry in output.request.media if entry.rows is None
        }
        row_s = self.scheduler.media.row_s
        return left * self.scheduler.token_s + row_s * sum(entry.n_rows for entry in entries)

    def _publish(self, fed: list[Request]) -> None:
        """Count the new output of the requests ``fed``, and put their streams into the list for
        ``_wake_streams``. A FileError of a request sets ``state`` to "error".
        """
        now = time.perf_counter()
        for request in fed:
            output = self.outputs.get(request)
            if output is None:
                continue
            self.stats.note_news(output, now)
            error = request.answer.error
            if isinstance(error, FileError) and error.path not in self._projector:
                self.state, self.why = "error", str(error)
            if output.stream.is_streamed or request.answer.done:
                self._news.append(output.stream)
        while self._dropped:
            self.stats.note_news(self._dropped.popleft(), now)

    def _wake_streams(self) -> None:
        """Wake the streams in the list, with one call into each event loop."""
        streams: dict[RequestStream, None] = {}
        while self._news:  # a thread that steps for its own request may be here too
            with suppress(IndexError):
                streams[self._news.popleft()] = None
        by_loop: dict[asyncio.AbstractEventLoop, list[RequestStream]] = {}
        for stream in streams:
            by_loop.setdefault(stream.loop, []).append(stream)
        for loop, of_loop in by_loop.items():
            try:
                loop.call_soon_threadsafe(_wake_streams, of_loop)
            except RuntimeError:  # its loop is closed
                for stream in of_loop:
                    stream.close()


def _wake_streams(streams: list[RequestStream]) -> None:
    """Wake the coroutines that read these streams; called in their event loop."""
    for stream in streams:
        stream.wakeup.notify()
