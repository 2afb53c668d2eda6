"""Drafter with a second, smaller model; its drafts are checked by the first model like any others.

It prefills the requests for which there is no better draft. It need not process a request from the
start, because drafts are guesses: if prefilling a long request would cost more time than drafts
may, it processes only the end.

The caller holds the lock of the first model's engine.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Collection, Hashable, Mapping
from collections.abc import Sequence as Seq
from typing import TYPE_CHECKING, TypeVar

from treadle.engine.batch import BatchItem
from treadle.engine.engine import NO_OBSERVER, Engine, EngineObserver
from treadle.engine.logits import LogitsQuery
from treadle.errors import ContextFullError, UnsupportedError
from treadle.kvcache.cache import Sequence
from treadle.models.config import StateSpec
from treadle.models.graphs import GRAPHS
from treadle.spec_decode.ngram import StepTimes
from treadle.tokenizer.vocab import TokenType, Vocab, has_vocabulary

if TYPE_CHECKING:
    import numpy as np

    from treadle.engine.logits import LogitsBatch
    from treadle.files.gguf import GGUF
    from treadle.models.config import Config

MIN_CHUNK = 32  # tokens per chunk: minimum, and the size before anything was measured
STEP_S = 0.06  # seconds per chunk: other requests wait for it
COST_SHARE = 0.25  # its step time as a share of the first model's, before it was measured
ARGMAX_QUERY = LogitsQuery(first=True)
K = TypeVar("K", bound=Hashable)


class TokenTable:
    """The matrix ``name`` of ``gguf``, with a row per token, whose rows are dequantised when they
    are asked for. Raises UnsupportedError for a type that treadle cannot dequantise.
    """

    def __init__(self, gguf: GGUF, name: str) -> None:
        tensor = gguf.tensors[name]
        if tensor.format is None:
            raise UnsupportedError(f"{gguf.path}: {name}: {tensor.type_name} is not supported")
        self._format = tensor.format
        self._rows = tensor.data.reshape(tensor.shape[0], -1)

    def rows(self, tokens: Seq[int]) -> np.ndarray:
        """Return the rows of ``tokens``, f32 ``[n, width]``."""
        return self._format.dequantize_rows(self._rows[list(tokens)])


class DraftSequence:
    """The drafter's sequence of one request: ``seq`` holds ids from ``start`` on; the first ``n``
    are the request's, the rest were drafted.
    """

    def __init__(self, seq: Sequence, start: int) -> None:
        self.seq = seq
        self.start = start
        self.n = 0

    def drop_rejected(self, ids: Seq[int]) -> int:
        """Drop drafted ids that differ from ``ids``, the request's. Return how many of these are
        still to be processed, the last one included.
        """
        seq = self.seq
        end = len(ids) - 1 - self.start
        while self.n < min(len(seq), end) and seq.ids[self.n] == ids[self.start + self.n]:
            self.n += 1
        seq.n_drafted = 0
        if self.n < len(seq):
            self.n = seq.cache.truncation_length(seq, self.n)
            seq.cache.truncate(seq, self.n)
        return len(ids) - self.start - self.n


class Drafter:
    """Drafts with ``engine``, the second model's, on the device of the first model, whose
    vocabulary has ``n_vocab`` tokens. An *owner* is a request (any hashable key); the drafter keeps
    a sequence for each. ``clock`` returns seconds.

    ``observer`` takes part in the first model's runs, ``own_observer`` in those of ``engine``.
    """

    observer: EngineObserver = NO_OBSERVER
    own_observer: EngineObserver = NO_OBSERVER

    def __init__(
        self, engine: Engine, n_vocab: int, clock: Callable[[], float] = time.perf_counter
    ) -> None:
        self._clock = clock
        self._cost_share = COST_SHARE
        self.engine, self._n_vocab = engine, min(n_vocab, engine.config.n_vocab)
        self._texts: dict[Hashable, DraftSequence] = {}
        # Sequences that drafted ids go to where layers keep a state, which cannot be taken back.
        self._forks: dict[Hashable, Sequence] = {}
        self._steps = StepTimes()  # of one-token steps
        self._token_s = 0.0  # prefill seconds per token

    @property
    def outputs(self) -> tuple[str, ...]:
        """Names of the graph outputs that the drafter's plans compute, such as "logits"."""
        return (self.own_observer.output,)

    def keep_only(self, owners: Collection[Hashable]) -> None:
        """Drop the sequences of all other owners."""
        for owner in [owner for owner in self._texts if owner not in owners]:
            self._texts.pop(owner).seq.close()

    def seconds(self, n_texts: int, n_ids: int, step_s: float) -> float:
        """Return the predicted seconds to draft ``n_ids`` for each of ``n_texts`` requests, where a
        step of the first model takes ``step_s``.
        """
        if not self._steps:
            return n_ids * self._cost_share * step_s
        return n_ids * self._steps.predicted(n_texts)

    def can_draft(self, owner: Hashable, ids: Seq[int]) -> bool:
        """Return whether the drafter has processed the ids of ``owner``, except for at most the
        last MIN_CHUNK, and has room for more.
        """
        text = self._texts.get(owner)
        return (
            text is not None
            and text.drop_rejected(ids) <= MIN_CHUNK
            and max(ids[text.start + text.n :]) < self._n_vocab
            and len(ids) - text.start + MIN_CHUNK <= self.engine.n_ctx
        )

    def prefill_chunk(self, owner: Hashable, ids: Seq[int], within_s: float) -> None:
        """Prefill a chunk of the ids of ``owner`` that the drafter has not processed. If all of
        them would take longer than ``within_s`` seconds, start closer to the end.
        """
        text = self._texts.get(owner)
        most = self.engine.n_ctx // 2
        may = min(int(within_s / self._token_s), most) if self._token_s else MIN_CHUNK
        lacks = len(ids) if text is None else text.drop_rejected(ids)
        if text is None or lacks > may or len(ids) - text.start + MIN_CHUNK > self.engine.n_ctx:
            if may < min(MIN_CHUNK, len(ids)):
                return
            if text is not None:
                text.seq.close()
            text = DraftSequence(
                self.engine.cache.sequence(), max(len(ids) - may, self._first(owner))
            )
            self._texts[owner] = text
        step = max(int(STEP_S / self._token_s), MIN_CHUNK) if self._token_s else MIN_CHUNK
        at = text.start + text.n
        part = ids[at : min(at + min(step, self.engine.max_tokens), len(ids) - 1)]
        if not part or max(part) >= self._n_vocab:
            return
        began = self._now()
        try:
            self._read(owner, text, part)
        except ContextFullError:  # no free pages
            self._texts.pop(owner).seq.close()
        else:
            text.n += len(part)
            self._token_s = (self._now() - began) / len(part)

    def draft_ids(self, wanted: Mapping[K, tuple[Seq[int], int]]) -> dict[K, list[int]]:
        """Return draft ids for each owner, greedily chosen; maybe fewer than wanted, or none.
        ``wanted``: its ids and number of draft tokens for each owner; ``can_draft`` is true of all.
        """
        result: dict[K, list[int]] = {owner: [] for owner in wanted}
        try:
            for i in range(max((n for _, n in wanted.values()), default=0)):
                if not self._write_next(wanted, result, i):
                    break
        finally:
            for seq in self._forks.values():
                seq.close()
            self._forks.clear()
        return result

    def _write_next(
        self, wanted: Mapping[K, tuple[Seq[int], int]], result: dict[K, list[int]], i: int
    ) -> bool:
        """Draft the ``i``-th id of each text that wants one, and append it to its entry of
        ``result``. Return whether there can be another. ``wanted``: as in ``draft_ids``.
        """
        going = [owner for owner, (_, n) in wanted.items() if n > i and len(result[owner]) == i]
        if not going:
            return False
        began = self._now()
        try:
            parts = [self._part(owner, wanted[owner][0], result[owner]) for owner in going]
            if sum(len(part.ids) for part in parts) > self.engine.max_tokens:
                return False
            rows = self._sample(going, parts)
        except ContextFullError:  # no free pages
            return False
        if all(len(part.ids) == 1 for part in parts):
            self._steps.note(len(parts), self._now() - began)
        for owner, row in zip(going, rows, strict=True):
            assert row.top is not None
            token = self.token_of(row.top.first[1])
            if 0 <= token < self._n_vocab:
                result[owner].append(token)
        return True

    def token_of(self, row: int) -> int:
        """Return the target model's id of the token that has the index ``row`` in the drafter's
        vocabulary (a row of its output matrix).
        """
        return row

    def _first(self, owner: Hashable) -> int:
        """Return the index of the first token at which the drafter's sequence may start."""
        return 0

    def _read(self, owner: Hashable, text: DraftSequence, ids: Seq[int]) -> None:
        """Run the engine on ``ids``, the next ones of the request ``owner``, to prefill its
        sequence ``text``.
        """
        self.engine.run([BatchItem(text.seq, ids, 0)])

    def _sample(self, owners: Seq[Hashable], parts: list[BatchItem]) -> LogitsBatch:
        """Run ``parts``, one for each of ``owners``, and return their logits."""
        return self.engine.sample(parts, self.own_observer)

    def _part(self, owner: Hashable, ids: Seq[int], behind: list[int]) -> BatchItem:
        text = self._texts[owner]
        if behind and self.engine.cache.states:
            if owner not in self._forks:
                self._forks[owner] = self.engine.cache.fork(text.seq)
                self._forks[owner].is_unshared = True
            return BatchItem(self._forks[owner], behind[-1:], 1, (ARGMAX_QUERY,))
        text.seq.n_drafted = len(behind)  # drafted tokens must not enter the prefix cache
        return BatchItem(text.seq, behind[-1:] or ids[text.start + text.n :], 1, (ARGMAX_QUERY,))

    def _now(self) -> float:
        """Return the seconds of the clock, less those spent on kernel compilation."""
        return self._clock() - self.engine.kernels.seconds

    def close(self) -> None:
        """Close the second model's engine and file."""
        self.keep_only(())
        self.engine.close()
        self.engine.gguf.close()


def check_vocabularies(model: GGUF, draft: GGUF) -> None:
    """Raise UnsupportedError, which names the first difference, if an id stands for different
    tokens in the two files. Tokens that only the longer vocabulary has must be marked unused
    (padding). If neither file has a vocabulary, nothing is compared.
    """
    lacking = [file for file in (model, draft) if not has_vocabulary(file)]
    if len(lacking) == 2:
        return
    if lacking:
        raise UnsupportedError(
            f"{draft.path}: drafts for {model.path} need its vocabulary, but {lacking[0].path} "
            "has none"
        )
    a = Vocab(model)
    b = Vocab(draft)
    n = min(a.n, b.n)
    for id, (own, other) in enumerate(zip(a.tokens, b.tokens, strict=False)):
        if own != other:
            raise UnsupportedError(
                f"{draft.path}: drafts for {model.path} need its vocabulary: token {id} is "
                f"{other!r:.60}, expected {own!r:.60}"
            )
    longer = a if a.n > n else b
    used = [id for id in range(n, longer.n) if longer.types[id] != TokenType.UNUSED]
    if used:
        raise UnsupportedError(
            f"{draft.path}: drafts for {model.path} need its vocabulary ({a.n} and {b.n} tokens): "
            f"only {longer.path} has token {used[0]}, {longer.tokens[used[0]]!r:.60}"
        )


def drafter_engine(engine: Engine, gguf: GGUF, config: Config, n_ctx: int) -> Engine:
    """Return an engine for a drafter's file ``gguf``, on the device of ``engine``, with that
    engine's KV format, cache size and number of sequences, and a context of ``n_ctx`` tokens. A
    drafter with recurrent states gets twice as many sequences, for forks.
    """
    cache = engine.cache
    has_states = any(
        isinstance(pool, StateSpec) for pool in GRAPHS[config.arch.graph].pools(config)
    )
    return Engine(
        gguf,
        config,
        engine.device,
        n_ctx=n_ctx,
        kv=cache.kv,
        n_sequences=cache.n_sequences * (1 + has_states),
        kv_tokens=cache.kv_tokens,
    )


def open_drafter(draft: GGUF, config: Config, engine: Engine) -> Drafter:
    """Return a drafter for ``engine``, on its device. Raises UnsupportedError if ``draft`` cannot
    roll back to an earlier token, has another vocabulary, or has no logits.
    """
    check_vocabularies(engine.gguf, draft)
    if "logits" not in GRAPHS[config.arch.graph].outputs:
        raise UnsupportedError(
            f"{draft.path}: {config.arch.name} has no logits output, so it cannot draft"
        )
    made = drafter_engine(engine, draft, config, min(engine.n_ctx, config.n_ctx_train))
    if made.cache.states:
        raise UnsupportedError(
            f"{draft.path}: cannot draft: layers of {config.arch.name} keep a recurrent state, "
            "which cannot be rolled back"
        )
    return Drafter(made, engine.config.n_vocab)
