"""The scheduler's step: a batch is built (``batch_builder.py``) of admitted requests
(``queue.py``), run by the engine, and the sampled tokens are pushed to the requests' outputs.

There are no phases. A request has ids, and its sequence holds some of them. A step runs missing
ones: the last id of decoding requests, and as much of the prompts as the budget allows. The logits
of a request's last id give its next token.

Any thread may call ``add`` and ``cancel``. One thread at a time calls ``step``. The lists of
requests and the cache change under the engine's lock, so that others (``Session.feed``,
``Model.logits``) can use the engine between two steps.

Stepping is cooperative: there is no engine thread. Of the threads that wait for output, one runs
the scheduler's steps for all. A waiting thread steps if no other does. The others sleep until their
own output has something or it is their turn to step. So a single caller never switches threads
between two tokens, and concurrent callers share batches. Path of a token: ``Generation.wait`` ->
``step_until`` -> ``Scheduler.step`` -> ``Engine.sample`` -> ``Request.take`` ->
``RequestOutput.push``.
"""

from __future__ import annotations

import copy
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, nullcontext
from itertools import chain, islice
from typing import TYPE_CHECKING

from treadle.base.fork_safety import is_held, register_after_fork
from treadle.base.interrupts import interrupts_held
from treadle.engine.batch import BatchItem
from treadle.engine.engine import OUTPUTS, Engine
from treadle.engine.logits import LogitsRow
from treadle.errors import NoRoomError, TreadleError
from treadle.scheduler.batch_builder import Batch, BatchBuilder
from treadle.scheduler.queue import RequestQueue
from treadle.scheduler.request import Request
from treadle.scheduler.step_budget import TARGET_S, StepCostModel

if TYPE_CHECKING:
    from treadle.files.gguf import GGUF
    from treadle.scheduler.media_queue import MediaQueue
    from treadle.spec_decode.proposer import Drafting


Predicate = Callable[[], bool]
Interruptible = Callable[[], AbstractContextManager[object]]


class Scheduler:
    """Scheduler of one engine: ``add`` queues a request, each ``step`` runs one batch of the
    requests that have room. ``clock`` returns seconds; ``target_s``: the longest that a step should
    take while a caller waits for a next token.
    """

    def __init__(
        self,
        engine: Engine,
        *,
        clock: Callable[[], float] | None = None,
        target_s: float = TARGET_S,
    ) -> None:
        self.engine = engine
        self._clock = clock or time.perf_counter
        self.queue = RequestQueue(engine, self._clock)
        self._cost_model = StepCostModel(target_s, engine.few)
        self._builder = BatchBuilder(self.queue, self._cost_model)
        self.n_tokens = 0  # of the last step

    @property
    def media(self) -> MediaQueue:
        """The pictures and sounds that requests wait for."""
        return self._builder.media

    @property
    def drafting(self) -> Drafting:
        """Chooses the drafts of each step."""
        return self._builder.drafting

    def open_drafter(self, draft: GGUF | None, speculate: bool | None) -> bool:
        """Open a drafter, as ``Drafting.open`` does for these arguments; return what that returns.
        Without a file, for a model that has no layer to draft with, there is nothing to open.
        """
        engine = self.engine
        own = engine.config.arch.nextn and any(".nextn." in name for name in engine.gguf.tensors)
        if draft is None and not speculate and not own:
            return False
        return self.drafting.open(draft, engine, speculate)

    def close_drafter(self) -> None:
        """Close the drafter, if one is open. The caller holds the engine's lock."""
        if self._builder.has_drafting:
            self.drafting.close()

    def add(self, request: Request) -> None:
        """Queue a request for the next step that has room. Any thread may call this."""
        self.queue.inbox.append(request)

    def cancel(self, request: Request) -> None:
        """Cancel a request: no step after the current one computes for it. Takes no lock, so any
        thread may call this, and the garbage collector at any point.
        """
        request.cancelled = True
        self.queue.inbox.append(request)

    def process_inbox(self) -> None:
        """Process new, ended and cancelled requests, unless a step is running and will do so."""
        with interrupts_held():
            if self.engine.lock.acquire(blocking=False):
                try:
                    self.queue.drain()
                finally:
                    self.engine.lock.release()

    def make_room(self, n: int) -> None:
        """Preempt requests until a new sequence has room for ``n`` tokens, or no more can be
        preempted; they recompute their tokens later.

        Raises ContextFullError if ``n`` tokens exceed the context. The caller holds the engine's
        lock until the room is used.
        """
        cache = self.engine.cache
        cache.check_context(n)
        with interrupts_held():
            self.queue.drain()
            while True:
                try:
                    return cache.check_room(cache.sequence(), n)
                except NoRoomError:
                    if not self.queue.preempt_one(lambda other: True):
                        return None

    @property
    def idle(self) -> bool:
        """Whether a step has nothing to do: every request is paused, and none is new."""
        queue = self.queue
        return not queue.inbox and all(r.paused for r in chain(queue.running, queue.waiting))

    @property
    def token_s(self) -> float:
        """Seconds per prompt token of recent steps; 0 if none was measured."""
        return self._cost_model.token_s

    # -- a step ---------------------------------------------------------------------------------

    def step(
        self,
        own: Request | None = None,
        interruptible: Interruptible = nullcontext,
        meanwhile: Callable[[], object] | None = None,
    ) -> list[Request]:
        """Run one batch. Return the requests that got a token, ended or failed. ``meanwhile``,
        unless None, is called just before the device starts a run; see ``Engine.sample``.

        A caller that waits for its ``own`` request (None: without one) gives ``interruptible``, a
        context in which it may be interrupted: while the batch runs, and while the own token is
        sampled, last of all. All other requests are consistent then.
        """
        began = self._clock()
        engine = self.engine
        while not engine.lock.acquire(timeout=0.1):  # feeding a session may hold it for seconds
            with interruptible():
                pass
        try:
            self.queue.drain()
            batch = self._builder.build()
            ready = self._clock()
            compiled = engine.kernels.seconds
            try:
                with interruptible():
                    rows = self._run([part for _, part in batch], meanwhile)
            except BaseException as error:
                self._drop_rejected(batch)
                if not isinstance(error, TreadleError):
                    raise
                # for example, the model's file shrank: no request can continue
                for request, _ in batch:
                    self.queue.fail(request, copy.copy(error))
                batch = []
                rows = iter(())
            compiled = engine.kernels.seconds - compiled
            run = self._clock() - ready - compiled
            decoding, n_read = self._note(batch, ready - began, run, compiled)
            for request, failure in self._builder.encode():
                self.queue.fail(request, copy.copy(failure))
            drafted = any(part.n_outputs > 1 for _, part in batch)
            if drafted:  # other threads must not see drafted tokens in a sequence
                engine.lock.acquire()
        finally:
            engine.lock.release()
        chosen = [request for request, part in batch if part.n_outputs]
        began = self._clock()
        for request in chosen:
            request.is_sampling = True
        try:
            self._choose(batch, rows, own, interruptible)
        finally:
            took = self._clock() - began
            if drafted:
                self._drop_rejected(batch)
                engine.lock.release()
            if not compiled and not n_read:
                self._note_drafts(batch, run + took)
            for request in chosen:
                request.is_sampling = False
            for request in decoding:
                request.answer.timings.decode_s += took
            ended = [request for request in chosen if request.answer.done]
            if ended:
                self.queue.inbox.extend(ended)
                self.process_inbox()
        return self.queue.take_failed() + chosen

    def _run(
        self, parts: list[BatchItem], meanwhile: Callable[[], object] | None
    ) -> Iterator[LogitsRow]:
        """Run all items in ``parts``, in several runs if one run cannot take them; return their
        logits rows in order. ``meanwhile``: as of ``step``.
        """
        observer = self._builder.observer
        if len(parts) == 1:
            return iter(self.engine.sample(parts, observer, meanwhile))
        most = n_tokens = n_outputs = self.engine.max_tokens
        runs: list[list[BatchItem]] = []
        for part in parts:
            n_tokens = n_tokens + len(part.ids)
            n_outputs = n_outputs + part.n_outputs
            if n_tokens > most or n_outputs > OUTPUTS:
                runs.append([])
                n_tokens = len(part.ids)
                n_outputs = part.n_outputs
            runs[-1].append(part)
        return chain.from_iterable([self.engine.sample(run, observer, meanwhile) for run in runs])

    def _note(
        self, batch: Batch, waited: float, run: float, compiled: float
    ) -> tuple[list[Request], int]:
        """Record the seconds of the batch's ``run``, and of having ``waited`` and ``compiled``
        before it. Return the batch's decoding requests and the number of prompt tokens processed.
        """
        decoding = []
        n_read = 0
        context = 0
        self.n_tokens = sum(len(part.ids) for _, part in batch)
        for request, (seq, ids, n_outputs, *_) in batch:
            request.last_n_changes = seq.n_changes
            timings = request.answer.timings
            timings.compile_s += compiled
            if request.answer.ids:
                timings.decode_s += waited + run
                decoding.append(request)
            else:
                timings.prefill_s += waited + run
            if len(ids) > max(n_outputs, 1) and not request.is_decoding(len(ids) - n_outputs + 1):
                n_read += len(ids)
            context += len(ids) * len(seq.ids)
        if n_read:
            for request in self.queue.waiting:
                request.n_known = -1  # the cache may have more of it now
            if not compiled and self._builder.has_drafting:
                self.drafting.controller.read(run)
        if batch and not compiled:
            self._cost_model.note(n_read, self.n_tokens - n_read, context, run)
        return decoding, n_read

    def _drop_rejected(self, batch: Batch) -> None:
        """Truncate the sequences of the batch's requests with drafts to their accepted tokens. A
        layer state that includes rejected tokens is not kept: the run's tokens are recomputed.
        """
        for request, (seq, _, n_outputs, *_) in batch:
            if n_outputs > 1:
                seq.n_drafted = 0
                same = request.last_n_changes == seq.n_changes
                n = max(len(request.ids) - 1, len(seq) - n_outputs + 1)
                if n < len(seq):
                    self.engine.cache.truncate(seq, seq.n_state if seq.slots else n)
                elif seq.slots and seq.n_state < n:
                    self.engine.cache.commit(seq)
                if same:
                    request.last_n_changes = seq.n_changes

    def _note_drafts(self, batch: Batch, seconds: float) -> None:
        """Report the ``seconds`` of the batch and the accepted tokens of its drafts to the
        controller of drafting; do nothing for a batch with prompts or without drafting requests.
        """
        writing = any(request.speculates for request, _ in batch)
        if writing and all(part.n_outputs for _, part in batch):
            n_drafted = sum(len(part.ids) - 1 for _, part in batch)
            n_accepted = sum(request.n_accepted for request, part in batch if part.n_outputs > 1)
            cost = self.drafting.cost
            self.drafting.controller.note(len(batch), n_drafted, n_accepted, seconds, cost)

    def _choose(
        self,
        batch: Batch,
        rows: Iterator[LogitsRow],
        own: Request | None,
        interruptible: Interruptible,
    ) -> None:
        """Sample the next tokens of each request in ``batch`` from its ``rows`` of logits; those of
        ``own`` last, within ``interruptible()``. A sampler's error fails only its own request.
        """
        mine = None
        for request, part in batch:
            if not part.n_outputs:
                continue
            its = list(islice(rows, part.n_outputs))
            draft = part.ids[len(part.ids) - part.n_outputs + 1 :]
            if request is own:
                mine = its, draft
            elif not request.cancelled:
                try:
                    request.take(its, draft)
                except BaseException as error:
                    request.answer.fail(error)
        if own is not None and mine is not None:
            try:
                with interruptible():
                    own.take(*mine)
            except Exception as error:
                own.answer.fail(error)


class CooperativeStepper:
    """Runs the scheduler's steps in the threads that wait for output.

    Ctrl-C in the stepping thread undoes the current run and is raised in that thread only. All
    requests except its own stay consistent, and another thread continues with them.
    """

    def __init__(self, scheduler: Scheduler) -> None:
        self.scheduler = scheduler
        self._step_lock = threading.Lock()
        self._stepping_thread = 0  # id of the stepping thread
        self._sleepers: dict[threading.Lock, Predicate] = {}  # each waits for its lock
        register_after_fork(self)

    def after_fork(self) -> None:
        """Reset the locks in a forked child, where other threads' requests may be in the middle of
        a step.
        """
        if self._stepping_thread != threading.get_ident() and (
            is_held(self._step_lock) or self._sleepers
        ):
            self._step_lock = threading.Lock()
            self._stepping_thread = 0
            self._sleepers.clear()
            self.scheduler.engine.lock.mark_lost()

    def step_until(self, is_done: Predicate, own: Request) -> None:
        """Return when steps have made ``is_done()`` true, or when the request ``own`` is cancelled;
        they run in this thread, or in another one while this one sleeps.

        Errors of a step or a signal handler propagate. Raises TreadleError if a sampler waits for a
        token of the step that called it.
        """

        def over() -> bool:
            return own.cancelled or is_done()

        try:
            while not over():
                if self._stepping_thread == threading.get_ident():  # a sampler called the model
                    if own.is_sampling:  # its token comes only after this sampler has returned
                        raise TreadleError(
                            "deadlock: a custom sampler called generate() on the model that is "
                            "waiting for that sampler"
                        )
                    with interrupts_held() as held:
                        self.scheduler.step(own, held.allow)
                elif self._step(over, own):
                    break
                else:
                    self._sleep(over)
        except BaseException:
            self._wake(successor=True)
            raise
        if own.cancelled:  # it may have been woken to step
            self._wake(successor=True)

    def step(self, meanwhile: Callable[[], object] | None = None) -> tuple[list[Request], bool]:
        """Run one step from a thread without a request of its own, such as a server's. Return the
        requests that got output, and whether another thread was stepping at the call.

        ``meanwhile``, unless None, is called while another thread steps, and just before the device
        starts a run; see ``Engine.sample``.
        """
        others = not self._step_lock.acquire(blocking=False)
        if others:
            if meanwhile is not None:
                meanwhile()
            self._step_lock.acquire()
        try:
            return self.scheduler.step(meanwhile=meanwhile), others
        finally:
            self._step_lock.release()
            if self._sleepers:
                self._wake(successor=True)

    def _step(self, over: Predicate, own: Request) -> bool:
        """Run steps for the request ``own`` until ``over()`` is true, unless another thread is
        stepping. Return whether this thread stepped.
        """
        with interrupts_held() as held:
            if not self._step_lock.acquire(blocking=False):
                return False
            self._stepping_thread = threading.get_ident()
            try:
                while not over():
                    self.scheduler.step(own, held.allow)
                    if self._sleepers:
                        self._wake()
                return True
            finally:
                self._stepping_thread = 0
                self._step_lock.release()
                self._wake(successor=True)

    def _sleep(self, over: Predicate) -> None:
        """Sleep while another thread steps, until it wakes this one: because ``over()`` is true, or
        because it is this thread's turn to step.
        """
        bell = threading.Lock()
        bell.acquire()
        self._sleepers[bell] = over
        try:
            # Releasing the turn is followed by waking sleepers, so none is missed.
            if self._step_lock.locked() and not over():
                bell.acquire()
        finally:
            self._sleepers.pop(bell, None)

    def _wake(self, *, successor: bool = False) -> None:
        """Wake the threads whose wait is over and, if ``successor``, one other thread to step."""
        for bell, over in list(self._sleepers.items()):
            done = over()
            if done or successor:
                successor = successor and done
                if self._sleepers.pop(bell, None) is not None:
                    bell.release()
