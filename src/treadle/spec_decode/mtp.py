"""Drafter with a model's own MTP layer, which predicts the token after the next one.

The layer follows the model's last one. Its input is the model's hidden state of each token after
the last layer, and the next token. So it can draft for a request only from the first token that the
model ran with the layer loaded; for a cached prefix, from the first new token on. Less context
makes drafts worse, never the output: drafts are checked.
"""

from __future__ import annotations

from collections.abc import Collection, Hashable
from collections.abc import Sequence as Ids
from typing import TYPE_CHECKING, Any
from weakref import WeakKeyDictionary

import numpy as np

from treadle.engine.batch import BatchItem
from treadle.engine.engine import Engine
from treadle.models.graphs.nextn import GIVEN, nextn_model
from treadle.spec_decode.draft_model import Drafter, DraftSequence

if TYPE_CHECKING:
    from treadle.engine.logits import LogitsBatch
    from treadle.engine.prepared_plan import PreparedPlan
    from treadle.kvcache.cache import Sequence

KEPT = 512  # hidden states kept per request until processed
AHEAD = "ahead"


class HiddenStates:
    """The model's hidden states of a request's tokens from ``start`` on, f32 ``[n, n_embd]``, with
    the token ids.
    """

    def __init__(self) -> None:
        self.start = 0
        self.ids = list[int]()
        self.rows = np.zeros((0, 0), np.float32)

    @property
    def end(self) -> int:
        return self.start + len(self.ids)

    def put(self, at: int, ids: Ids[int], rows: np.ndarray) -> None:
        """Store the states of ``ids``, which the model ran at positions ``at`` and up."""
        keep = min(max(at - self.start, 0), len(self.ids))
        if not keep or at > self.end:
            self.start = at
            self.ids = list(ids)
            self.rows = rows.copy()
        else:
            self.ids[keep:] = ids
            self.rows = np.concatenate([self.rows[:keep], rows])
        self.drop(self.end - KEPT)

    def drop(self, before: int) -> None:
        """Drop the states of tokens before position ``before``."""
        n = max(before - self.start, 0)
        self.start = self.start + n
        self.ids = self.ids[n:]
        self.rows = self.rows[n:]

    def settle(self, ids: Ids[int]) -> None:
        """Drop states from the first token that differs from the request's."""
        mine = self.ids
        its = ids[self.start : self.end]
        pairs = enumerate(zip(mine, its, strict=False))
        n = next((i for i, (a, b) in pairs if a != b), len(its))
        del mine[n:]
        self.rows = self.rows[:n]


class NextnEngine(Engine):
    """Engine of the MTP layer. ``given``: the next run's hidden states, f32 ``[n, n_embd]``."""

    given: np.ndarray

    def _walk(self, ready: PreparedPlan, times: Any = None, *, stoppable: bool = False) -> bool:
        buffer = ready.plan.takes[GIVEN]
        width = self.config.n_embd
        rows = np.zeros((len(self.given), buffer.row_bytes // 4), np.float32)
        rows[:, width : 2 * width] = self.given
        ready.arena.write(ready.plan.offsets[buffer], rows.reshape(-1).view(np.uint8))
        return super()._walk(ready, times, stoppable=stoppable)


class NextnDrafter(Drafter):
    """MTP drafter for ``engine``. Owners have one of its sequences, ``seq``."""

    engine: NextnEngine

    def __init__(self, made: NextnEngine, engine: Engine, **given: Any) -> None:
        super().__init__(made, engine.config.n_vocab, **given)
        self._before = _share(made, engine)
        self._states: WeakKeyDictionary[Sequence, HiddenStates] = WeakKeyDictionary()
        self._last: dict[Hashable, np.ndarray] = {}  # the layer's own states of drafted tokens
        self._model = engine
        engine.sampled = AHEAD
        engine.watch = self._seen
        made.sampled = AHEAD
        made.watch = self._own
        self._rows = np.zeros((0, 0), np.float32)

    def _seen(self, parts: Ids[BatchItem], ready: PreparedPlan) -> None:
        rows = self._states_of(ready)
        row = 0
        for seq, ids, *_ in parts:
            end = row + len(ids)
            states = self._states.setdefault(seq, HiddenStates())
            start = len(seq) - len(ids)
            states.put(start, ids, rows[row:end])
            # The layer embeds tokens by id, so it cannot read pictures: it begins after the last.
            media = self._model.media
            if media.any_in(ids):
                *_, (_, behind, _, _) = media.runs_in(ids)
                states.drop(start + behind)
            row = end

    def _own(self, parts: Ids[BatchItem], ready: PreparedPlan) -> None:
        self._rows = self._states_of(ready).copy()

    def _states_of(self, ready: PreparedPlan) -> np.ndarray:
        buffer = ready.plan.outputs[AHEAD]
        n = ready.run["n_tokens"]
        return ready.rows(buffer, n, self.engine.config.n_embd)

    # -- sequences are shifted by one: token i is paired with the hidden state of token i - 1 ------

    def keep(self, owners: Collection[Any]) -> None:
        """See ``Drafter``."""
        super().keep(owners)
        seqs = {id(owner.seq) for owner in owners}
        for seq in [seq for seq in self._states if id(seq) not in seqs]:
            del self._states[seq]

    def knows(self, owner: Any, ids: Ids[int]) -> bool:
        """See ``Drafter``."""
        return self._settle(owner, ids) and super().knows(owner, ids[1:])

    def read(self, owner: Any, ids: Ids[int], within_s: float) -> None:
        """See ``Drafter``."""
        if self._settle(owner, ids):
            super().read(owner, ids[1:], within_s)

    def write(self, wanted: Any) -> Any:
        """See ``Drafter``."""
        self._last.clear()
        result = super().write({owner: (ids[1:], n) for owner, (ids, n) in wanted.items()})
        # drafted tokens are recomputed with the model's own states
        for owner, (ids, _) in wanted.items():
            text = self._texts[owner]
            text.n = min(len(ids) - 1 - text.start, len(text.seq))
            text.seq.n_drafted = 0
            self.engine.cache.truncate(text.seq, text.n)
        return result

    def _settle(self, owner: Any, ids: Ids[int]) -> bool:
        """Whether the states reach the last token but one. Drop the drafter's sequence if its next
        token precedes them.
        """
        states = self._states.get(owner.seq)
        text = self._texts.get(owner)
        if states is None:
            return False
        states.settle(ids)
        if states.end < len(ids) - 1 or not states.ids:
            return False
        if text is not None:
            text.settle(ids[1:])
            if text.start + text.n < states.start:
                self._texts.pop(owner).seq.close()
            else:
                states.drop(text.start + text.n)
        return True

    def _first(self, owner: Any) -> int:
        return self._states[owner.seq].start

    def _read(self, owner: Any, text: DraftSequence, ids: Ids[int]) -> None:
        self.engine.given = self._between(owner, text.start + text.n, len(ids))
        super()._read(owner, text, ids)

    def _sample(self, owners: Ids[Any], parts: list[BatchItem]) -> LogitsBatch:
        given = []
        for owner, part in zip(owners, parts, strict=True):
            if owner in self._last:
                given.append(self._last[owner])
            else:
                text = self._texts[owner]
                given.append(self._between(owner, text.start + text.n, len(part.ids)))
        self.engine.given = np.concatenate(given)
        rows = super()._sample(owners, parts)
        end = 0
        for owner, part in zip(owners, parts, strict=True):
            end += len(part.ids)
            self._last[owner] = self._rows[end - 1 : end]
        return rows

    def _between(self, owner: Any, at: int, n: int) -> np.ndarray:
        states = self._states[owner.seq]
        return states.rows[at - states.start :][:n]

    def close(self) -> None:
        """Close the layer's engine; the model's file stays open."""
        self.keep(())
        self.engine.close()
        self.engine.gguf.tensors = {}
        self._model.sampled = "logits"
        self._model.watch = None


def _share(made: Engine, engine: Engine) -> float:
    """The layer's bytes as a share of those that a step of the model reads."""
    n = sum(tensor.n_bytes for tensor in made.gguf.tensors.values())
    return min(n / max(sum(tensor.n_bytes for tensor in engine.gguf.tensors.values()), 1), 1.0)


def open_nextn(engine: Engine) -> NextnDrafter:
    """Return a drafter of the file's own MTP layer, on the device of ``engine``. Raises FileError
    if a tensor of the layer is missing or has another shape.
    """
    gguf, config = nextn_model(engine.gguf, engine.config)
    cache = engine.cache
    made = NextnEngine(
        gguf,
        config,
        engine.device,
        n_ctx=engine.n_ctx,
        kv=cache.kv,
        n_sequences=cache.n_sequences,
        kv_tokens=cache.kv_tokens,
    )
    return NextnDrafter(made, engine)
