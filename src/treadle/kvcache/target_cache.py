"""A view of another model's cache, for layers that read its pages and write none."""

from __future__ import annotations

from collections.abc import Sequence as Seq

from treadle.kvcache.cache import KVCache, Sequence
from treadle.kvcache.page_pool import Pool
from treadle.kvcache.prefix_tree import PageTree


class BorrowedPool(Pool):
    """A pool of another model's cache. The reader's graph numbers that model's layers from
    ``first`` on, behind its own.
    """

    is_borrowed = True

    def __init__(self, pool: Pool, first: int) -> None:
        self.__dict__.update(vars(pool))
        self._first = first

    def layer_off(self, layer: int) -> int:
        """Return the byte offset in a page of layer ``layer - first`` of the other model."""
        return super().layer_off(layer - self._first if layer >= self._first else layer)


class BorrowedCache(KVCache):
    """A read-only view of another model's ``cache``, whose layers are numbered from ``first`` on.
    Its sequences hold pages of that cache: a run neither extends nor ends them.
    """

    is_borrowed = True

    def __init__(self, cache: KVCache, first: int) -> None:
        self.kv = cache.kv
        self.n_ctx = cache.n_ctx
        self.n_sequences = cache.n_sequences
        self.n_batch = cache.n_batch
        self.kv_tokens = cache.kv_tokens
        self.pools = [BorrowedPool(pool, first) for pool in cache.pools]
        self.cross = []
        self.windows = []
        self.states = []
        self.store = None
        self.lora = ()
        self.control_tokens = None
        self.tree = PageTree([], None)
        self.media = cache.media
        self._pool_of = {first + i: pool for pool in self.pools for i in pool.layers}

    def extend(self, seq: Sequence, ids: Seq[int], first: Seq[int] = ()) -> None:
        """Do nothing: a drafter's tokens have no keys and values."""

    def truncate(self, seq: Sequence, n: int) -> None:
        """Do nothing, since ``extend`` appends nothing."""

    def commit(self, seq: Sequence) -> None:
        """Do nothing, since a run writes no pages."""
