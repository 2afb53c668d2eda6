"""Drafter with a DFlash model: one run predicts a block of tokens, from keys and values that are
made of the model's states.

It can draft for a request only from the first token that the model ran while it was loaded, as an
MTP layer. With a Markov head (DSpark) or a selector (DFlash 2, ``selector.py``) each token of the
block is chosen by the one before.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from collections.abc import Sequence as Seq
from itertools import islice
from typing import TYPE_CHECKING, Any

import numpy as np

from treadle.engine.batch import BatchItem
from treadle.engine.engine import OUTPUTS, Engine
from treadle.engine.logits import LogitsQuery
from treadle.errors import ContextFullError
from treadle.models.drafters.dflash import BASE, KEYS, MARKOV, SELECTOR_VECTORS
from treadle.models.drafters.target import FEATURES, tokens_of
from treadle.spec_decode.draft_model import (
    ARGMAX_QUERY,
    MIN_CHUNK,
    DraftSequence,
    K,
    drafter_engine,
)
from treadle.spec_decode.mtp import StatesDrafter
from treadle.spec_decode.selector import CandidateSelector
from treadle.spec_decode.tapped import GivenRows, TappedStates, bind_target

if TYPE_CHECKING:
    from treadle.engine.logits import LogitsRow
    from treadle.files.gguf import GGUF
    from treadle.models.config import Config


class BlockDrafter(StatesDrafter):
    """Drafts blocks of tokens for ``engine`` with the drafter's engine ``made``. An owner is a
    request, whose ``seq`` is its sequence in ``engine``; the drafter's own sequence of it holds the
    tokens whose states the drafter has read.
    """

    def __init__(self, made: Engine, engine: Engine, **given: Any) -> None:
        config = made.config
        assert config.draft is not None
        observer = TappedStates(config.draft.layers, config.n_target, engine.media)
        super().__init__(made, engine, observer, **given)
        self._traits = config.draft
        self._most = min(config.draft.n_block, MIN_CHUNK) - (not config.draft.anchored)
        self._keys = GivenRows(KEYS, FEATURES)
        self._base = GivenRows(MARKOV, BASE)
        self._tokens = tokens_of(made.gguf, self._n_vocab)
        rank = self._traits.n_selector
        self._selector = CandidateSelector(made.gguf, rank) if rank else None

    @property
    def outputs(self) -> tuple[str, ...]:
        """Names of the graph outputs that the drafter's plans compute: the logits, and the keys and
        values; with a Markov head its logits, too; with a selector what it reads in place of the
        logits alone.
        """
        if self._traits.n_selector:
            return SELECTOR_VECTORS, KEYS
        return "logits", KEYS, *((MARKOV,) if self._traits.n_markov else ())

    def seconds(self, n_texts: int, n_ids: int, step_s: float) -> float:
        """Return the predicted seconds of one run that drafts ``n_ids`` tokens for each of
        ``n_texts`` requests; before the first measurement, a share of the model's step time
        ``step_s``.
        """
        if not self._steps:
            return self._cost_share * step_s
        return self._steps.predicted(n_texts * n_ids)

    def draft_ids(self, wanted: Mapping[K, tuple[Seq[int], int]]) -> dict[K, list[int]]:
        """Draft one block per owner, cut to its number of tokens and to the room of one run; see
        ``Drafter.draft_ids``.
        """
        result: dict[K, list[int]] = {owner: [] for owner in wanted}
        lengths: dict[K, int] = {}
        room = min(OUTPUTS, self.engine.max_tokens // 2)
        for owner, (_, n) in wanted.items():
            length = min(n, self._most)
            if 0 < length <= room:
                lengths[owner] = length
                room -= length + 1
        if not lengths:
            return result
        began = self._now()
        try:
            self._catch_up({owner: wanted[owner][0] for owner in lengths})
            made = self._draft({owner: wanted[owner][0][-1] for owner in lengths}, lengths)
        except ContextFullError:  # no free pages
            return result
        finally:
            for owner in lengths:
                self._drop_block(self._texts[owner])
        self._steps.note(sum(lengths.values()), self._now() - began)
        for owner, rows in made.items():
            tokens = map(self.token_of, rows)
            result[owner] = [token for token in tokens if 0 <= token < self._n_vocab]
        return result

    def _catch_up(self, texts: Mapping[K, Seq[int]]) -> None:
        """Let the drafter read the model's states of all ids but the last of each text, in as many
        runs as it takes. ``texts``: ids by owner.
        """
        left = []
        for owner, ids in texts.items():
            text = self._texts[owner]
            if text.start + text.n < len(ids) - 1:
                left.append(owner)
        while left:
            parts = []
            given = []
            room = self.engine.max_tokens
            while left and room:
                text = self._texts[left[-1]]
                at = text.start + text.n
                part = texts[left[-1]][at:-1][:room]
                parts.append(BatchItem(text.seq, part, 0))
                given.append(self._between(left[-1], at, len(part)))
                room -= len(part)
                text.n += len(part)
                if at + len(part) == len(texts[left[-1]]) - 1:
                    left.pop()
            self._keys.given = np.concatenate(given)
            self.engine.observe(parts, self._keys)

    def _draft(self, last: Mapping[K, int], lengths: Mapping[K, int]) -> dict[K, list[int]]:
        """Run one block per owner: its ``last`` id, then mask tokens. Return, for each owner, the
        indices of the tokens' logits at ``lengths[owner]`` positions: those of the largest logits,
        or those that the Markov head or the selector chooses.
        """
        traits = self._traits
        look = LogitsQuery() if traits.n_candidates else ARGMAX_QUERY
        parts = []
        for owner, n in lengths.items():
            text = self._texts[owner]
            block = [last[owner], *[traits.mask] * (n - traits.anchored)]
            text.seq.n_drafted = len(block)
            parts.append(BatchItem(text.seq, block, n, (look,)))
        if self._selector is not None:
            rows = iter(self.engine.sample(parts, self._selector))
            return self._selected(self._selector, last, lengths, rows)
        rows = iter(self.engine.sample(parts))
        if not traits.n_markov:
            return {owner: [_first(next(rows)) for _ in range(n)] for owner, n in lengths.items()}
        base = {o: [next(rows).logits().copy() for _ in range(n)] for o, n in lengths.items()}
        return self._chained(last, base)

    def _selected(
        self,
        selector: CandidateSelector,
        last: Mapping[K, int],
        lengths: Mapping[K, int],
        rows: Iterator[LogitsRow],
    ) -> dict[K, list[int]]:
        """Choose each block's tokens one after another among the largest logits of each position,
        by the token before. ``rows``: logits of all positions, block by block. Return the index of
        each token in its row, by owner.
        """
        result: dict[K, list[int]] = {owner: [] for owner in lengths}
        at = 0
        for owner, n in lengths.items():
            before = last[owner]
            for row in islice(rows, n):
                assert row.top is not None
                values = row.top.values[: self._traits.n_candidates]
                ids = row.top.ids[: np.count_nonzero(values > -np.inf) or 1].tolist()
                tokens = [self.token_of(i) for i in ids]
                best = selector.choose(before, at, tokens, values[: len(ids)])
                result[owner].append(ids[best])
                before = tokens[best]
                at += 1
        return result

    def _chained(
        self, last: Mapping[K, int], base: Mapping[K, list[np.ndarray]]
    ) -> dict[K, list[int]]:
        """Choose each block's tokens one after another: to the ``base`` logits of each position add
        the Markov head's bias for the token before, at first the owner's ``last`` id. Return the
        indices of the largest sums, by owner.
        """
        result: dict[K, list[int]] = {owner: [] for owner in base}
        before = dict(last)
        for i in range(max(map(len, base.values()))):
            going = [owner for owner, rows in base.items() if i < len(rows)]
            parts = []
            for owner in going:
                text = self._texts[owner]
                text.seq.n_drafted += 1
                parts.append(BatchItem(text.seq, [before[owner]], 1, (ARGMAX_QUERY,)))
            self._base.given = np.stack([base[owner][i] for owner in going])
            for owner, row in zip(going, self.engine.sample(parts, self._base), strict=True):
                result[owner].append(_first(row))
                before[owner] = max(self.token_of(result[owner][-1]), 0)
        return result

    def _drop_block(self, text: DraftSequence) -> None:
        """Drop the drafted block from the drafter's sequence."""
        text.seq.n_drafted = 0
        if len(text.seq) > text.n:
            self.engine.cache.truncate(text.seq, text.n)

    def _read(self, owner: Any, text: DraftSequence, ids: Seq[int]) -> None:
        self._keys.given = self._between(owner, text.start + text.n, len(ids))
        self.engine.observe([BatchItem(text.seq, ids, 0)], self._keys)


def _first(row: Any) -> int:
    """Return the index of a row's largest logit."""
    assert row.top is not None
    return int(row.top.first[1])


def open_dflash(draft: GGUF, config: Config, engine: Engine) -> BlockDrafter:
    """Return a drafter for ``engine``, on its device. Raises UnsupportedError if ``draft`` was made
    for another model, FileError if it names tokens that the model does not have.
    """
    gguf, config = bind_target(draft, config, engine)
    tokens_of(gguf, engine.config.n_vocab)
    n_ctx = min(engine.n_ctx, config.n_ctx_train)
    return BlockDrafter(drafter_engine(engine, gguf, config, n_ctx), engine)
