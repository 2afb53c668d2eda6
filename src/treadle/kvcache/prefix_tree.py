"""The prefix tree of full pages, searched by tokens; and the report of a search: how many prompt
tokens were reused, and why reuse stopped.
"""

from __future__ import annotations

from array import array
from collections import OrderedDict
from collections.abc import Iterator
from collections.abc import Sequence as Seq
from dataclasses import field
from typing import TYPE_CHECKING, Any, Protocol

from treadle.base.fast_classes import dataclass
from treadle.kernels.run_state import PAGE
from treadle.kvcache.page_pool import FREED, NO_CHECKPOINT, Pool, StateSlots

if TYPE_CHECKING:
    from treadle.kvcache.cache import KVCache, Sequence


# Adapters by number, ascending, each with its scale; control vectors are numbered behind adapters.
Lora = tuple[tuple[int, float], ...]
EVICTED = 1 << 16  # evicted nodes that are remembered


@dataclass(eq=False)
class PageNode:
    """A full page of tokens, with one page per pool; its parent's ``next`` finds it by these
    tokens. Or a *tail*: the first tokens of a page, up to a checkpoint within it, which has no
    children.
    """

    parent: PageNode | None
    ids: tuple[int, ...]
    pages: list[int]  # per pool; FREED in one with a window once its room was needed
    next: dict[tuple[int, ...], PageNode] = field(default_factory=dict)
    state: int = NO_CHECKPOINT  # the slot of its state checkpoint, if kept (``page_pool.py``)
    key: int = 0  # a hash of all tokens up to its end
    # A digest of all tokens up to its end, set on first use (``kvcache/disk/page_store.py``).
    chain: bytes = b""


def n_ids(chain: list[PageNode]) -> int:
    """Return the number of tokens in a chain of nodes; its last node may be a tail."""
    return (len(chain) - 1) * PAGE + len(chain[-1].ids) if chain else 0


class PageStoreLike(Protocol):
    """The methods of ``PageStore`` (``kvcache/disk/page_store.py``) that the cache calls; ``seq``
    is a sequence of that cache.
    """

    miss_reason: str  # why the last ``fetch`` gave nothing although a file exists

    def queue_pages(self, node: PageNode, depth: int, began_ns: int) -> object:
        """Queue a node's pages for writing; ``depth``: the node's page index in a sequence begun at
        ``began_ns``.
        """

    def mark_used(self, seq: Any) -> None:
        """Mark the files of a sequence's pages as just used."""

    def fetch(self, seq: Any, ids: Seq[int]) -> int:
        """Extend ``seq`` by the pages of ``ids`` that files have. Return the number of tokens
        added.
        """

    def is_foreign(self, parent: PageNode, ids: Seq[int]) -> bool:
        """Return whether there is a file of these tokens after ``parent`` that another model, KV
        type or version wrote.
        """

    def save(self) -> None:
        """Write the tree's pages that have no file."""

    def close(self) -> None:
        """Write the queued files, and stop writing."""


class PageTree:
    """The cached full pages of all pools, by the tokens that lead to them; evicted when room is
    needed.
    """

    def __init__(self, pools: list[Pool], slots: StateSlots | None = None) -> None:
        self.slots = slots  # of states: a chain is usable only if its end has one
        self.pools = pools
        self.windows = [pool for pool in pools if pool.window]
        self.root = PageNode(None, (), [])
        self.roots: dict[Lora, PageNode] = {(): self.root}  # keys and values differ with adapters
        self.marks: tuple[bytes, ...] = ()  # digests of the adapters, and of the control vectors
        # least recently used first
        self.leaves: OrderedDict[PageNode, None] = OrderedDict()
        # Nodes with a page of this windowed pool.
        self.kept: dict[Pool, OrderedDict[PageNode, None]] = {
            pool: OrderedDict() for pool in self.windows
        }
        self._evicted: OrderedDict[int, None] = OrderedDict()  # node keys, the newest last
        self._tails: dict[PageNode, list[PageNode]] = {}  # by parent

    def root_of(self, lora: Lora) -> PageNode:
        """Return the root for sequences with these adapters. A new root is stored once it gets a
        child.
        """
        root = self.roots.get(lora)
        if root is None:
            from hashlib import sha256

            marks = repr([(self.marks[i], scale) for i, scale in lora]).encode()
            root = PageNode(None, (), [], key=hash(lora), chain=sha256(marks).digest())
        return root

    def find(self, ids: Seq[int], limit: int, lora: Lora = ()) -> list[PageNode]:
        """Return the longest chain of nodes for ``ids[:limit]`` that a sequence can use: no page
        within a window is gone and, if layers keep a state, the last node has a checkpoint. The
        last node may be a tail.
        """
        node = self.roots.get(lora)
        chain: list[PageNode] = []
        usable = 0
        gone = {pool.index: -1 for pool in self.windows}
        for end in range(PAGE, limit + 1, PAGE):
            node = node.next.get(tuple(ids[end - PAGE : end])) if node else None
            if node is None:
                break
            for which in gone:
                if node.pages[which] == FREED:
                    gone[which] = len(chain)
            chain.append(node)
            stateful = self.slots is None or node.state != NO_CHECKPOINT
            if stateful and all(pool.first_seen(end) > gone[pool.index] for pool in self.windows):
                usable = len(chain)
        if self._tails:
            for depth in range(len(chain), usable - 1, -1):
                if (tail := self._find_tail(chain[:depth], ids, limit, lora)) is not None:
                    return [*chain[:depth], tail]
        return chain[:usable]

    def _find_tail(
        self, chain: list[PageNode], ids: Seq[int], limit: int, lora: Lora
    ) -> PageNode | None:
        """Return the longest usable tail after the nodes ``chain`` whose tokens ``ids[:limit]``
        continues with, or None.
        """
        parent = chain[-1] if chain else self.roots.get(lora)
        start = len(chain) * PAGE
        best: PageNode | None = None
        for tail in self._tails.get(parent, ()) if parent is not None else ():
            end = start + len(tail.ids)
            if (
                tail.state != NO_CHECKPOINT
                and end <= limit
                and tail.ids == tuple(ids[start:end])
                and not any(
                    node.pages[pool.index] == FREED
                    for pool in self.windows
                    for node in (*chain[pool.first_seen(end) :], tail)
                )
                and (best is None or len(best.ids) < len(tail.ids))
            ):
                best = tail
        return best

    def tail_of(self, parent: PageNode | None, page: int, lora: Lora) -> PageNode | None:
        """Return the tail after ``parent`` (None: the root) whose page in the first pool is
        ``page``, or None.
        """
        tails = self._tails.get(parent or self.root_of(lora), ())
        return next((tail for tail in tails if tail.pages[0] == page), None)

    def n_behind(self, nodes: list[PageNode], ids: Seq[int], lora: Lora) -> int:
        """Return how many pages of ``ids`` in a row the tree has after the last of ``nodes``, those
        with freed window pages included.
        """
        node = nodes[-1] if nodes else self.root_of(lora)
        for n in range(len(ids) // PAGE):
            after = node.next.get(tuple(ids[n * PAGE : (n + 1) * PAGE]))
            if after is None:
                return n
            node = after
        return len(ids) // PAGE

    def all_ids(self) -> Iterator[int]:
        """Yield the tokens of all cached pages, in no particular order."""
        waiting = list(self.roots.values())
        while waiting:
            node = waiting.pop()
            yield from node.ids
            waiting += node.next.values()

    def touch(self, pool: Pool, nodes: list[PageNode]) -> None:
        """Mark the nodes' pages in a pool as just used: they are evicted last."""
        recent = self.kept.get(pool, self.leaves)
        for node in nodes:
            if node in recent:
                recent.move_to_end(node)

    def enter(self, parent: PageNode | None, ids: tuple[int, ...], lora: Lora = ()) -> PageNode:
        """Return the node of the tokens ``ids`` after ``parent`` (None: the root), new if absent.
        With fewer tokens than a page it is a tail.
        """
        parent = parent or self.roots.setdefault(lora, self.root_of(lora))
        node = parent.next.get(ids)
        if node is None:
            key = hash((parent.key, ids))
            node = parent.next[ids] = PageNode(parent, ids, [FREED] * len(self.pools), key=key)
            self._evicted.pop(key, None)
            self.leaves.pop(parent, None)
            self.leaves[node] = None
            if len(ids) < PAGE:
                self._tails.setdefault(parent, []).append(node)
        return node

    def set_page(self, node: PageNode, pool: Pool, page: int) -> None:
        """Set the node's page in a pool, with the tree as one more holder."""
        node.pages[pool.index] = page
        pool.hold_in_tree(page)
        if pool.window and page != FREED:
            self.kept[pool][node] = None

    def share(self, node: PageNode, pages: Seq[array[int]], p: int) -> None:
        """Share page ``p`` between a node and a sequence with ``pages`` per pool: both use the
        node's page, or the sequence's if the node has none.
        """
        for pool, own in zip(self.pools, pages, strict=True):
            held = node.pages[pool.index]
            if held == FREED:
                self.set_page(node, pool, own[p])
            elif own[p] not in (FREED, held):
                pool.hold(held)
                pool.drop(own[p])
                own[p] = held

    def evict(self, pool: Pool) -> bool:
        """Evict one idle page of a pool. Return whether there was one.

        Without a window, the least recently used leaf is removed, in all pools. With one, only this
        pool's page is freed, and its node stays.
        """
        which = pool.index
        nodes = self.kept.get(pool, self.leaves)
        node = next((n for n in nodes if pool.is_idle(n.pages[which])), None)
        if node is None:
            return False
        del nodes[node]
        if pool.window:
            pool.drop_from_tree(node.pages[which])
            node.pages[which] = FREED
            return True
        self._remove(node)
        return True

    def drop(self, leaf: PageNode) -> None:
        """Remove a leaf. Pages that sequences hold stay theirs."""
        del self.leaves[leaf]
        self._remove(leaf)

    def erase(self, ids: Seq[int], lora: Lora = ()) -> None:
        """Remove the nodes of a sequence's tokens, from the last back to the first that has other
        children or pages in use.
        """
        node = self.root_of(lora)
        p = 0
        while True:
            rest = tuple(ids[p * PAGE : (p + 1) * PAGE])
            for tail in list(self._tails.get(node, ())):
                if self._is_idle(tail) and tail.ids == rest[: len(tail.ids)]:
                    self.drop(tail)
            after = node.next.get(rest) if len(rest) == PAGE else None
            if after is None:
                break
            node = after
            p = p + 1
        while node.parent is not None and not node.next and self._is_idle(node):
            self.drop(node)
            node = node.parent

    def _is_idle(self, node: PageNode) -> bool:
        return all(
            page == FREED or pool.is_idle(page)
            for pool, page in zip(self.pools, node.pages, strict=True)
        )

    def _remove(self, node: PageNode) -> None:
        """Remove a node that has no children and is no longer in ``leaves``."""
        for kept in self.kept.values():
            kept.pop(node, None)
        for each, page in zip(self.pools, node.pages, strict=True):
            each.drop_from_tree(page)
        if self.slots is not None:
            self.slots.forget(node)
        parent = node.parent
        assert parent is not None
        del parent.next[node.ids]
        if len(node.ids) < PAGE:
            self._tails[parent].remove(node)
            if not self._tails[parent]:
                del self._tails[parent]
        self._evicted[node.key] = None
        if len(self._evicted) > EVICTED:
            self._evicted.popitem(last=False)
        if parent.next or parent is self.root:
            return
        if parent.parent is None:
            self.roots = {lora: root for lora, root in self.roots.items() if root is not parent}
        else:
            self.leaves[parent] = None
            self.leaves.move_to_end(parent, last=False)

    def has_evicted(self, parent: PageNode, ids: tuple[int, ...]) -> bool:
        """Return whether a page of these tokens after ``parent`` was cached and evicted, as far as
        remembered.
        """
        return hash((parent.key, ids)) in self._evicted


# -- the report of a search -----------------------------------------------------------------------

WHY = {
    "end": "the rest of the prompt is less than a page and the last token",
    "off": "the call disabled prefix reuse",
    "new": "no cached text continues this way",
    "evicted": "its page was evicted",
    "window": "pages of the sliding window were freed",
    "state": "no state was kept at this position",
    "room": "no free page to load it into",
    "damaged": "its page file is damaged",
    "other model": "its page file has another model, --kv or version",
}
# Origins of a reused state, besides the places of checkpoints (``page_pool.py``).
NOTHING_REUSED = "none"
OWN = "sequence"  # the end of the sequence itself


@dataclass
class PrefixHit:
    """Prompt tokens that were reused: ``memory`` from the cache, ``files`` from page files; and
    where reuse stopped.

    left_at, token, why: the index at which reuse stopped, the prompt's token there, and the reason,
        a key of WHY.
    state: origin of the reused state: NOTHING_REUSED, OWN, or the place of its checkpoint; None if
        no layer keeps a state.

    Indices are multiples of the page size, except within the caller's own sequence, and at the end
    of a system prompt, which is found as a whole: otherwise a stranger could discover other users'
    texts token by token.
    """

    memory: int = 0
    files: int = 0
    left_at: int | None = None
    token: int | None = None
    why: str = ""
    state: str | None = None


def reuse_stop_reason(cache: KVCache, seq: Sequence, ids: Seq[int]) -> str:
    """Return the reason, a key of WHY, that ``seq`` holds no more of the prompt ``ids`` after
    ``KVCache.match`` and ``PageStore.fetch``.
    """
    p = len(seq.ids) // PAGE
    store = cache.store
    page = tuple(ids[p * PAGE : (p + 1) * PAGE])
    if (p + 1) * PAGE >= len(ids):
        return "end"
    if store is not None and store.miss_reason:
        return store.miss_reason
    parent = seq.nodes[p - 1] if p else cache.tree.root_of(seq.lora)
    node = parent.next.get(page)
    if node is not None:
        if cache.states and node.state == NO_CHECKPOINT:
            return "state"
        return "window" if FREED in node.pages else "room"
    if cache.tree.has_evicted(parent, page):
        return "evicted"
    return "other model" if store is not None and store.is_foreign(parent, page) else "new"
