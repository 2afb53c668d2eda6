"""Who runs: requests come in, wait, and run as soon as there are pages for their whole prompts.

A request that runs has a sequence. Where pages run out, the last in rank gives its own back and
waits again. The lists and the cache change under the engine's lock alone; only ``inbox`` takes
from any thread.
"""

from __future__ import annotations

from bisect import insort
from collections import deque
from collections.abc import Callable, Hashable
from typing import TYPE_CHECKING

from treadle.errors import NoRoomError, TreadleError
from treadle.kernels.attention.page_layout import PAGE
from treadle.kvcache.prefix_hit import why_left
from treadle.scheduler.request import Request

if TYPE_CHECKING:
    from treadle.engine.engine import Engine
    from treadle.kvcache.cache import Sequence

AGE_S = 2.0  # waiting so long counts as much as one step of priority
CONSIDERED = 32  # waiting requests whose beginnings are looked up in the cache


class RequestQueue:
    """The requests before one engine. ``clock`` gives seconds."""

    def __init__(self, engine: Engine, clock: Callable[[], float]) -> None:
        self.engine, self.clock = engine, clock
        self.inbox: deque[Request] = deque()  # that came, and that are to go
        self.waiting: list[Request] = []
        self.running: list[Request] = []  # by rank; each has a sequence
        self._failed: list[Request] = []  # that nobody has been told of
        self._n_added = 0
        self._turns: dict[Hashable, int] = {}  # of each key the last that was let in
        self._served: dict[Hashable, float] = {}  # and when that was
        self.n_preempted = 0  # since the start: requests that gave their pages to others

    # -- in and out -------------------------------------------------------------------------------

    def drain(self) -> None:
        """Take in what came, and let go what ended or was cancelled."""
        while self.inbox:
            request = self.inbox.popleft()
            if request.cancelled or request.answer.done:
                self.leave(request)
                continue
            self._n_added += 1
            request.number, request.arrived = self._n_added, self.clock()
            try:
                self.engine.check_ids(request.ids)
                self.engine.cache.check_context(len(request.ids))
                self.waiting.append(request)
            except TreadleError as error:
                self.fail(request, error)

    def fail(self, request: Request, error: TreadleError) -> None:
        """End a request with an error."""
        request.answer.fail(error)
        self._failed.append(request)
        self.leave(request)

    def leave(self, request: Request) -> None:
        """Forget a request. What its sequence holds stays, for a text that begins alike."""
        for queue in (self.waiting, self.running):
            if request in queue:
                queue.remove(request)
        seq, request.seq = request.seq, None
        # Whoever keeps the request, its caller or a drafter, is not to keep the session alive.
        session, request.session = request.session, None
        if seq is None:
            return
        cache, answer = self.engine.cache, request.answer
        if session is None:
            return cache.retire(seq)
        cache.let_go(seq)
        if request.cancelled and answer.pieces and seq.n_changes == request.seen:
            # Of what was written ahead nobody knows.
            n = len(request.ids) - len(answer.ids) + answer.n_taken - 1
            if n < len(seq) and cache.visible(seq, n) == n:
                cache.truncate(seq, n)

    def told(self) -> list[Request]:
        """Those that have failed since this was last asked."""
        failed, self._failed = self._failed, []
        return failed

    # -- who runs -------------------------------------------------------------------------------

    def admit(self) -> None:
        """Let waiting requests run: by priority, which grows with age, keys taking turns; then
        those of whose text the cache has most; then as they came. The first that has no room stops
        those behind it.
        """
        now = self.clock()
        for at, request in enumerate(self.waiting):
            request.level = request.priority - int((now - request.arrived) / AGE_S)
            if at < CONSIDERED and len(self.waiting) > 1:
                request.look_up(self.engine.cache)
        self._take_turns(now)
        turns = self._turns
        self.waiting.sort(key=lambda r: (r.level, turns.get(r.key, 0), -r.n_known, r.number))
        for place, request in enumerate(self.waiting, 1):
            request.place = place
        for request in list(self.waiting):
            if request.paused or self.closed(request) or self._follows(request):
                continue
            if not self._start(request):
                break

    def _take_turns(self, now: float) -> None:
        """A key is as urgent as what is most urgent of it, and ages from when it was last served:
        so one with hundreds that have waited long does not hold up another's first. Its second
        stands one step behind its first, and so on.
        """
        of_key: dict[Hashable, list[Request]] = {}
        for request in sorted(self.waiting, key=lambda request: (request.level, request.number)):
            if request.key is not None:
                of_key.setdefault(request.key, []).append(request)
        for key, its in of_key.items():
            since = max(min(r.arrived for r in its), self._served.get(key, 0.0))
            level = min(r.priority for r in its) - int((now - since) / AGE_S)
            ahead = sum(r.key == key for r in self.running)
            for request in its:
                request.level, ahead = level + ahead, ahead + 1

    def closed(self, request: Request) -> bool:
        """Whether its session is closed: then it has failed."""
        if request.session is None or not request.session.closed:
            return False
        self.fail(request, TreadleError("the session is closed"))
        return True

    def _follows(self, request: Request) -> bool:
        """Whether another one is about to read what this one would read next: so that N equal
        prompts are read once.
        """
        if not self.running or not request.reuse:
            return False
        ids, n = request.ids, request.look_up(self.engine.cache)
        end = n + PAGE
        return (
            end < len(ids)
            and any(
                len(other.seq or ()) < end <= len(other.ids)
                and other.lora == request.lora
                and other.reuse  # or its pages are found only when it has ended
                and not other.paused
                and not other.looked_at
                and other.ids[n:end] == ids[n:end]
                and other.ids[:n] == ids[:n]
                for other in self.running
            )
        )

    def _start(self, request: Request) -> bool:
        """Give it a sequence with what is known of it, and reserve pages for the rest."""
        session = request.session
        if session is None:  # what it saw was another sequence's: counts of changes may be equal
            request.seen = min(request.seen, 0)
        request.seq = seq = self._place(request)
        if not any(other.seq is seq for other in self.running):
            # Those who write beside others soon need a page more.
            spare = min(PAGE, self.engine.n_ctx - len(request.ids)) if self.running else 0
            if not self.secure(request, self.resume(request) + spare, by_rank=False):
                request.seq = None
                if session is None:
                    seq.close()
                else:
                    self.engine.cache.let_go(seq)
                return False
        self.waiting.remove(request)
        if request.key is not None:
            self._turns[request.key] = max(self._turns.values(), default=0) + 1
            self._served[request.key] = self.clock()
        request.place, request.started = 0, request.started or self.clock()
        insort(self.running, request, key=lambda other: other.rank)
        return True

    def _place(self, request: Request) -> Sequence:
        """The sequence that it is to be written in."""
        session, cache = request.session, self.engine.cache
        if session is None and request.reuse:
            return cache.revive(request.lora)
        seq = cache.sequence((), request.lora) if session is None else session.seq
        if not request.reuse:
            cache.truncate(seq, 0)
            seq.alone = True
        return seq

    def resume(self, request: Request) -> int:
        """Make the request's sequence hold a beginning of its ids; how many are left, at least 1.

        It may not be as the last step left it: somebody else used the session, or a signal came
        when the batch had run and its logits were not looked at.
        """
        seq, ids = request.seq, request.ids
        assert seq is not None
        if seq.n_changes != request.seen or len(seq.ids) >= len(ids):
            kept = self.engine.cache.match(seq, ids)
            if request.seen < 0 and not request.answer.ids:
                timings = request.answer.timings
                timings.n_cached = timings.cache.memory = kept
            request.seen = seq.n_changes
        return len(ids) - len(seq.ids)

    def recall(self, request: Request, until: float) -> bool:
        """Put what page files have of the request's text behind what its sequence holds; whether
        that was done by ``until``. The first time say where it left the cache.
        """
        seq, cache, ids = request.seq, self.engine.cache, request.ids
        assert seq is not None
        timings = request.answer.timings
        use, n = timings.cache, 1
        while cache.store is not None and request.reuse and n and len(seq.ids) < len(ids) - 1:
            if self.clock() >= until:
                return False
            n = cache.store.fetch(seq, ids)
            request.seen = seq.n_changes
            if not use.why:
                use.files += n
        if not use.why:
            use.left_at = len(seq.ids)
            use.memory = use.left_at - use.files
            use.token = ids[use.left_at]
            use.why = why_left(cache, seq, ids) if request.reuse else "off"
            timings.n_cached = use.left_at
        return True

    def secure(self, request: Request, n: int, *, by_rank: bool = True) -> bool:
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
                if not self.take_pages(lambda other: other is not request and behind(other)):
                    return False

    def take_pages(self, may: Callable[[Request], bool]) -> bool:
        """Take those of one request, if there is one. It waits again; what the cache has forgotten
        of it by then is read again. Who is paused goes first, then the last of those that ``may``.
        """
        own = [r for r in self.running if r.session is None and (r.paused or may(r))]
        if not own:
            return False
        last = max(own, key=lambda request: (request.paused, request.rank))
        assert last.seq is not None
        last.seq.close()
        last.seq, last.n_known = None, -1
        self.running.remove(last)
        self.waiting.append(last)
        self.n_preempted += 1
        return True

    def refuse(self) -> None:
        """Nothing can run, so nothing will ever end and make room: tell the first that lacks it."""
        for request in (*self.running, *self.waiting):
            if request.short is not None and not request.paused:
                self.fail(request, request.short)
                return
