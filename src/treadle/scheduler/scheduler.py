"""One step after another: a batch is made (``batch_builder.py``) of the requests that were let in
(``queue.py``), goes to the engine, and the ids that come of it go to their answers.

There are no phases. A request has ids, and its sequence holds some of them; a step runs what is
missing: the last id of those that decode, and as much of the prompts as the step has time for. The
logits behind a request's last id give it one more.

``add`` and ``cancel`` may be called by any thread. ``step`` is called by one at a time, and only
that one calls the engine. The lists of requests and the cache change under the engine's lock.
"""

from __future__ import annotations

import copy
import time
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, nullcontext
from itertools import chain, islice

from treadle.base.interrupts import interrupts_held
from treadle.engine.batch import BatchItem
from treadle.engine.engine import OUTPUTS, Engine
from treadle.engine.logits import LogitsRow
from treadle.errors import NoRoomError, TreadleError
from treadle.scheduler.batch_builder import Batch, BatchBuilder
from treadle.scheduler.queue import RequestQueue
from treadle.scheduler.request import Request
from treadle.scheduler.step_budget import TARGET_S, StepCostModel

Allow = Callable[[], AbstractContextManager[object]]


class Scheduler:
    """The queue before one engine. ``clock`` gives seconds; ``target_s``: how long a step may take
    where somebody waits for a next token.
    """

    def __init__(
        self,
        engine: Engine,
        *,
        clock: Callable[[], float] | None = None,
        target_s: float = TARGET_S,
    ) -> None:
        self.engine, self._clock = engine, clock or time.perf_counter
        self.admission = RequestQueue(engine, self._clock)
        self._pace = StepCostModel(target_s, engine.few)
        self._composer = BatchBuilder(self.admission, self._pace)
        self.drafting = self._composer.drafting
        self.n_tokens = 0  # of the last step

    def add(self, request: Request) -> None:
        """From the next step on it runs, as soon as there is room. Any thread may call this."""
        self.admission.inbox.append(request)

    def cancel(self, request: Request) -> None:
        """End it: no step after the one in hand computes for it. Any thread may call this, and the
        garbage collector in the middle of anything: so nothing is locked.
        """
        request.cancelled = True
        self.admission.inbox.append(request)

    def settle(self) -> None:
        """Take in what came and let go what ended, unless a step is about to."""
        with interrupts_held():
            if self.engine.lock.acquire(blocking=False):
                try:
                    self.admission.drain()
                finally:
                    self.engine.lock.release()

    def make_room(self, n: int) -> None:
        """Take pages from requests, which will read their texts again, until a new sequence has
        room for ``n`` tokens or there is nothing more to take. Raises ContextFullError where
        ``n`` is too many. The caller holds the engine's lock until the room is used.
        """
        cache = self.engine.cache
        cache.check_context(n)
        with interrupts_held():
            self.admission.drain()
            while True:
                try:
                    return cache.check_room(cache.sequence(), n)
                except NoRoomError:
                    if not self.admission.take_pages(lambda other: True):
                        return None

    @property
    def idle(self) -> bool:
        """Whether a step has nothing to do."""
        queue = self.admission
        return not queue.inbox and all(r.paused for r in chain(queue.running, queue.waiting))

    @property
    def token_s(self) -> float:
        """Seconds that steps have taken lately for each token of a prompt; 0: nothing is known."""
        return self._pace.token_s

    # -- a step ---------------------------------------------------------------------------------

    def step(self, own: Request | None = None, allow: Allow = nullcontext) -> list[Request]:
        """Run one batch. The requests that have an id more, or an end, because of it.

        A caller that waits for a request of its ``own`` and may be interrupted gives ``allow``, in
        which that may happen: while the batch runs, and while the own id is chosen, which is last.
        All others are whole then.
        """
        began, engine = self._clock(), self.engine
        while not engine.lock.acquire(timeout=0.1):  # somebody may feed a session for seconds
            with allow():
                pass
        try:
            self.admission.drain()
            batch = self._composer.compose()
            ready, compiled = self._clock(), engine.kernels.seconds
            try:
                with allow():
                    rows = self._run([part for _, part in batch])
            except BaseException as error:
                self._take_back(batch)
                if not isinstance(error, TreadleError):
                    raise
                # The model's file shrank, say: nobody can go on.
                for request, _ in batch:
                    self.admission.fail(request, copy.copy(error))
                batch, rows = [], iter(())
            compiled = engine.kernels.seconds - compiled
            run = self._clock() - ready - compiled
            decoding, n_read = self._note(batch, ready - began, run, compiled)
            drafted = any(part.n_outputs > 1 for _, part in batch)
            if drafted:  # what a sequence holds of them is nobody's to see
                engine.lock.acquire()
        finally:
            engine.lock.release()
        chosen = [request for request, part in batch if part.n_outputs]
        began = self._clock()
        for request in chosen:
            request.looked_at = True
        try:
            self._choose(batch, rows, own, allow)
        finally:
            took = self._clock() - began
            if drafted:
                self._take_back(batch)
                engine.lock.release()
            if not compiled and not n_read:
                self._weigh(batch, run + took)
            for request in chosen:
                request.looked_at = False
            for request in decoding:
                request.answer.timings.decode_s += took
            ended = [request for request in chosen if request.answer.done]
            if ended:
                self.admission.inbox.extend(ended)
                self.settle()
        return self.admission.told() + chosen

    def _run(self, parts: list[BatchItem]) -> Iterator[LogitsRow]:
        """The rows of all parts, in order; in several runs where one cannot take them."""
        if len(parts) == 1:
            return iter(self.engine.sample(parts))
        most = n_tokens = n_outputs = self.engine.max_tokens
        runs: list[list[BatchItem]] = []
        for part in parts:
            n_tokens, n_outputs = n_tokens + len(part.ids), n_outputs + part.n_outputs
            if n_tokens > most or n_outputs > OUTPUTS:
                runs.append([])
                n_tokens, n_outputs = len(part.ids), part.n_outputs
            runs[-1].append(part)
        return chain.from_iterable([self.engine.sample(run) for run in runs])

    def _note(
        self, batch: Batch, waited: float, run: float, compiled: float
    ) -> tuple[list[Request], int]:
        """Count the seconds of a run; who decodes, of the batch, and how many tokens the others
        have read.
        """
        decoding, n_read, context = [], 0, 0
        self.n_tokens = sum(len(part.ids) for _, part in batch)
        for request, (seq, ids, n_outputs, *_) in batch:
            request.seen = seq.n_changes
            timings = request.answer.timings
            timings.compile_s += compiled
            if request.answer.ids:
                timings.decode_s += waited + run
                decoding.append(request)
            else:
                timings.prefill_s += waited + run
            if len(ids) > max(n_outputs, 1) and not request.goes_on(len(ids) - n_outputs + 1):
                n_read += len(ids)
            context += len(ids) * len(seq.ids)
        if n_read:
            for request in self.admission.waiting:
                request.n_known = -1  # the cache may know more of it now
            if not compiled:
                self.drafting.gate.read(run)
        if batch and not compiled:
            self._pace.note(n_read, self.n_tokens - n_read, context, run)
        return decoding, n_read

    def _take_back(self, batch: Batch) -> None:
        """Let sequences hold what their texts have, without drafts that were wrong. A state that
        has seen one is not taken: then the run's tokens are read again.
        """
        for request, (seq, _, n_outputs, *_) in batch:
            if n_outputs > 1:
                seq.n_drafted, same = 0, request.seen == seq.n_changes
                n = max(len(request.ids) - 1, len(seq) - n_outputs + 1)
                if n < len(seq):
                    self.engine.cache.truncate(seq, seq.n_state if seq.slots else n)
                elif seq.slots and seq.n_state < n:
                    self.engine.cache.commit(seq)
                if same:
                    request.seen = seq.n_changes

    def _weigh(self, batch: Batch, seconds: float) -> None:
        """Tell what drafts have cost and brought, of a step that read no prompt."""
        writing = any(request.lookup is not None for request, _ in batch)
        if writing and all(part.n_outputs for _, part in batch):
            n_drafted = sum(len(part.ids) - 1 for _, part in batch)
            n_accepted = sum(request.n_accepted for request, part in batch if part.n_outputs > 1)
            cost = self.drafting.cost
            self.drafting.gate.note(len(batch), n_drafted, n_accepted, seconds, cost)

    def _choose(
        self, batch: Batch, rows: Iterator[LogitsRow], own: Request | None, allow: Allow
    ) -> None:
        """The next ids of each. An error of a sampler is its own request's."""
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
                with allow():
                    own.take(*mine)
            except Exception as error:
                own.answer.fail(error)
