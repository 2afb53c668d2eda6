"""What a batch is made of: the last id of each request that decodes (where a draft was taken back
from a state, those before it again), and as much of the prompts as the step has time for.
"""

from __future__ import annotations

from collections.abc import Hashable
from math import inf
from typing import TYPE_CHECKING

from treadle.engine.batch import BatchItem
from treadle.kernels.attention.page_layout import PAGE
from treadle.scheduler.step_budget import LEAST, KeyShares, StepCostModel
from treadle.spec_decode.proposer import Drafting

if TYPE_CHECKING:
    from treadle.scheduler.queue import RequestQueue
    from treadle.scheduler.request import Request

Batch = list[tuple["Request", BatchItem]]


class BatchBuilder:
    """Makes batches of the requests that are let in. ``pace`` predicts what a step takes."""

    def __init__(self, admission: RequestQueue, pace: StepCostModel) -> None:
        self._admission, self._pace, self._shares = admission, pace, KeyShares()
        self.drafting = Drafting(admission.engine.max_tokens, admission.clock)

    def compose(self) -> Batch:
        """The parts of the next batch, whose pages are reserved."""
        queue = self._admission
        if queue.waiting:
            queue.admit()
        decoding: list[Request] = []
        reading: list[tuple[Hashable, Hashable, Request, int]] = []
        until, late = self._until(), False
        for request in self._wanting():
            if request.seq is None:  # it gave way to one before it
                continue
            left = queue.resume(request)
            # Most ids go where others of the same page are.
            new_page = left > 1 or not len(request.seq.ids) % PAGE
            if new_page and not queue.secure(request, left):
                continue
            if not request.goes_on(left):
                if not queue.recall(request, until):  # more of it is in files
                    late = True
                    continue
                left = len(request.ids) - len(request.seq.ids)
            if left == 1 or request.goes_on(left):
                decoding.append(request)
            else:
                reading.append((request.key, request.client, request, left))
        most = budget = queue.engine.max_tokens
        if decoding and reading:
            budget = most = max(most - len(decoding), LEAST)
            if any(request.awaited for request in decoding):
                context, before = sum(len(r.ids) for r in decoding), len(reading[0][2].seq or ())
                budget = self._pace.tokens(len(decoding), context, before, most)
        # Never beside prompts, whose step is as long as its tokens are many.
        drafts = {} if reading else self.drafting.make(decoding, queue.running)
        batch: Batch = []
        for request in decoding:
            if request.seq is not None:
                draft = drafts.get(request, [])
                ids = [*request.ids[len(request.seq) :], *draft]
                n = 1 + len(draft)
                request.seq.n_drafted, looks = n - 1, request.looks(n)
                batch.append((request, BatchItem(request.seq, ids, n, looks)))
        for request, n in self._shares.split(reading, budget) if reading else ():
            if request.seq is not None:
                start = len(request.seq)
                ids = request.ids[start : start + n]
                ids = ids[: queue.engine.cache.cut(request.seq, ids)]
                last = start + len(ids) == len(request.ids)
                looks = request.looks() if last else ()
                batch.append((request, BatchItem(request.seq, ids, int(last), looks)))
        if not batch and not late:
            queue.refuse()
        return batch

    def _until(self) -> float:
        """How long pages may be fetched from files: where somebody decodes, for one step's time."""
        queue = self._admission
        writing = any(request.answer.ids and not request.paused for request in queue.running)
        return queue.clock() + self._pace.target_s if writing else inf

    def _wanting(self) -> list[Request]:
        """The running requests that may have an id more, by rank; of those on one sequence that
        whose text is taken fastest.
        """
        found: dict[int, Request] = {}
        for request in list(self._admission.running):
            if request.paused or request.looked_at or self._admission.closed(request):
                continue
            other = found.setdefault(id(request.seq), request)
            if len(request.answer.pieces) < len(other.answer.pieces):
                found[id(request.seq)] = request
        return list(found.values())
