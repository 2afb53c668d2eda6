"""Front engine of a pipeline: it recomputes the KV cache after the loss of a stage."""

from __future__ import annotations

import weakref
from collections.abc import Callable
from collections.abc import Sequence as Seq
from typing import TYPE_CHECKING, Any, ClassVar, TypeVar

from treadle.base.interrupts import interrupts_held
from treadle.distributed.stages.pipeline import Pipeline, StageLostError
from treadle.engine.batch import BatchItem
from treadle.engine.engine import Engine
from treadle.errors import UnsupportedError
from treadle.kvcache.cache import KVCache, Sequence

if TYPE_CHECKING:
    from treadle.kvcache.prefix_tree import Lora
    from treadle.models.control_vector import ControlVector
    from treadle.models.lora import Adapter

TRIES = 3  # of one run, before its error is raised
T = TypeVar("T")


class LiveCache(KVCache):
    """KV cache that records every sequence that is in use, in ``live``."""

    def __init__(self, *args: Any, **settings: Any) -> None:
        self.live: weakref.WeakSet[Sequence] = weakref.WeakSet()
        super().__init__(*args, **settings)

    def sequence(self, ids: Seq[int] = (), lora: Lora | None = None) -> Sequence:
        """Return a new sequence with the longest cached prefix of ``ids``, and record it."""
        result = super().sequence(ids, lora)
        self.live.add(result)
        return result

    def fork(self, seq: Sequence) -> Sequence:
        """Return a second sequence that shares the pages of ``seq``, and record it."""
        result = super().fork(seq)
        self.live.add(result)
        return result

    def drop_all(self) -> list[tuple[Sequence, list[int]]]:
        """Empty every sequence in use and forget all cached prefixes. Return the sequences that had
        tokens, each with their ids.
        """
        self.revive().close()
        held = [(seq, list(seq.ids)) for seq in self.live if seq.ids]
        for seq, _ in held:
            self.truncate(seq, 0)
        self.forget()
        return held


class FrontEngine(Engine):
    """An engine on a ``Pipeline``. A lost stage is replaced, the sequences' tokens are recomputed,
    and the run is repeated: callers notice only the time.

    Raises StageLostError if a run has failed ``TRIES`` times.
    """

    cache_type: ClassVar[type[KVCache]] = LiveCache
    has_states: ClassVar[bool] = False
    n_lost = 0  # times that a stage was lost

    def __init__(self, *args: Any, **settings: Any) -> None:
        self._to_recompute: list[tuple[Sequence, list[int], int]] = []  # to be recomputed
        super().__init__(*args, **settings)

    def adapt(self, adapters: Seq[Adapter]) -> None:
        """Raise UnsupportedError: stages have no adapters."""
        raise UnsupportedError("adapters are not supported with pipeline stages")

    def steer(self, vectors: Seq[ControlVector]) -> None:
        """Raise UnsupportedError: stages have no control vectors."""
        raise UnsupportedError("control vectors are not supported with pipeline stages")

    def _run(
        self,
        parts: Seq[BatchItem],
        read: Callable[[Any], T],
        times: list[float] | None = None,
        output: str = "logits",
        begin: Callable[[Any], object] | None = None,
    ) -> T:
        with self.lock:
            for left in reversed(range(TRIES)):
                try:
                    self._read_again()
                    return super()._run(parts, read, times, output, begin)
                except StageLostError:
                    if not left:
                        raise
                    self._lose()
            raise AssertionError

    def _walk(self, ready: Any, times: list[float] | None, *, stoppable: bool = False) -> bool:
        """Run the steps of a plan like ``Engine._walk``, but wait for all masks that are still
        being computed before the first step, because stages run a batch as a whole.
        """
        ready.run.write_late()
        ready.run.late.clear()
        return super()._walk(ready, times, stoppable=stoppable)

    def _lose(self) -> None:
        assert isinstance(self.device, Pipeline)
        assert isinstance(self.cache, LiveCache)
        self.n_lost += 1
        owed = {seq: ids for seq, ids, changes in self._to_recompute if seq.n_changes == changes}
        with interrupts_held():
            owed |= {seq: ids for seq, ids in self.cache.drop_all() if seq not in owed}
            self._to_recompute = [(seq, ids, seq.n_changes) for seq, ids in owed.items()]
        self.device.restart()

    def _read_again(self) -> None:
        """Recompute the tokens of the sequences that were lost with a stage, except sequences that
        were changed since.
        """
        while self._to_recompute:
            seq, ids, changes = self._to_recompute[-1]
            if seq.n_changes == changes:
                with interrupts_held():
                    at = self.cache.match(seq, [*ids, -1])
                try:
                    for start in range(at, len(ids), self.max_tokens):
                        part = BatchItem(seq, ids[start : start + self.max_tokens], 0)
                        super()._run([part], lambda ready: None)
                finally:
                    self._to_recompute[-1] = seq, ids, seq.n_changes
            self._to_recompute.pop()
