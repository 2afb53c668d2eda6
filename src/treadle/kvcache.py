"""Pages of keys and values: who holds which, and what may be shared.

Layers that see everything and layers with a sliding window have a pool each. A sequence holds a list of pages per pool, one for
every PAGE tokens; in the window's pool it gives back those that no later token can see. A page that is full never changes, so
sequences with the same beginning share it (``_Prefix``), and a finished sequence's pages stay to be found again until
somebody needs the room.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Sequence as Ids
from dataclasses import dataclass, field

import numpy as np

from treadle.errors import ContextFullError
from treadle.kernels.kv import PAGE, PageLayout
from treadle.models.archs import layer_window
from treadle.models.config import Config
from treadle.plan import Const

GONE = -1  # in a page list: given back, because it lies before the window


class Pool:
    """Pages for some of the layers. Memory is reserved at once and used as pages are first written."""

    def __init__(self, name: str, layout: PageLayout, layers: list[int], n_pages: int, window: int) -> None:
        self.layout, self.window, self.n_pages = layout, window, n_pages
        self._index = {layer: i for i, layer in enumerate(layers)}
        self.page_bytes = layout.layer_bytes * max(len(layers), 1)
        raw = np.zeros(n_pages * self.page_bytes + 64, np.uint8)
        start = -raw.ctypes.data % 64
        self.const = Const(name, raw[start : start + n_pages * self.page_bytes])
        self.free = list(range(n_pages - 1, -1, -1))
        self.holders = [0] * n_pages

    def layer_off(self, layer: int) -> int:
        return self._index[layer] * self.layout.layer_bytes

    def take(self) -> int | None:
        if not self.free:
            return None
        page = self.free.pop()
        self.holders[page] = 1
        return page

    def hold(self, page: int) -> None:
        self.holders[page] += 1

    def drop(self, page: int) -> None:
        self.holders[page] -= 1
        if not self.holders[page]:
            self.free.append(page)

    def copy(self, page: int, to: int) -> None:
        """Copy a page's contents."""
        data = self.const.array.reshape(self.n_pages, self.page_bytes)
        data[to] = data[page]


@dataclass(eq=False)
class Sequence:
    """One text's place in the cache: its tokens so far, and its pages in each pool."""

    cache: KVCache
    ids: list[int] = field(default_factory=list)  # tokens whose keys and values are held
    pages: list[list[int]] = field(default_factory=list)  # per pool
    kept: int = 0  # full pages already entered in the index of prefixes

    def __len__(self) -> int:
        return len(self.ids)

    def close(self) -> None:
        """Give the pages back; full ones stay findable as a prefix until their room is needed."""
        self.cache.truncate(self, 0)


@dataclass
class _Prefix:
    """A full page of every pool, found by all tokens from the beginning to its end."""

    pages: list[int]


class KVCache:
    """The pools of one model. ``n_ctx`` tokens a sequence, room for ``n_sequences`` full ones."""

    def __init__(self, config: Config, n_ctx: int, kv: str = "f16", n_sequences: int = 1) -> None:
        self.kv, self.n_ctx, self.n_sequences = kv, n_ctx, n_sequences
        layout = PageLayout(kv, config.n_head_kv, config.head_dim)
        windows = [layer_window(config, i) for i in range(config.n_layer)]
        seen = [i for i, w in enumerate(windows) if not w]
        local = [i for i, w in enumerate(windows) if w]
        per = -(-n_ctx // PAGE)
        self.pools = [Pool("kv_global", layout, seen, (per + 1) * n_sequences, 0)]
        self.window = max(windows)
        if local:
            self.pools.append(Pool("kv_local", layout, local, (per + 1) * n_sequences, self.window))
        self._pool_of = {i: self.pools[-1 if w else 0] for i, w in enumerate(windows)}
        self._prefixes: OrderedDict[tuple[int, ...], _Prefix] = OrderedDict()

    def pool_of(self, layer: int) -> Pool:
        return self._pool_of[layer]

    @property
    def n_bytes(self) -> int:
        """Memory reserved; only pages that were written take any."""
        return sum(pool.const.array.nbytes for pool in self.pools)

    def max_partials(self, n_tokens: int, split: int) -> int:
        """Attention items that ``n_tokens`` decoding tokens can need at most."""
        return n_tokens * (-(-self.n_ctx // split) + 1)

    def sequence(self, ids: Ids[int] = ()) -> Sequence:
        """A new sequence that already holds the longest known prefix of ``ids`` (whole pages; see ``len``)."""
        made = Sequence(self, [], [[] for _ in self.pools])
        self.match(made, ids)
        return made

    def match(self, seq: Sequence, ids: Ids[int]) -> int:
        """Make ``seq`` hold the longest prefix of ``ids`` that it or the cache has; returns its length.

        At least the last token is left to be computed, so that there are logits.
        """
        limit = len(ids) - 1
        own = 0
        while own < min(limit, len(seq.ids)) and seq.ids[own] == ids[own]:
            own += 1
        own = self._visible(seq, max(own, 0))
        self.truncate(seq, own)
        while len(seq.ids) % PAGE == 0 and len(seq.ids) + PAGE <= limit:
            end = len(seq.ids) + PAGE
            found = self._prefixes.get(tuple(ids[:end]))
            if found is None:
                break
            for pool, pages, page in zip(self.pools, seq.pages, found.pages, strict=True):
                pool.hold(page)
                pages.append(page)
            self._prefixes.move_to_end(tuple(ids[:end]))
            seq.ids.extend(ids[end - PAGE : end])
            seq.kept = end // PAGE
        return len(seq.ids)

    def _visible(self, seq: Sequence, n: int) -> int:
        """The longest length up to ``n`` to which ``seq`` can go back: its window must still be there."""
        if not self.window or n == len(seq.ids):
            return n
        first = next((p for p, page in enumerate(seq.pages[-1]) if page != GONE), 0)
        return n if first * PAGE <= max(0, n - self.window) else 0

    def truncate(self, seq: Sequence, n: int) -> None:
        """Forget all but the first ``n`` tokens."""
        keep = -(-n // PAGE)
        for pool, pages in zip(self.pools, seq.pages, strict=True):
            for page in pages[keep:]:
                if page != GONE:
                    pool.drop(page)
            del pages[keep:]
        del seq.ids[n:]
        seq.kept = min(seq.kept, n // PAGE)

    def fork(self, seq: Sequence) -> Sequence:
        """A second sequence with the same history; full pages are shared, the last one is copied when written."""
        made = Sequence(self, list(seq.ids), [list(pages) for pages in seq.pages], seq.kept)
        for pool, pages in zip(self.pools, made.pages, strict=True):
            for page in pages:
                if page != GONE:
                    pool.hold(page)
        return made

    def extend(self, seq: Sequence, ids: Ids[int]) -> None:
        """Make room for ``ids`` behind ``seq``'s tokens and count them in.

        Raises ContextFullError, with nothing changed, when they do not fit the context or no page is left.
        """
        old, new = len(seq.ids), len(seq.ids) + len(ids)
        if new > self.n_ctx:
            raise ContextFullError(
                f"{new} tokens do not fit the context of {self.n_ctx}: raise it with context= (-c), or shorten the prompt"
            )
        self._own_last_page(seq)
        for pool, pages in zip(self.pools, seq.pages, strict=True):
            while len(pages) * PAGE < new:
                page = self._take(pool)
                if page is None:
                    self.truncate(seq, old)
                    raise ContextFullError(f"no page of keys and values left in {pool.const.name}")
                pages.append(page)
        seq.ids.extend(ids)

    def _own_last_page(self, seq: Sequence) -> None:
        """Before writing into a page that others hold too, get a copy of it."""
        last, place = divmod(len(seq.ids), PAGE)
        if not place:
            return
        for pool, pages in zip(self.pools, seq.pages, strict=True):
            page = pages[last]
            if page != GONE and pool.holders[page] > 1:
                own = self._take(pool)
                if own is None:
                    raise ContextFullError(f"no page of keys and values left in {pool.const.name}")
                pool.copy(page, own)
                pool.drop(page)
                pages[last] = own

    def _take(self, pool: Pool) -> int | None:
        """A free page, at the price of the prefix that was not asked for the longest time."""
        page = pool.take()
        while page is None and self._prefixes:
            self._evict()
            page = pool.take()
        return page

    def _evict(self) -> None:
        _, old = self._prefixes.popitem(last=False)
        for pool, page in zip(self.pools, old.pages, strict=True):
            pool.drop(page)

    def commit(self, seq: Sequence) -> None:
        """After a run: enter full pages in the index, give back those before the window."""
        for p in range(seq.kept, len(seq.ids) // PAGE):
            pages = [pages[p] for pages in seq.pages]
            key = tuple(seq.ids[: (p + 1) * PAGE])
            if GONE not in pages and key not in self._prefixes:
                for pool, page in zip(self.pools, pages, strict=True):
                    pool.hold(page)
                self._prefixes[key] = _Prefix(pages)
            seq.kept = p + 1
        if self.window:
            pages = seq.pages[-1]
            for p in range(max(0, len(seq.ids) - self.window) // PAGE):
                if pages[p] != GONE:
                    self.pools[-1].drop(pages[p])
                    pages[p] = GONE
