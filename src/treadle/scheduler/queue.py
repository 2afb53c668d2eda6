"""Request queue and admission: a request waits until its whole prompt fits, then runs.

A running request has a sequence. If pages run out, the running request of the lowest rank gives up
its pages and waits again. The lists and the cache change only under the engine's lock; any thread
may append to ``inbox``.
"""

from __future__ import annotations

from bisect import insort
from collections import deque
from collections.abc import Callable, Hashable
from typing import TYPE_CHECKING

from treadle.errors import NoRoomError, TreadleError
from treadle.kvcache.page_pool import PAGE
from treadle.kvcache.prefix_tree import reuse_stop_reason
from treadle.scheduler.request import Request

if TYPE_CHECKING:
    from treadle.engine.engine import Engine
    from treadle.kvcache.cache import Sequence

AGE_S = 2.0  # waiting this long raises the priority by one step
CONSIDERED = 32  # waiting requests whose prefixes are looked up in the cache


class RequestQueue:
    """The waiting and running requests of one engine. ``clock`` returns seconds."""

    def __init__(self, engine: Engine, clock: Callable[[], float]) -> None:
        self.engine = engine
        self.clock = clock
        self.inbox: deque[Request] = deque()  # new requests, and requests to remove
        self.waiting: list[Request] = []
        self.running: list[Request] = []  # by rank; each has a sequence
        self._failed: list[Request] = []  # not yet reported by ``take_failed``
        self._n_added = 0
        self._turns: dict[Hashable, int] = {}  # by key: sequence number of its last admission
        self._served: dict[Hashable, float] = {}  # by key: time of its last admission
        self.n_preempted = 0  # requests preempted since the start

    # -- arrival and removal -----------------------------------------------------------------------

    def drain(self) -> None:
        """Move the new requests of ``inbox`` to the queue; remove those that ended or were
        cancelled.
        """
        while self.inbox:
            request = self.inbox.popleft()
            if request.cancelled or request.answer.done:
                self.remove_request(request)
                continue
            self._n_added += 1
            request.number, request.arrived = self._n_added, self.clock()
            try:
                for ids in (request.ids, request.source):
                    self.engine.check_ids(ids)
                    self.engine.cache.check_context(len(ids))
                self.waiting.append(request)
                if request.media:
                    self.engine.cache.media.hold(request.media)
                    request.holds_media = True
            except TreadleError as error:
                self.fail(request, error)

    def fail(self, request: Request, error: TreadleError) -> None:
        """End a request with an error, and remove it."""
        request.answer.fail(error)
        self._failed.append(request)
        self.remove_request(request)

    def remove_request(self, request: Request) -> None:
        """Remove a request. Its sequence stays cached for prompts with the same prefix; a session
        keeps its sequence, but without tokens that a cancelled request's caller has not taken.
        """
        for queue in (self.waiting, self.running):
            if request in queue:
                queue.remove(request)
        if request.holds_media:
            self.engine.cache.media.release(request.media)
            request.holds_media = False
        seq = request.seq
        request.seq = None
        # A caller or drafter that keeps the request must not keep the session alive.
        session = request.session
        request.session = None
        if seq is None:
            return
        cache = self.engine.cache
        answer = request.answer
        if session is None:
            return cache.retire(seq)
        cache.release_reservation(seq)
        if request.cancelled and answer.pieces and seq.n_changes == request.last_n_changes:
            # Tokens beyond this point were never shown to the caller: drop them from the cache.
            n = len(request.ids) - len(answer.ids) + answer.n_taken - 1
            if n < len(seq) and cache.truncation_length(seq, n) == n:
                cache.truncate(seq, n)

    def take_failed(self) -> list[Request]:
        """Return the requests that failed since the last call of this method."""
        failed = self._failed
        self._failed = []
        return failed

    # -- admission ---------------------------------------------------------------------------------

    def admit(self) -> None:
        """Admit waiting requests until one does not fit, so that large prompts are not starved.

        Order: priority (more urgent with age), round-robin over keys, longest cached prefix,
        arrival.
        """
        now = self.clock()
        for at, request in enumerate(self.waiting):
            request.effective_priority = request.priority - int((now - request.arrived) / AGE_S)
            if at < CONSIDERED and len(self.waiting) > 1:
                request.look_up(self.engine.cache)
        self._rank_by_key(now)
        turns = self._turns
        self.waiting.sort(
            key=lambda r: (r.effective_priority, turns.get(r.key, 0), -r.n_known, r.number)
        )
        for place, request in enumerate(self.waiting, 1):
            request.queue_position = place
        for request in list(self.waiting):
            if request.paused or self.fail_if_closed(request) or self._should_wait(request):
                continue
            if not self._start(request):
                break

    def _rank_by_key(self, now: float) -> None:
        """Set the levels (``effective_priority``; lower runs first) of waiting requests that have a
        key, from the key as a whole. ``now``: the time, in the clock's seconds.

        A key has the priority of its most urgent request and ages since it was last served, so
        hundreds of old requests of one key do not delay another key's first. Each request of a key,
        running ones included, moves the key's next one back by one level.
        """
        of_key: dict[Hashable, list[Request]] = {}
        for request in sorted(
            self.waiting, key=lambda request: (request.effective_priority, request.number)
        ):
            if request.key is not None:
                of_key.setdefault(request.key, []).append(request)
        for key, its in of_key.items():
            since = max(min(r.arrived for r in its), self._served.get(key, 0.0))
            level = min(r.priority for r in its) - int((now - since) / AGE_S)
            ahead = sum(r.key == key for r in self.running)
            for request in its:
                request.effective_priority = level + ahead
                ahead = ahead + 1

    def fail_if_closed(self, request: Request) -> bool:
        """Return whether the request's session is closed; if so, fail the request."""
        if request.session is None or not request.session.closed:
            return False
        self.fail(request, TreadleError("the session is closed"))
        return True

    def _should_wait(self, request: Request) -> bool:
        """Return whether the request should wait for a running one, which is about to prefill the
        same next page, or to keep a layer state at the end of the same system prompt: so N equal
        prompts are computed once.
        """
        if not self.running or not request.reuse or request.source:
            return False
        ids = request.ids
        n = request.look_up(self.engine.cache)
        stateful = bool(self.engine.cache.states)

        def is_awaited(other: Request, end: int) -> bool:
            return (
                n < end < len(ids)
                and len(other.seq or ()) < end <= len(other.ids)
                and other.lora == request.lora
                and other.reuse  # without reuse, its pages can be found only after it has ended
                and not other.paused
                and not other.is_sampling
                and other.ids[n:end] == ids[n:end]
                and other.ids[:n] == ids[:n]
            )

        return any(
            is_awaited(other, n + PAGE) or (stateful and is_awaited(other, other.system_end))
            for other in self.running
        )

    def _start(self, request: Request) -> bool:
        """Give the request a sequence with its cached prefix, and reserve pages for the rest.
        Return whether there was room; only then it runs.
        """
        session = request.session
        if session is None:  # ``last_n_changes`` counted another sequence's changes
            request.last_n_changes = min(request.last_n_changes, 0)
        request.seq = seq = self._assign_sequence(request)
        seq.system_end = request.system_end
        if not any(other.seq is seq for other in self.running):
            # While others run, reserve one more page for the tokens this request will decode.
            spare = min(PAGE, self.engine.n_ctx - len(request.ids)) if self.running else 0
            if not self.reserve_or_preempt(request, self.resume(request) + spare, by_rank=False):
                request.seq = None
                if session is None:
                    seq.close()
                else:
                    self.engine.cache.release_reservation(seq)
                return False
        self.waiting.remove(request)
        if request.key is not None:
            self._turns[request.key] = max(self._turns.values(), default=0) + 1
            self._served[request.key] = self.clock()
        request.queue_position, request.started = 0, request.started or self.clock()
        insort(self.running, request, key=lambda other: other.rank)
        return True

    def _assign_sequence(self, request: Request) -> Sequence:
        """Return a sequence for the request: its session's, or a new one."""
        session = request.session
        cache = self.engine.cache
        if session is None and request.reuse and not request.source:
            return cache.revive(request.lora)
        seq = cache.sequence((), request.lora) if session is None else session.seq
        if not request.reuse:
            cache.truncate(seq, 0)
            seq.is_unshared = True
        return seq

    def resume(self, request: Request) -> int:
        """Make the request's sequence hold a prefix of the request's ids. Return the number of ids
        that are left to run (>= 1).

        The sequence may differ from what the last step left: another request may have used the
        session, or a signal may have come after the batch ran and before its logits were used.
        """
        seq = request.seq
        ids = request.ids
        assert seq is not None
        if seq.n_changes != request.last_n_changes or len(seq.ids) >= len(ids):
            kept = self.engine.cache.match(seq, ids)
            if request.last_n_changes < 0 and not request.answer.ids:
                timings = request.answer.timings
                timings.n_cached = timings.cache.memory = kept
                timings.cache.state = seq.state_from
            request.last_n_changes = seq.n_changes
        return len(ids) - len(seq.ids)

    def fetch_stored_pages(self, request: Request, until: float) -> bool:
        """Append pages of the request's prompt, found in page files, to its sequence. Return False
        if the clock reached ``until`` before that was finished. The first time, also record where
        and why prefix reuse stopped.
        """
        seq = request.seq
        cache = self.engine.cache
        ids = request.ids
        assert seq is not None
        if request.source:  # its prompt is in no page of the decoder
            return True
        timings = request.answer.timings
        use = timings.cache
        n = 1
        while cache.store is not None and request.reuse and n and len(seq.ids) < len(ids) - 1:
            if self.clock() >= until:
                return False
            n = cache.store.fetch(seq, ids)
            request.last_n_changes = seq.n_changes
            if not use.why:
                use.files += n
        if not use.why:
            use.left_at = len(seq.ids)
            use.memory = use.left_at - use.files
            use.token = ids[use.left_at]
            use.why = reuse_stop_reason(cache, seq, ids) if request.reuse else "off"
            timings.n_cached = use.left_at
        return True

    def reserve_or_preempt(self, request: Request, n: int, *, by_rank: bool = True) -> bool:
        """Reserve pages for ``n`` more tokens of a running request; return whether there was room.

        If necessary, running requests of lower rank are preempted; if not ``by_rank``, only those
        among them whose priority is lower too.
        """
        assert request.seq is not None

        def behind(other: Request) -> bool:
            less = by_rank or other.priority > request.priority
            return less and other.rank > request.rank

        while True:
            try:
                self._reserve(request, n)
                request.room_error = None
                return True
            except NoRoomError as error:
                request.room_error = error
                if not self.preempt_one(lambda other: other is not request and behind(other)):
                    return False

    def _reserve(self, request: Request, n: int) -> None:
        """Reserve pages for ``n`` more tokens, and in an encoder-decoder model for the keys and
        values of the encoder's rows, which requests with the same source share. Raises NoRoomError
        without enough pages.
        """
        seq = request.seq
        cache = self.engine.cache
        assert seq is not None
        if request.source and seq.encoded is None:
            keys = cache.inputs.hold(request.source, shared=request.reuse)
            seq.attend_to(keys)
            if keys.is_stored and not request.answer.ids:
                timings = request.answer.timings
                timings.n_cached = timings.cache.memory = len(request.source)
        cache.reserve(seq, n)

    def preempt_one(self, may_preempt: Callable[[Request], bool]) -> bool:
        """Preempt one running request: a paused one first, else the lowest-ranked for which
        ``may_preempt`` is true; never one of a session. Return whether there was one.

        It waits again, and recomputes what the cache has evicted by then.
        """
        own = [r for r in self.running if r.session is None and (r.paused or may_preempt(r))]
        if not own:
            return False
        last = max(own, key=lambda request: (request.paused, request.rank))
        assert last.seq is not None
        last.seq.close()
        last.seq = None
        last.n_known = -1
        self.running.remove(last)
        self.waiting.append(last)
        self.n_preempted += 1
        return True

    def fail_one_blocked(self) -> None:
        """Resolve a deadlock, in which no request can run and none will free pages: fail the first
        one that lacks pages.
        """
        for request in (*self.running, *self.waiting):
            if request.room_error is not None and not request.paused:
                self.fail(request, request.room_error)
                return
