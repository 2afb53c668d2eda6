"""Drafter with a model's own MTP layer, which predicts the token after the next one.

The layer follows the model's last one. Its input is the model's hidden state of each token after
the last layer, and the next token. So it can draft for a request only from the first token that the
model ran with the layer loaded; for a cached prefix, from the first new token on. Less context
makes drafts worse, never the output: drafts are checked.
"""

from __future__ import annotations

from collections.abc import Collection, Hashable
from collections.abc import Sequence as Seq
from typing import TYPE_CHECKING, Any, ClassVar
from weakref import WeakKeyDictionary

import numpy as np

from treadle.engine.batch import BatchItem
from treadle.engine.engine import EngineObserver
from treadle.errors import UnsupportedError
from treadle.models.graphs.nextn import GIVEN, nextn_model, with_target_tensors
from treadle.spec_decode.draft_model import (
    Drafter,
    DraftSequence,
    check_vocabularies,
    drafter_engine,
)
from treadle.tokenizer.vocab import has_vocabulary

if TYPE_CHECKING:
    from treadle.engine.engine import Engine
    from treadle.engine.logits import LogitsBatch
    from treadle.engine.prepared_plan import PreparedPlan
    from treadle.files.gguf import GGUF
    from treadle.kvcache.cache import Sequence
    from treadle.kvcache.media import MediaRegistry

MAX_STATES = 512  # hidden states kept per request until processed
AHEAD = "ahead"


class HiddenStates:
    """The model's hidden states of a request's tokens from ``start`` on, f32 ``[n, n_embd]``, with
    the token ids.
    """

    def __init__(self) -> None:
        self.start = 0
        self.ids = list[int]()
        self._memory = np.zeros((0, 0), np.float32)  # with room before and behind the rows
        self._first = 0  # the row there of the first token

    @property
    def rows(self) -> np.ndarray:
        """The states: a view, until the next ``put``."""
        return self._memory[self._first : self._first + len(self.ids)]

    @property
    def end(self) -> int:
        return self.start + len(self.ids)

    def put(self, at: int, ids: Seq[int], rows: np.ndarray) -> None:
        """Store the states ``rows`` of ``ids``, which the model ran at position ``at`` and the
        following ones, in place of any from there on. Only the last MAX_STATES are kept.
        """
        more = max(len(ids) - MAX_STATES, 0)
        keep = 0 if more else min(max(at - self.start, 0), len(self.ids))
        if not keep or at > self.end:
            keep = 0
            self.start = at + more
        rows = rows[more:]
        self._make_room(keep, *rows.shape)
        first = self._first + keep
        self._memory[first : first + len(rows)] = rows
        self.ids[keep:] = ids[more:]
        self.drop(self.end - MAX_STATES)

    def _make_room(self, keep: int, n: int, width: int) -> None:
        """Make room for ``n`` rows of ``width`` values after the first ``keep`` rows: move rows to
        the front, or to larger memory. Rows thus move rarely when a sequence grows by single
        tokens.
        """
        room, wide = self._memory.shape
        if width == wide and self._first + keep + n <= room:
            return
        to = self._memory
        if width != wide or 2 * (keep + n) > room:
            to = np.empty((2 * (keep + n), width), np.float32)
        if keep:
            to[:keep] = self._memory[self._first : self._first + keep].copy()
        self._memory = to
        self._first = 0

    def drop(self, before: int) -> None:
        """Drop the states of tokens before position ``before``."""
        n = max(before - self.start, 0)
        self.start = self.start + n
        self._first += min(n, len(self.ids))
        self.ids = self.ids[n:]

    def drop_rejected(self, ids: Seq[int]) -> None:
        """Drop the states from the first token on that differs from ``ids``, the request's."""
        mine = self.ids
        its = ids[self.start : self.end]
        pairs = enumerate(zip(mine, its, strict=False))
        n = next((i for i, (a, b) in pairs if a != b), len(its))
        del mine[n:]


class ModelStates(EngineObserver):
    """Keeps the model's hidden states, ``states``: a ``HiddenStates`` by sequence. ``n_embd``: the
    width of a state. States up to the last picture are dropped: an MTP layer embeds tokens by id,
    so it cannot read rows of ``media``.
    """

    output = AHEAD

    def __init__(self, n_embd: int, media: MediaRegistry) -> None:
        self._media = media
        self.states: WeakKeyDictionary[Sequence, HiddenStates] = WeakKeyDictionary()
        self._n_embd = n_embd

    def keep_only(self, owners: Collection[Any]) -> None:
        """Drop the states of all sequences but those of ``owners``."""
        seqs = {id(owner.seq) for owner in owners}
        for seq in [seq for seq in self.states if id(seq) not in seqs]:
            del self.states[seq]

    def rows_of(self, ready: PreparedPlan) -> np.ndarray:
        """Return the states of a run's tokens, f32 ``[n, width]``; maybe in the plan's memory."""
        return _states_of(ready, self._n_embd)

    def after_run(self, parts: Seq[BatchItem], ready: PreparedPlan) -> None:
        """Append the states of the run's tokens to those of their sequences, in ``states``."""
        rows = self.rows_of(ready)
        row = 0
        for seq, ids, *_ in parts:
            end = row + len(ids)
            states = self.states.setdefault(seq, HiddenStates())
            start = len(seq) - len(ids)
            states.put(start, ids, rows[row:end])
            if self._media.any_in(ids):
                *_, (_, behind, _, _) = self._media.runs_in(ids)
                states.drop(start + behind)
            row = end


class LayerStates(EngineObserver):
    """Writes hidden states, ``given``, f32 ``[n, width]``, into the MTP layer's input, from column
    ``column`` on. Keeps from the run the layer's own states of its tokens, ``rows``, same shape.
    """

    output = AHEAD

    def __init__(self, width: int, column: int) -> None:
        self.given = np.zeros((0, width), np.float32)
        self.rows = np.zeros((0, width), np.float32)
        self._width = width
        self._column = column

    def before_run(self, ready: PreparedPlan) -> None:
        """Write the rows ``given`` into the plan's input, and zeros into its other columns."""
        ready.write(GIVEN, self.given, self._column)

    def after_run(self, parts: Seq[BatchItem], ready: PreparedPlan) -> None:
        """Copy the MTP layer's states of the run's tokens from the plan's memory to ``rows``."""
        self.rows = _states_of(ready, self._width).copy()


def _states_of(ready: PreparedPlan, n_embd: int) -> np.ndarray:
    """Return the hidden states of a run's tokens, f32 ``[n, n_embd]``, in the plan's memory."""
    return ready.rows(ready.plan.outputs[AHEAD], ready.run["n_tokens"], n_embd)


class StatesDrafter(Drafter):
    """Base of drafters that read the model's hidden states, which ``observer`` keeps. ``made`` is
    the drafter's engine. An owner is a request, whose ``seq`` is its sequence in ``engine``.

    ``shift``: index of the request's token that is token 0 for the drafter. The drafter's token i
    is paired with the state of the request's token i.
    """

    shift: ClassVar[int] = 0
    observer: ModelStates

    def __init__(self, made: Engine, engine: Engine, observer: ModelStates, **given: Any) -> None:
        super().__init__(made, engine.config.n_vocab, **given)
        self._cost_share = share_of(made, engine)
        self.observer = observer
        self._states = observer.states
        self._tokens: np.ndarray | None = None  # the model's token of each row of logits

    def keep_only(self, owners: Collection[Any]) -> None:
        """Drop the drafter's sequences, and the model's hidden states, of all other owners."""
        super().keep_only(owners)
        self.observer.keep_only(owners)

    def can_draft(self, owner: Any, ids: Seq[int]) -> bool:
        """Return whether the model's states reach the last id but one, and the drafter has read all
        but at most the last MIN_CHUNK ids.
        """
        return self._settle(owner, ids) and super().can_draft(owner, ids[self.shift :])

    def prefill_chunk(self, owner: Any, ids: Seq[int], within_s: float) -> None:
        """Read a chunk of the missing ids with their states; none if states are missing. See
        ``Drafter.prefill_chunk``.
        """
        if self._settle(owner, ids):
            super().prefill_chunk(owner, ids[self.shift :], within_s)

    def token_of(self, row: int) -> int:
        """Return the model's token for a row of the drafter's logits, whose vocabulary may be a
        part of the model's.
        """
        return row if self._tokens is None or row < 0 else int(self._tokens[row])

    def _settle(self, owner: Any, ids: Seq[int]) -> bool:
        """Return whether the model's hidden states for ``owner``, whose tokens are ``ids``, reach
        the last token but one.

        First drop the states of rejected tokens, and those that the drafter has already read. If
        the state of the next token that the drafter must read is gone, close the drafter's
        sequence.
        """
        states = self._states.get(owner.seq)
        text = self._texts.get(owner)
        if states is None:
            return False
        states.drop_rejected(ids)
        if states.end < len(ids) - 1 or (self.shift and not states.ids):
            return False
        if text is not None:
            text.drop_rejected(ids[self.shift :])
            if text.start + text.n < states.start:
                self._texts.pop(owner).seq.close()
            else:
                states.drop(text.start + text.n)
        return True

    def _first(self, owner: Any) -> int:
        return self._states[owner.seq].start

    def _between(self, owner: Any, at: int, n: int) -> np.ndarray:
        states = self._states[owner.seq]
        return states.rows[at - states.start :][:n]


class NextnDrafter(StatesDrafter):
    """MTP drafter for ``engine``. Its layer pairs token i with the state of token i - 1."""

    shift = 1
    own_observer: LayerStates

    def __init__(
        self, made: Engine, engine: Engine, observer: ModelStates | None = None, **given: Any
    ) -> None:
        n_embd = made.config.n_embd
        of_streams = made.config.arch.nextn == "streams"
        width = n_embd * made.config.n_streams if of_streams else n_embd
        observer = observer or ModelStates(width, engine.media)
        super().__init__(made, engine, observer, **given)
        self.own_observer = LayerStates(width, 0 if of_streams else n_embd)
        self._last: dict[Hashable, np.ndarray] = {}  # the layer's own states of drafted tokens

    def draft_ids(self, wanted: Any) -> Any:
        """Draft with the model's states for the first token and the layer's own for the others;
        then drop the drafted tokens from the layer's sequences. Arguments and result are those of
        ``Drafter.draft_ids``.
        """
        self._last.clear()
        result = super().draft_ids({owner: (ids[1:], n) for owner, (ids, n) in wanted.items()})
        # drafted tokens are recomputed with the model's own states
        for owner, (ids, _) in wanted.items():
            text = self._texts[owner]
            text.n = min(len(ids) - 1 - text.start, len(text.seq))
            text.seq.n_drafted = 0
            self.engine.cache.truncate(text.seq, text.n)
        return result

    def set_inputs(self, owners: Seq[Hashable], given: np.ndarray) -> None:
        """Set the hidden states that the next run reads, f32 ``[n, width]``. ``owners``: the
        requests of a run that drafts, all at the same draft position; empty for a run that only
        prefills.
        """
        self.own_observer.given = given

    def _read(self, owner: Any, text: DraftSequence, ids: Seq[int]) -> None:
        self.set_inputs((), self._between(owner, text.start + text.n, len(ids)))
        self.engine.sample([BatchItem(text.seq, ids, 0)], self.own_observer)

    def _sample(self, owners: Seq[Any], parts: list[BatchItem]) -> LogitsBatch:
        given = []
        for owner, part in zip(owners, parts, strict=True):
            if owner in self._last:
                given.append(self._last[owner])
            else:
                text = self._texts[owner]
                given.append(self._between(owner, text.start + text.n, len(part.ids)))
        self.set_inputs(owners, np.concatenate(given))
        rows = super()._sample(owners, parts)
        end = 0
        for owner, part in zip(owners, parts, strict=True):
            end += len(part.ids)
            self._last[owner] = self.own_observer.rows[end - 1 : end]
        return rows

    def close(self) -> None:
        """Close the layer's engine; the model's file stays open."""
        self.keep_only(())
        self.engine.close()
        self.engine.gguf.tensors = {}


class NextnFileDrafter(NextnDrafter):
    """MTP drafter whose layer is in a file of its own."""

    def close(self) -> None:
        """Close the layer's engine and its file; the model's file stays open."""
        gguf = self.engine.gguf
        super().close()
        gguf.close()


def share_of(made: Engine, engine: Engine) -> float:
    """Return the bytes of the drafter's tensors as a share of the model's, at most 1: an estimate
    of a draft step's time, as a share of a model step's.
    """
    n = sum(tensor.n_bytes for tensor in made.gguf.tensors.values())
    return min(n / max(sum(tensor.n_bytes for tensor in engine.gguf.tensors.values()), 1), 1.0)


def open_nextn_file(draft: GGUF, engine: Engine) -> NextnFileDrafter:
    """Return a drafter of the MTP layer in a file of such layers alone, on the device of
    ``engine``.

    Raises UnsupportedError if it cannot draft for this model, FileError if a tensor is missing or
    has another shape.
    """
    whole = with_target_tensors(draft, engine.gguf, engine.config)
    if has_vocabulary(draft):
        check_vocabularies(engine.gguf, draft)
    if not engine.has_states:
        what = "drafts from the model's states, which are in another process"
        raise UnsupportedError(f"{draft.path}: its MTP layer {what}")
    gguf, config = nextn_model(whole, engine.config)
    return NextnFileDrafter(drafter_engine(engine, gguf, config, engine.n_ctx), engine)


def open_nextn(engine: Engine) -> NextnDrafter:
    """Return a drafter of the file's own MTP layer, on the device of ``engine``. Raises FileError
    if a tensor of the layer is missing or has another shape.
    """
    gguf, config = nextn_model(engine.gguf, engine.config)
    return NextnDrafter(drafter_engine(engine, gguf, config, engine.n_ctx), engine)
