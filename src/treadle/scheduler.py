"""Which tokens run next: requests come in, batches go to the engine, ids go to their answers.

There are no phases. A request has ids, and its sequence holds some of them; a step runs what is
missing: the last id of those that decode, and as much of the prompts as the step has time for. The
logits behind a request's last id give it one more.

``add`` and ``cancel`` may be called by any thread. ``step`` is called by one at a time, and only
that one calls the engine. The lists of requests and the cache change under the engine's lock.
"""

from __future__ import annotations

import copy
import time
from bisect import insort
from collections import deque
from collections.abc import Callable, Hashable, Iterable, Iterator
from contextlib import AbstractContextManager, nullcontext
from itertools import chain

from treadle.batch import Part
from treadle.budget import LEAST, TARGET_S, Pace, Shares
from treadle.engine import OUTPUTS, Engine
from treadle.errors import NoRoomError, TreadleError
from treadle.kernels.kv import PAGE
from treadle.request import Request
from treadle.rows import Row
from treadle.runtime.threads import interrupts_held

AGE_S = 2.0  # waiting so long counts as much as one step of priority
CONSIDERED = 32  # waiting requests whose beginnings are looked up in the cache
Allow = Callable[[], AbstractContextManager[object]]
Batch = list[tuple[Request, Part]]


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
        self._inbox: deque[Request] = deque()  # that came, and that are to go
        self._waiting: list[Request] = []
        self._running: list[Request] = []  # by rank; each has a sequence
        self._looked_at: list[Request] = []  # whose logits are there and whose next ids are not
        self._failed: list[Request] = []  # that nobody has been told of
        self._pace, self._shares = Pace(target_s), Shares()
        self._n_added = 0

    def add(self, request: Request) -> None:
        """From the next step on it runs, as soon as there is room. Any thread may call this."""
        self._inbox.append(request)

    def cancel(self, request: Request) -> None:
        """End it: no step after the one in hand computes for it. Any thread may call this, and the
        garbage collector in the middle of anything: so nothing is locked.
        """
        request.cancelled = True
        self._inbox.append(request)

    def settle(self) -> None:
        """Take in what came and let go what ended, unless a step is about to."""
        with interrupts_held():
            if self.engine.lock.acquire(blocking=False):
                try:
                    self._drain()
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
            self._drain()
            while True:
                try:
                    return cache.check_room(cache.sequence(), n)
                except NoRoomError:
                    if not self._take_pages(lambda other: True):
                        return None

    @property
    def idle(self) -> bool:
        """Whether a step has nothing to do."""
        return not self._inbox and all(r.paused for r in (*self._running, *self._waiting))

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
            self._drain()
            batch = self._compose()
            ready, compiled = self._clock(), engine.kernels.seconds
            try:
                with allow():
                    rows = self._run([part for _, part in batch])
            except TreadleError as error:  # the model's file shrank, say: nobody can go on
                for request, _ in batch:
                    self._fail(request, copy.copy(error))
                batch, rows = [], iter(())
            compiled = engine.kernels.seconds - compiled
            run = self._clock() - ready - compiled
            decoding = self._note(batch, ready - began, run, compiled)
        finally:
            engine.lock.release()
        chosen = [request for request, part in batch if part.n_outputs]
        began, others = self._clock(), self._looked_at  # of a step that this one is nested in
        self._looked_at = others + chosen
        try:
            self._choose(zip(chosen, rows, strict=True), own, allow)
        finally:
            self._looked_at, took = others, self._clock() - began
            for request in decoding:
                request.answer.timings.decode_s += took
            ended = [request for request in chosen if request.answer.done]
            if ended:
                self._inbox.extend(ended)
                self.settle()
        failed, self._failed = self._failed, []
        return failed + chosen

    def _run(self, parts: list[Part]) -> Iterator[Row]:
        """The rows of all parts, in order; in several runs where one cannot take them."""
        if len(parts) == 1:
            return iter(self.engine.sample(parts))
        most = n_tokens = n_outputs = self.engine.max_tokens
        runs: list[list[Part]] = []
        for part in parts:
            n_tokens, n_outputs = n_tokens + len(part.ids), n_outputs + part.n_outputs
            if n_tokens > most or n_outputs > OUTPUTS:
                runs.append([])
                n_tokens, n_outputs = len(part.ids), part.n_outputs
            runs[-1].append(part)
        return chain.from_iterable([self.engine.sample(run) for run in runs])

    def _note(self, batch: Batch, waited: float, run: float, compiled: float) -> list[Request]:
        """Count the seconds of a run; who decodes, of the batch."""
        decoding, n_read, context = [], 0, 0
        for request, (seq, ids, _, _) in batch:
            request.seen = seq.n_changes
            timings = request.answer.timings
            timings.compile_s += compiled
            if request.answer.ids:
                timings.decode_s += waited + run
                decoding.append(request)
            else:
                timings.prefill_s += waited + run
            if len(ids) > 1:
                n_read += len(ids)
            context += len(ids) * len(seq.ids)
        if n_read:
            for request in self._waiting:
                request.n_known = -1  # the cache may know more of it now
            if not compiled:
                n_decode = sum(len(part.ids) == 1 for _, part in batch)
                self._pace.note(n_read, n_decode, context, run)
        return decoding

    def _choose(
        self, rows: Iterable[tuple[Request, Row]], own: Request | None, allow: Allow
    ) -> None:
        """The next id of each. An error of a sampler is its own request's."""
        mine = None
        for request, row in rows:
            if request is own:
                mine = row
            elif not request.cancelled:
                try:
                    request.choose(row)
                except BaseException as error:
                    request.answer.fail(error)
        if own is not None and mine is not None:
            try:
                with allow():
                    own.choose(mine)
            except Exception as error:
                own.answer.fail(error)

    # -- what a batch is made of ----------------------------------------------------------------

    def _compose(self) -> Batch:
        """The parts of the next batch, whose pages are reserved."""
        if self._waiting:
            self._admit()
        decoding: list[Request] = []
        reading: list[tuple[Hashable, Request, int]] = []
        for request in self._wanting():
            if request.seq is None:  # it gave way to one before it
                continue
            left = self._resume(request)
            # Most ids go where others of the same page are.
            if (left > 1 or not len(request.seq.ids) % PAGE) and not self._secure(request, left):
                continue
            if left == 1:
                decoding.append(request)
            else:
                reading.append((request.client, request, left))
        most = budget = self.engine.max_tokens
        if decoding and reading:
            context, before = sum(len(r.ids) for r in decoding), len(reading[0][1].seq or ())
            most = max(most - len(decoding), LEAST)
            budget = self._pace.tokens(len(decoding), context, before, most)
        batch = [(r, Part(r.seq, r.ids[-1:], 1, r.looks())) for r in decoding if r.seq is not None]
        for request, n in self._shares.split(reading, budget) if reading else ():
            if request.seq is not None:
                start, end = len(request.seq), len(request.seq) + n
                last = end == len(request.ids)
                ids, looks = request.ids[start:end], request.looks() if last else ()
                batch.append((request, Part(request.seq, ids, int(last), looks)))
        if not batch:
            self._refuse()
        return batch

    def _wanting(self) -> list[Request]:
        """The running requests that may have an id more, by rank; of those on one sequence that
        whose text is taken fastest.
        """
        found: dict[int, Request] = {}
        for request in list(self._running):
            if request.paused or request in self._looked_at:
                continue
            if self._closed(request):
                continue
            other = found.setdefault(id(request.seq), request)
            if len(request.answer.pieces) < len(other.answer.pieces):
                found[id(request.seq)] = request
        return list(found.values())

    def _closed(self, request: Request) -> bool:
        if request.session is None or not request.session.closed:
            return False
        self._fail(request, TreadleError("the session is closed"))
        return True

    def _resume(self, request: Request) -> int:
        """Make the request's sequence hold a beginning of its ids; how many are left, at least 1.

        It may not be as the last step left it: somebody else used the session, or a signal came
        when the batch had run and its logits were not looked at.
        """
        seq, ids = request.seq, request.ids
        assert seq is not None
        if seq.n_changes != request.seen or len(seq.ids) >= len(ids):
            kept = self.engine.cache.match(seq, ids)
            if request.seen < 0 and not request.answer.ids:
                request.answer.timings.n_cached = kept
            request.seen = seq.n_changes
        return len(ids) - len(seq.ids)

    # -- who runs -------------------------------------------------------------------------------

    def _drain(self) -> None:
        while self._inbox:
            request = self._inbox.popleft()
            if request.cancelled or request.answer.done:
                self._leave(request)
                continue
            self._n_added += 1
            request.number, request.arrived = self._n_added, self._clock()
            try:
                self.engine.check_ids(request.ids)
                self.engine.cache.check_context(len(request.ids))
                self._waiting.append(request)
            except TreadleError as error:
                self._fail(request, error)

    def _fail(self, request: Request, error: TreadleError) -> None:
        request.answer.fail(error)
        self._failed.append(request)
        self._leave(request)

    def _leave(self, request: Request) -> None:
        """Forget a request. What its sequence holds stays, for a text that begins alike."""
        for queue in (self._waiting, self._running):
            if request in queue:
                queue.remove(request)
        seq, request.seq = request.seq, None
        if seq is None:
            return
        cache, answer = self.engine.cache, request.answer
        if request.session is None:
            return cache.retire(seq)
        cache.reserve(seq, 0)
        if request.cancelled and answer.pieces and seq.n_changes == request.seen:
            # Of what was written ahead nobody knows.
            n = len(request.ids) - len(answer.ids) + answer.n_taken - 1
            if n < len(seq) and cache.visible(seq, n) == n:
                cache.truncate(seq, n)

    def _admit(self) -> None:
        """Let waiting requests run: by priority, which grows with age; then those of whose text
        the cache has most; then as they came. The first that has no room stops those behind it.
        """
        now = self._clock()
        for at, request in enumerate(self._waiting):
            request.level = request.priority - int((now - request.arrived) / AGE_S)
            if at < CONSIDERED and len(self._waiting) > 1:
                request.look_up(self.engine.cache)
        self._waiting.sort(key=lambda request: (request.level, -request.n_known, request.number))
        for request in list(self._waiting):
            if request.paused or self._closed(request) or self._follows(request):
                continue
            if not self._start(request):
                break

    def _follows(self, request: Request) -> bool:
        """Whether another one is about to read what this one would read next: so that N equal
        prompts are read once.
        """
        if not self._running:
            return False
        ids, n = request.ids, request.look_up(self.engine.cache)
        end = n + PAGE
        return end < len(ids) and any(
            len(other.seq or ()) < end <= len(other.ids)
            and not other.paused
            and other not in self._looked_at
            and other.ids[n:end] == ids[n:end]
            and other.ids[:n] == ids[:n]
            for other in self._running
        )

    def _start(self, request: Request) -> bool:
        """Give it a sequence with what is known of it, and reserve pages for the rest."""
        session = request.session
        request.seq = seq = self.engine.cache.revive() if session is None else session.seq
        if not any(other.seq is seq for other in self._running):
            # Those who write beside others soon need a page more.
            spare = min(PAGE, self.engine.n_ctx - len(request.ids)) if self._running else 0
            if not self._secure(request, self._resume(request) + spare, by_rank=False):
                request.seq = None
                if session is None:
                    seq.close()
                return False
        self._waiting.remove(request)
        insort(self._running, request, key=lambda other: other.rank)
        return True

    def _secure(self, request: Request, n: int, *, by_rank: bool = True) -> bool:
        """Reserve pages for ``n`` tokens more, if need be at the price of those behind it in rank,
        and unless ``by_rank`` in priority too.
        """
        assert request.seq is not None

        def behind(other: Request) -> bool:
            less = by_rank or other.priority > request.priority
            return less and other.rank > request.rank

        while True:
            try:
                self.engine.cache.reserve(request.seq, n)
                request.short = None
                return True
            except NoRoomError as error:
                request.short = error
                if not self._take_pages(lambda other: other is not request and behind(other)):
                    return False

    def _take_pages(self, may: Callable[[Request], bool]) -> bool:
        """Take those of one request, if there is one. It waits again; what the cache has forgotten
        of it by then is read again. Who is paused goes first, then the last of those that ``may``.
        """
        own = [r for r in self._running if r.session is None and (r.paused or may(r))]
        if not own:
            return False
        last = max(own, key=lambda request: (request.paused, request.rank))
        assert last.seq is not None
        last.seq.close()
        last.seq, last.n_known = None, -1
        self._running.remove(last)
        self._waiting.append(last)
        return True

    def _refuse(self) -> None:
        """Nothing can run, so nothing will ever end and make room: tell the first that lacks it."""
        for request in (*self._running, *self._waiting):
            if request.short is not None and not request.paused:
                self._fail(request, request.short)
                return
