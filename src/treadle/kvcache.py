"""Pages of keys and values: who holds which, and what may be shared.

Layers that see everything and layers with a sliding window have a pool each. A sequence holds a
list of pages per pool, one for every PAGE tokens; in the window's pool it gives back those that no
later token can see. A page that is full never changes, so sequences with the same beginning share
it: a tree of such pages (``_Node``) is found by their tokens, and a finished sequence's pages stay
in it until somebody needs the room.
"""

from __future__ import annotations

from array import array
from collections import OrderedDict
from collections.abc import Iterable
from collections.abc import Sequence as Ids
from dataclasses import dataclass, field

import numpy as np

from treadle.errors import ContextFullError, TreadleError
from treadle.kernels.kv import PAGE, PageLayout
from treadle.models.archs import layer_window
from treadle.models.config import Config
from treadle.plan import Const

GONE = -1  # in a list of pages: given back, because it lies before the window
N_BATCH = 512  # tokens of a sequence that are written before it gives pages back


class Pool:
    """Pages for some of the layers. Memory is reserved at once, and used when first written."""

    def __init__(
        self, name: str, layout: PageLayout, layers: list[int], n_pages: int, window: int
    ) -> None:
        self.layout, self.window, self.n_pages = layout, window, n_pages
        self._index = {layer: i for i, layer in enumerate(layers)}
        self.page_bytes = layout.layer_bytes * max(len(layers), 1)
        try:
            raw = np.zeros(n_pages * self.page_bytes + 64, np.uint8)
        except (MemoryError, ValueError) as error:  # too much for this machine, or for any
            raise TreadleError(
                f"no memory for {n_pages * self.page_bytes >> 20} MiB of keys and values ({name}): "
                "lower context= or n_sequences="
            ) from error
        start = -raw.ctypes.data % 64
        self.const = Const(name, raw[start : start + n_pages * self.page_bytes])
        self.free = list(range(n_pages - 1, -1, -1))
        self.holders = [0] * n_pages

    def layer_off(self, layer: int) -> int:
        """Byte offset of a layer's part in a page."""
        return self._index[layer] * self.layout.layer_bytes

    def take(self) -> int | None:
        """A free page, held once; None if there is none."""
        if not self.free:
            return None
        page = self.free.pop()
        self.holders[page] = 1
        return page

    def hold(self, page: int) -> None:
        """One holder more; a page that is GONE has none."""
        if page != GONE:
            self.holders[page] += 1

    def drop(self, page: int) -> None:
        """One holder less; a page without any is free."""
        if page != GONE:
            self.holders[page] -= 1
            if not self.holders[page]:
                self.free.append(page)

    def page(self, page: int) -> np.ndarray:
        """A page's bytes, uint8 ``[page_bytes]``, to be read or written."""
        data: np.ndarray = self.const.array.reshape(self.n_pages, self.page_bytes)[page]
        return data

    def copy(self, page: int, to: int) -> None:
        """Copy a page's contents."""
        self.page(to)[:] = self.page(page)


@dataclass(eq=False)
class _Node:
    """A full page of every pool, found from the page before it by its own tokens."""

    parent: _Node | None
    ids: tuple[int, ...]
    pages: list[int]  # per pool; in the window's pool GONE once its room was needed
    next: dict[tuple[int, ...], _Node] = field(default_factory=dict)


@dataclass(eq=False)
class Sequence:
    """One text's place in the cache: its tokens so far, and its pages in each pool."""

    cache: KVCache
    ids: list[int] = field(default_factory=list)  # tokens whose keys and values are held
    pages: list[array[int]] = field(default_factory=list)  # per pool; kernels read them in place
    nodes: list[_Node] = field(default_factory=list)  # its full pages in the tree, from the root on
    n_changes: int = 0  # of ids: who finds it as it was finds them as they were

    def __len__(self) -> int:
        return len(self.ids)

    def close(self) -> None:
        """Give the pages back; full ones stay findable until their room is needed."""
        self.cache.truncate(self, 0)


class KVCache:
    """The pools of one model. ``n_ctx`` tokens a sequence, room for ``n_sequences`` full ones."""

    def __init__(self, config: Config, n_ctx: int, kv: str = "f16", n_sequences: int = 1) -> None:
        self.kv, self.n_ctx, self.n_sequences = kv, n_ctx, n_sequences
        layout = PageLayout(kv, config.n_head_kv, config.head_dim)
        windows = [layer_window(config, i) for i in range(config.n_layer)]
        seen = [i for i, w in enumerate(windows) if not w]
        local = [i for i, w in enumerate(windows) if w]
        per = -(-n_ctx // PAGE) + 1
        self.pools = [Pool("kv_global", layout, seen, per * n_sequences, 0)]
        self.window = max(windows)
        if local:
            # A window, what is written before pages are given back, and as much as a window to
            # leave behind for whoever begins with the same text.
            per = min(per, -(-(2 * self.window + N_BATCH) // PAGE) + 2)
            self.pools.append(Pool("kv_local", layout, local, per * n_sequences, self.window))
        self._pool_of = {i: self.pools[-1 if w else 0] for i, w in enumerate(windows)}
        self._root = _Node(None, (), [])
        self._leaves: OrderedDict[_Node, None] = OrderedDict()  # the least recently used first
        self._windowed: OrderedDict[_Node, None] = OrderedDict()  # nodes with a page in that pool

    def pool_of(self, layer: int) -> Pool:
        """Where a layer's keys and values are."""
        return self._pool_of[layer]

    @property
    def n_bytes(self) -> int:
        """Memory reserved; only pages that were written take any."""
        return sum(pool.const.array.nbytes for pool in self.pools)

    def max_partials(self, n_tokens: int, split: int) -> int:
        """Attention items that ``n_tokens`` decoding tokens can need at most."""
        return n_tokens * (-(-self.n_ctx // split) + 1)

    # -- beginnings that are known --------------------------------------------------------------

    def sequence(self, ids: Ids[int] = ()) -> Sequence:
        """A new sequence, with the longest known beginning of ``ids`` (``len``, whole pages)."""
        made = Sequence(self, [], [_page_list() for _ in self.pools])
        self.match(made, ids)
        return made

    def match(self, seq: Sequence, ids: Ids[int]) -> int:
        """Make ``seq`` hold the longest beginning of ``ids`` that it or the cache has; its length.

        At least the last token is left to be computed, so that there are logits.
        """
        limit, own = len(ids) - 1, 0
        while own < min(limit, len(seq.ids)) and seq.ids[own] == ids[own]:
            own += 1
        own = self.visible(seq, own)
        found = self._find(ids, limit)
        if len(found) * PAGE <= own:
            self.truncate(seq, own)
        else:
            self._adopt(seq, found)
        return len(seq.ids)

    def visible(self, seq: Sequence, n: int) -> int:
        """``n``, or 0 where ``seq`` cannot go back to ``n`` tokens: the window's pages are gone."""
        if not self.window or n == len(seq.ids):
            return n
        return n if GONE not in seq.pages[-1][self.window_start(n) : -(-n // PAGE)] else 0

    def window_start(self, n: int) -> int:
        """The first page that a token behind ``n`` others may see in a layer with a window."""
        return max(0, n - self.window) // PAGE

    def _find(self, ids: Ids[int], limit: int) -> list[_Node]:
        """The longest chain of nodes for ``ids[:limit]`` whose window is whole."""
        node: _Node | None = self._root
        chain: list[_Node] = []
        usable, gone = 0, -1
        for end in range(PAGE, limit + 1, PAGE):
            node = node.next.get(tuple(ids[end - PAGE : end])) if node else None
            if node is None:
                break
            if node.pages[-1] == GONE:
                gone = len(chain)
            chain.append(node)
            if not self.window or self.window_start(end) > gone:
                usable = len(chain)
        return chain[:usable]

    def _adopt(self, seq: Sequence, chain: list[_Node]) -> None:
        """Make ``seq`` hold the pages of ``chain`` instead of its own."""
        seq.n_changes += 1
        old = [list(pages) for pages in seq.pages]
        first = self.window_start(len(chain) * PAGE) if self.window else 0
        for pool, pages, which in zip(self.pools, seq.pages, range(len(old)), strict=True):
            pages[:] = _page_list(node.pages[which] for node in chain)
            if pool.window:
                pages[:first] = _page_list([GONE] * first)
            for page in pages:
                pool.hold(page)
            for page in old[which]:
                pool.drop(page)
        seq.ids[:] = [token for node in chain for token in node.ids]
        seq.nodes[:] = chain
        if chain[-1] in self._leaves:
            self._leaves.move_to_end(chain[-1])
        for node in chain[first:]:
            if node in self._windowed:
                self._windowed.move_to_end(node)

    def commit(self, seq: Sequence) -> None:
        """After a run: enter full pages in the tree, give back those before the window."""
        for p in range(len(seq.nodes), len(seq.ids) // PAGE):
            parent = seq.nodes[-1] if seq.nodes else self._root
            ids = tuple(seq.ids[p * PAGE : (p + 1) * PAGE])
            node = parent.next.get(ids)
            if node is None:
                node = parent.next[ids] = _Node(parent, ids, [GONE] * len(self.pools))
                self._leaves.pop(parent, None)
                self._leaves[node] = None
            self._share(seq, p, node)
            seq.nodes.append(node)
        if self.window:
            pages = seq.pages[-1]
            for p in range(self.window_start(len(seq.ids)) - 1, -1, -1):
                if pages[p] == GONE:
                    break
                self.pools[-1].drop(pages[p])
                pages[p] = GONE

    def _share(self, seq: Sequence, p: int, node: _Node) -> None:
        """Sequence and node keep one page between them: the node's, or if it has none the other."""
        for which, (pool, pages) in enumerate(zip(self.pools, seq.pages, strict=True)):
            if node.pages[which] == GONE:
                node.pages[which] = pages[p]
                pool.hold(pages[p])
                if pool.window and pages[p] != GONE:
                    self._windowed[node] = None
            elif pages[p] not in (GONE, node.pages[which]):
                pool.hold(node.pages[which])
                pool.drop(pages[p])
                pages[p] = node.pages[which]

    # -- room -----------------------------------------------------------------------------------

    def truncate(self, seq: Sequence, n: int) -> None:
        """Forget all but the first ``n`` tokens; see ``visible``."""
        seq.n_changes += 1
        keep = -(-n // PAGE)
        for pool, pages in zip(self.pools, seq.pages, strict=True):
            for page in pages[keep:]:
                pool.drop(page)
            del pages[keep:]
        del seq.ids[n:]
        del seq.nodes[n // PAGE :]

    def fork(self, seq: Sequence) -> Sequence:
        """A second sequence with the same history; who first writes to the last page gets a
        copy.
        """
        made = Sequence(self, list(seq.ids), [p[:] for p in seq.pages], list(seq.nodes))
        for pool, pages in zip(self.pools, made.pages, strict=True):
            for page in pages:
                pool.hold(page)
        return made

    def check_context(self, n: int) -> None:
        """Raise ContextFullError if a sequence cannot hold ``n`` tokens."""
        if n > self.n_ctx:
            raise ContextFullError(
                f"{n} tokens do not fit the context of {self.n_ctx}: "
                "raise it with context=, or shorten the prompt"
            )

    def check_room(self, seq: Sequence, n: int) -> None:
        """Raise ContextFullError if ``n`` tokens more do not fit the context, or the pages left."""
        new = len(seq.ids) + n
        self.check_context(new)
        pool, wanted = self.pools[0], -(-new // PAGE) - len(seq.pages[0])
        if wanted > len(pool.free) and wanted > len(pool.free) + self._unused():
            raise self._no_page(pool)

    def _unused(self) -> int:
        """Pages of the first pool that only the tree holds."""
        holders, waiting, count = self.pools[0].holders, [self._root], 0
        while waiting:
            for node in waiting.pop().next.values():
                count += holders[node.pages[0]] == 1
                waiting.append(node)
        return count

    def _no_page(self, pool: Pool) -> ContextFullError:
        full = f"{self.n_sequences} x {self.n_ctx} tokens"
        return ContextFullError(
            f"no page of keys and values left in {pool.const.name}, which has room for {full}: "
            "close a session, or load the model with a larger n_sequences"
        )

    def extend(self, seq: Sequence, ids: Ids[int], first: int = 0) -> None:
        """Make room for ``ids`` behind ``seq``'s tokens and count them in; in the window's pool for
        pages from ``first`` on alone.

        Raises ContextFullError, with nothing changed, where they do not fit; see ``check_room``.
        """
        old, new = len(seq.ids), len(seq.ids) + len(ids)
        self.check_room(seq, len(ids))
        self._own_last_page(seq)
        for pool, pages in zip(self.pools, seq.pages, strict=True):
            while len(pages) * PAGE < new:
                page = GONE if pool.window and len(pages) < first else self._take(pool)
                if page is None:
                    self.truncate(seq, old)
                    raise self._no_page(pool)
                pages.append(page)
        seq.ids.extend(ids)
        seq.n_changes += 1

    def _own_last_page(self, seq: Sequence) -> None:
        """Before writing into a page that others hold too, get a copy of it."""
        last, place = divmod(len(seq.ids), PAGE)
        if not place:
            return
        for pool, pages in zip(self.pools, seq.pages, strict=True):
            page = pages[last]
            if pool.holders[page] > 1:
                own = self._take(pool)
                if own is None:
                    raise self._no_page(pool)
                pool.copy(page, own)
                pool.drop(page)
                pages[last] = own

    def _take(self, pool: Pool) -> int | None:
        """A free page, at the price of one of the tree's that was not used for the longest time."""
        page = pool.take()
        while page is None and self._evict(pool):
            page = pool.take()
        return page

    def forget(self) -> None:
        """Drop every page that no sequence holds."""
        for pool in reversed(self.pools):
            while self._evict(pool):
                pass

    def _evict(self, pool: Pool) -> bool:
        """Free a page that only the tree holds, and say whether there was one.

        A chain goes from its end; in the window's pool from its beginning, and the rest stays.
        """
        which = self.pools.index(pool)
        nodes = self._windowed if pool.window else self._leaves
        node = next((n for n in nodes if pool.holders[n.pages[which]] == 1), None)
        if node is None:
            return False
        del nodes[node]
        if pool.window:
            pool.drop(node.pages[which])
            node.pages[which] = GONE
            return True
        self._windowed.pop(node, None)
        for each, page in zip(self.pools, node.pages, strict=True):
            each.drop(page)
        parent = node.parent
        assert parent is not None
        del parent.next[node.ids]
        if parent is not self._root and not parent.next:
            self._leaves[parent] = None
            self._leaves.move_to_end(parent, last=False)
        return True


def _page_list(pages: Iterable[int] = ()) -> array[int]:
    """A sequence's pages as attention reads them, i64."""
    return array("q", pages)
