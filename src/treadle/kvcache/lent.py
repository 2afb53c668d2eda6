"""A view of another model's cache, for layers that read its pages and write none."""

from __future__ import annotations

from collections.abc import Sequence as Seq

from treadle.kvcache.cache import KVCache, Sequence
from treadle.kvcache.page_pool import Pool
from treadle.kvcache.prefix_tree import PageTree


class LentPool(Pool):
    """A pool of another cache. ``first``: the number of its first layer for who reads it."""

    lent = True

    def __init__(self, pool: Pool, first: int) -> None:
        self.__dict__.update(vars(pool))
        self._first = first

    def layer_off(self, layer: int) -> int:
        """See ``Cells``; places of the cache's own layers are those of its own numbers."""
        return super().layer_off(layer - self._first if layer >= self._first else layer)


class LentCache(KVCache):
    """The pools of ``cache``, whose layers are numbered from ``first`` on. Sequences of it are
    views of the cache's own: a run neither extends nor ends them.
    """

    lent = True

    def __init__(self, cache: KVCache, first: int) -> None:
        self.kv = cache.kv
        self.n_ctx = cache.n_ctx
        self.n_sequences = cache.n_sequences
        self.n_batch = cache.n_batch
        self.kv_tokens = cache.kv_tokens
        self.pools = [LentPool(pool, first) for pool in cache.pools]
        self.cross = []
        self.windows = []
        self.states = []
        self.store = None
        self.lora = ()
        self.tree = PageTree([], None)
        self.media = cache.media
        self._pool_of = {first + i: pool for pool in self.pools for i in pool.layers}

    def extend(self, seq: Sequence, ids: Seq[int], first: Seq[int] = ()) -> None:
        """Nothing: the tokens of a run have no keys and values here."""

    def truncate(self, seq: Sequence, n: int) -> None:
        """Nothing, as in ``extend``."""

    def commit(self, seq: Sequence) -> None:
        """Nothing, as in ``extend``."""
