"""Builds a batch: the next token of every decoding request, with its draft, then prompt chunks up
to the step's budget. After a draft was rejected, a request with a layer state first recomputes the
tokens that this state lacks.
"""

from __future__ import annotations

from collections.abc import Hashable
from math import inf
from typing import TYPE_CHECKING

from treadle.base.fast_classes import cached_property
from treadle.engine.batch import BatchItem
from treadle.engine.engine import NO_OBSERVER
from treadle.kvcache.page_pool import PAGE
from treadle.scheduler.step_budget import MIN_PROMPT_TOKENS, KeyedRoundRobin, StepCostModel

if TYPE_CHECKING:
    from treadle.engine.engine import EngineObserver
    from treadle.errors import TreadleError
    from treadle.scheduler.encoder_queue import EncoderQueue
    from treadle.scheduler.media_queue import MediaQueue
    from treadle.scheduler.queue import RequestQueue
    from treadle.scheduler.request import Request
    from treadle.spec_decode.proposer import Drafting, Drafts

Batch = list[tuple["Request", BatchItem]]


class BatchBuilder:
    """Builds batches from the running requests. ``cost_model`` predicts step times.

    Most models and prompts have nothing to encode and no drafts: what does that is imported when a
    request first needs it.
    """

    def __init__(self, queue: RequestQueue, cost_model: StepCostModel) -> None:
        self._queue = queue
        self._cost_model = cost_model
        self._shares = KeyedRoundRobin()

    @cached_property
    def media(self) -> MediaQueue:
        """The pictures and sounds that requests wait for: a request is in no batch until its own
        are encoded.
        """
        from treadle.scheduler.media_queue import MediaQueue

        return MediaQueue(self._queue.engine, self._queue.clock)

    @cached_property
    def prompts(self) -> EncoderQueue:
        """The same of prompts of an encoder-decoder model."""
        from treadle.scheduler.encoder_queue import EncoderQueue

        return EncoderQueue(self._queue.engine, self._queue.clock)

    @cached_property
    def drafting(self) -> Drafting:
        """Chooses the drafts of each step."""
        from treadle.spec_decode.proposer import Drafting

        return Drafting(self._queue.engine.max_tokens, self._queue.clock)

    @property
    def has_drafting(self) -> bool:
        """Whether ``drafting`` was used: a drafter was opened, or a request has had drafts."""
        return "drafting" in self.__dict__

    @property
    def observer(self) -> EngineObserver:
        """The observer of the model's runs: the drafter's, or one that does nothing."""
        return self.drafting.observer if self.has_drafting else NO_OBSERVER

    def _encoders(self) -> list[MediaQueue | EncoderQueue]:
        """Return the queues of what is to be encoded, those that were used."""
        return [self.__dict__[name] for name in ("media", "prompts") if name in self.__dict__]

    def _begin_step(self) -> None:
        for queue in self._encoders():
            queue.begin_step()

    @property
    def _is_encoding(self) -> bool:
        """Whether a request of this step waits for something to be encoded."""
        return any(queue.waits for queue in self._encoders())

    def encode(self) -> list[tuple[Request, TreadleError]]:
        """Encode for one slice of time what requests of this step wait for. Return the requests
        that cannot be encoded, each with its error. The caller holds the engine's lock.
        """
        return [failed for queue in self._encoders() for failed in queue.run_slice()]

    def build(self) -> Batch:
        """Admit waiting requests, and return the items of the next batch, with their pages
        reserved.

        The batch is empty if no request can run now. If none could run later either, because all
        lack pages, one of them fails.
        """
        queue = self._queue
        self._begin_step()
        if queue.waiting:
            queue.admit()
        decoding: list[Request] = []
        reading: list[tuple[Hashable, Hashable, Request, int]] = []
        until = self._fetch_deadline()
        late = False
        for request in self._runnable():
            if request.seq is None:  # preempted by an earlier request of this loop
                continue
            left = queue.resume(request)
            if not self._may_run(request, left):
                continue
            if not request.is_decoding(left):
                if not queue.fetch_stored_pages(request, until):  # page files hold more of it
                    late = True
                    continue
                left = len(request.ids) - len(request.seq.ids)
            # The last token of a prompt may be a row of a picture, which has to be encoded.
            is_read = not request.media or bool(request.answer.ids)
            if is_read and (left == 1 or request.is_decoding(left)):
                decoding.append(request)
            else:
                reading.append((request.key, request.client, request, left))
        most = budget = queue.engine.max_tokens
        if decoding and reading:
            budget = most = max(most - len(decoding), MIN_PROMPT_TOKENS)
            if any(request.is_streamed for request in decoding):
                context = sum(len(r.ids) for r in decoding)
                before = len(reading[0][2].seq or ())
                budget = self._cost_model.tokens(len(decoding), context, before, most)
        # No drafts next to prompts: such a step takes longer with every token.
        drafts = {} if reading else self._drafts(decoding)
        batch: Batch = []
        for request in decoding:
            if request.seq is not None:
                draft = drafts.get(request, [])
                ids = [*request.ids[len(request.seq) :], *draft]
                n = 1 + len(draft)
                request.seq.n_drafted, queries = n - 1, request.queries(n)
                batch.append((request, BatchItem(request.seq, ids, n, queries)))
        for request, n in self._shares.split(reading, budget) if reading else ():
            item = self._prompt_part(request, n)
            if item is not None:
                batch.append((request, item))
        if not batch and not (late or self._is_encoding):
            queue.fail_one_blocked()
        return batch

    def _may_run(self, request: Request, left: int) -> bool:
        """Return whether an admitted request has pages for its ``left`` missing ids, reserved now,
        and its prompt is encoded, if that is to be.
        """
        assert request.seq is not None
        # Usually the next token goes to a page that the sequence already has.
        new_page = left > 1 or not len(request.seq.ids) % PAGE
        if new_page and not self._queue.reserve_or_preempt(request, left):
            return False
        return request.seq.encoded is None or self.prompts.ready(request)

    def _drafts(self, decoding: list[Request]) -> Drafts:
        """Return the draft of each decoding request that has one."""
        if not self.has_drafting and not any(request.speculates for request in decoding):
            return {}
        return self.drafting.make(decoding, self._queue.running)

    def _prompt_part(self, request: Request, n: int) -> BatchItem | None:
        """Return the item that runs the next part of a prompt, about ``n`` tokens; None if none can
        run now.
        """
        if request.seq is None:
            return None
        start = len(request.seq)
        n = self._queue.engine.cache.run_length(request.seq, request.ids[start : start + n])
        ids = request.ids[start : start + n]
        if self._queue.engine.cache.has_media(ids):
            ids = ids[: self.media.ready(request, ids)]
        if not ids:
            return None
        last = start + len(ids) == len(request.ids)
        return BatchItem(request.seq, ids, int(last), request.queries() if last else ())

    def _fetch_deadline(self) -> float:
        """Return the clock time until which pages may be fetched from files: one target step time
        from now while requests decode, else infinity.
        """
        queue = self._queue
        writing = any(request.answer.ids and not request.paused for request in queue.running)
        return queue.clock() + self._cost_model.target_s if writing else inf

    def _runnable(self) -> list[Request]:
        """Return the running requests that can process a token, by rank. Of several requests that
        share a sequence, return only the one with the fewest pieces that its caller has not taken.
        """
        found: dict[int, Request] = {}
        for request in list(self._queue.running):
            if request.paused or request.is_sampling or self._queue.fail_if_closed(request):
                continue
            other = found.setdefault(id(request.seq), request)
            if len(request.answer.pieces) < len(other.answer.pieces):
                found[id(request.seq)] = request
        return list(found.values())
