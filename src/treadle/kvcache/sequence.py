"""One text's place in the cache (``cache.py``)."""

from __future__ import annotations

from array import array
from collections import deque
from dataclasses import field
from time import time_ns
from typing import Protocol

from treadle.base.fast_dataclass import dataclass
from treadle.kvcache.page_pool import Pool, StatePool
from treadle.kvcache.prefix_tree import Lora, PageNode


class Cache(Protocol):
    """What a sequence asks of its cache."""

    pools: list[Pool]
    states: list[StatePool]

    def truncate(self, seq: Sequence, n: int) -> None:
        """Forget all but the first ``n`` tokens."""

    def reserve(self, seq: Sequence, n: int) -> None:
        """Keep room for ``n`` tokens more."""


@dataclass(eq=False)
class Sequence:
    """One text's place in the cache: its tokens so far, and its pages in each pool."""

    cache: Cache
    ids: list[int] = field(default_factory=list)  # tokens whose keys and values are held
    pages: list[array[int]] = field(default_factory=list)  # per pool, i64
    slots: list[int] = field(default_factory=list)  # of its state, and of the next one
    n_state: int = 0  # of ids: those that its state has seen
    nodes: list[PageNode] = field(
        default_factory=list
    )  # its full pages in the tree, from the root on
    promised: list[int] = field(default_factory=list)  # pages per pool, reserved and not yet taken
    lora: Lora = ()  # the adapters it is read with
    n_drafted: int = 0  # of ids: the last ones of a run, which may be taken back
    alone: bool = False  # takes no pages that others wrote; they find its own once it retires
    n_changes: int = 0  # of ids: an unchanged counter means unchanged ids
    began_ns: int = field(default_factory=time_ns)  # when its text was begun, or last looked up

    def __len__(self) -> int:
        return len(self.ids)

    def close(self) -> None:
        """Give the pages back; full ones stay findable until their room is needed."""
        self.cache.truncate(self, 0)
        self.cache.reserve(self, 0)


class AbandonedSequences(deque[Sequence]):
    """Sequences whose sessions were forgotten unclosed, by the garbage collector in any thread."""

    def close(self) -> None:
        """Give their pages back; under the engine's lock."""
        while self:
            self.popleft().close()
