"""Drafter with a Gemma 4 assistant, which reads the model's own keys and values.

It has no cache, and no text of its own to read: after any run of the model it can draft at once,
from the state of the last token but one and the pages of the request's sequence.
"""

from __future__ import annotations

from collections.abc import Collection, Hashable, Mapping
from collections.abc import Sequence as Seq
from typing import TYPE_CHECKING, Any

import numpy as np

from treadle.engine.batch import BatchItem
from treadle.engine.engine import Engine, EngineObserver
from treadle.errors import UnsupportedError
from treadle.kvcache.cache import Sequence
from treadle.kvcache.target_cache import BorrowedCache
from treadle.models.graphs.assistant import GIVEN, bound, clustered, order_of
from treadle.plan.lowering.clusters import CHOSEN
from treadle.spec_decode.draft_model import (
    ARGMAX_QUERY,
    Drafter,
    K,
    TokenTable,
    check_vocabularies,
)
from treadle.spec_decode.mtp import AHEAD, ModelStates, share_of

if TYPE_CHECKING:
    from treadle.engine.logits import LogitsBatch
    from treadle.engine.prepared_plan import PreparedPlan
    from treadle.files.gguf import GGUF
    from treadle.kvcache.cache import KVCache
    from treadle.models.config import Config


class AssistantEngine(Engine):
    """An engine whose layers read the pages of another engine's cache."""

    def __init__(self, gguf: GGUF, config: Config, target: Engine) -> None:
        self.lender = target
        super().__init__(gguf, config, target.device, n_ctx=target.n_ctx)

    def make_cache(self, *given: Any, **named: Any) -> KVCache:
        """Return the view of the other engine's cache; the arguments of ``Engine.make_cache`` are
        ignored.
        """
        assert self.lender is not None
        return BorrowedCache(self.lender.cache, self.config.n_layer)


class GivenStates(EngineObserver):
    """Writes ``given``, token embeddings beside hidden states, f32 ``[n, 2 * n_target]``, into the
    input of the assistant's run; ``n_target`` is the model's embedding width. Keeps from the run
    the assistant's next states, ``rows``, f32 ``[n, n_target]``, and the vocabulary clusters that
    have logits, ``clusters``, i32 ``[n, n_clusters]``.
    """

    output = AHEAD

    def __init__(self, n_target: int, n_clusters: int = 0) -> None:
        self._n_target = n_target
        self._n_clusters = n_clusters
        self.given = self.rows = np.zeros((0, 0), np.float32)
        self.clusters = np.zeros((0, 0), np.int32)

    def before_run(self, ready: PreparedPlan) -> None:
        """Write the rows ``given`` into the plan's input."""
        ready.write(GIVEN, self.given)

    def after_run(self, parts: Seq[BatchItem], ready: PreparedPlan) -> None:
        """Copy the assistant's next states to ``rows``, and its clusters to ``clusters``, from the
        plan's memory.
        """
        n = ready.run.n_outputs
        self.rows = ready.rows(ready.plan.outputs[AHEAD], n, self._n_target).copy()
        if self._n_clusters:
            at = ready.plan.offsets[ready.plan.outputs[CHOSEN]]
            chosen = ready.arena.read(at, 4 * n * self._n_clusters).copy().view(np.int32)
            self.clusters = chosen.reshape(n, self._n_clusters)


class AssistantDrafter(Drafter):
    """Drafts for ``engine`` with the assistant's engine ``made``. An owner is a request, whose
    ``seq`` is its sequence in ``engine``.
    """

    observer: ModelStates
    own_observer: GivenStates

    def __init__(self, made: AssistantEngine, engine: Engine, **given: Any) -> None:
        super().__init__(made, engine.config.n_vocab, **given)
        self._cost_share = share_of(made, engine)
        self.observer = ModelStates(engine.config.n_embd, engine.media)
        config = made.config
        self._order: np.ndarray | None = None  # the token of each row of the output
        self._n_rows = 0  # of a cluster
        if config.clusters is not None:
            self._order = order_of(made.gguf)
            self._n_rows = len(self._order) // config.clusters.n
        n_clusters = config.clusters.n_used if config.clusters else 0
        self.own_observer = GivenStates(engine.config.n_embd, n_clusters)
        self._embeddings = TokenTable(engine.gguf, "token_embd.weight")
        self._scale = np.float32(engine.config.embd_scale)

    def keep_only(self, owners: Collection[Any]) -> None:
        """Drop the model's hidden states of all other owners; the assistant has no sequences."""
        self.observer.keep_only(owners)

    def can_draft(self, owner: Any, ids: Seq[int]) -> bool:
        """Return whether the model has run all of ``ids`` but the last, and ``observer`` holds the
        hidden state of the last one that it ran.
        """
        states = self.observer.states.get(owner.seq)
        if states is None or len(owner.seq) != len(ids) - 1:
            return False
        states.drop_rejected(ids)
        states.drop(len(ids) - 2)
        return states.start == len(ids) - 2 and len(states.ids) == 1

    def prefill_chunk(self, owner: Hashable, ids: Seq[int], within_s: float) -> None:
        """Do nothing: the assistant reads the model's own keys and values."""

    def draft_ids(self, wanted: Mapping[K, tuple[Seq[int], int]]) -> dict[K, list[int]]:
        """Draft greedily, one assistant run per draft token; see ``Drafter.draft_ids``."""
        result: dict[K, list[int]] = {owner: [] for owner in wanted}
        rows = {owner: self.observer.states[seq_of(owner)].rows[0] for owner in wanted}
        for i in range(max((n for _, n in wanted.values()), default=0)):
            going = [owner for owner, (_, n) in wanted.items() if n > i and len(result[owner]) == i]
            if not going or len(going) > self.engine.max_tokens:
                break
            last = {owner: [*wanted[owner][0][-1:], *result[owner]][-1] for owner in going}
            given = [np.concatenate([self._embedding(last[own]), rows[own]]) for own in going]
            self.own_observer.given = np.stack(given)
            began = self._now()
            made = self._ask([(seq_of(owner), token) for owner, token in last.items()])
            self._steps.note(len(going), self._now() - began)
            for at, (owner, row) in enumerate(zip(going, made, strict=True)):
                rows[owner] = self.own_observer.rows[at]
                assert row.top is not None
                token = self._token_in(at, row.top.first[1])
                if 0 <= token < self._n_vocab:
                    result[owner].append(token)
        return result

    def _token_in(self, at: int, row: int) -> int:
        """Return the token of logit number ``row`` of the last run's item ``at``: the vocabulary's
        tokens are in clusters, and only some clusters have logits.
        """
        if self._order is None or row < 0:
            return row
        place, within = divmod(row, self._n_rows)
        cluster = int(self.own_observer.clusters[at, place])
        return int(self._order[cluster * self._n_rows + within])

    def _ask(self, asked: Seq[tuple[Sequence, int]]) -> LogitsBatch:
        """Run one token at the end of each sequence, without changing the sequences. ``asked``:
        sequences and tokens. Return their logits.
        """
        cache = self.engine.cache
        parts = []
        for seq, token in asked:
            view = Sequence(cache, seq.ids, seq.pages, shifts=seq.shifts)
            parts.append(BatchItem(view, [token], 1, (ARGMAX_QUERY,)))
        return self.engine.sample(parts, self.own_observer)

    def _embedding(self, token: int) -> np.ndarray:
        """Return the model's embedding of a token, f32 ``[n_target]``."""
        return np.asarray(self._embeddings.rows([token])[0] * self._scale)


def seq_of(owner: Any) -> Sequence:
    """Return the model's sequence of a request."""
    seq: Sequence = owner.seq
    return seq


def open_assistant(draft: GGUF, config: Config, engine: Engine) -> AssistantDrafter:
    """Return a drafter for ``engine``, on its device. Raises UnsupportedError if the assistant was
    made for another model, or if the model's layers are in several processes.
    """
    check_vocabularies(engine.gguf, draft)
    if not engine.has_states:
        what = "drafts from the model's states, which are in another process"
        raise UnsupportedError(f"{draft.path}: {config.arch.name} {what}")
    gguf, config = clustered(bound(config, draft, engine.config), draft)
    made = AssistantEngine(gguf, config, engine)
    return AssistantDrafter(made, engine)
