"""Pages of keys and values: who holds which, and what may be shared.

Layers that are alike have a pool (``models/cache_spec.py``). A sequence holds a list of pages per
pool, one for every PAGE tokens; in a pool with a window it gives back those that no later token can
see. A page that is full never changes, so sequences with the same beginning share it: a tree of
such pages (``prefix_tree.py``) is searched by tokens, and a finished sequence's pages stay in it
until somebody needs the room.

Layers with a state have slots instead (``state_slots.py``). A state goes back to a checkpoint
alone, and some nodes of the tree have one.
"""

from __future__ import annotations

from array import array
from collections.abc import Sequence as Ids
from typing import TYPE_CHECKING

from treadle.errors import ContextFullError, NoRoomError
from treadle.kernels.attention.page_layout import PAGE
from treadle.kernels.attention.work_item import most_partials
from treadle.kvcache.page_pool import GONE, Pool, StatePool, page_bytes, pages_within, state_bytes
from treadle.kvcache.prefix_tree import Lora, PageNode, PageStoreLike, PageTree
from treadle.kvcache.sequence import AbandonedSequences
from treadle.kvcache.sequence import Sequence as Sequence
from treadle.kvcache.state_slots import AGAIN, WORTH, StateSlots, last_saved, n_saved
from treadle.models.cache_spec import PoolSpec, StateSpec
from treadle.models.config import N_BATCH

if TYPE_CHECKING:
    from treadle.plan.plan import Storage

N_TEXTS = 128  # that a run reads side by side where tokens see each other: a part page of each
TEXT = PoolSpec("text", (), 0, 0, 0, 0)  # counts tokens where no layer sees everything


class KVCache:
    """The pools of one model. ``n_ctx`` tokens a sequence, room for ``n_sequences`` full ones, at
    most ``kv_tokens`` in all, in ``kv_bytes``; ``n_batch`` are written before pages go back.
    """

    def __init__(
        self,
        specs: Ids[PoolSpec | StateSpec],
        device: Storage,
        n_ctx: int,
        kv: str = "f16",
        n_sequences: int = 1,
        kv_bytes: int | None = None,
        n_batch: int = N_BATCH,
        kv_tokens: int | None = None,
    ) -> None:
        self.kv, self.n_ctx, self.n_sequences, self.n_batch = kv, n_ctx, n_sequences, n_batch
        self.kv_tokens = min(kv_tokens, n_sequences * n_ctx) if kv_tokens else None
        pools = [spec for spec in specs if isinstance(spec, PoolSpec)]
        if all(spec.window for spec in pools):
            pools.append(TEXT)
        if all(spec.causal for spec in pools):
            most = n_sequences - -(kv_tokens or 1 << 40) // PAGE  # one not full of each
            n_pages = [min(self._n_pages(spec.window) * n_sequences, most) for spec in pools]
        else:  # nothing is given back before a text ends
            n_pages = [self._n_pages(0) * n_sequences + N_TEXTS for _ in pools]
        if kv_bytes is not None:
            n_pages = pages_within(kv_bytes, n_pages, [page_bytes(spec, kv) for spec in pools])
        sized = enumerate(zip(pools, n_pages, strict=True))
        self.pools = [Pool(device, spec, index, kv, n) for index, (spec, n) in sized]
        self.windows = [pool for pool in self.pools if pool.window]
        # Pools without a window fill alike: what is left in one is left in all.
        self._whole = next(pool for pool in self.pools if not pool.window)
        stateful = [spec for spec in specs if isinstance(spec, StateSpec)]
        self.slots = StateSlots(n_sequences, n_saved(sum(map(state_bytes, stateful))))
        self.states = [StatePool(device, spec, self.slots.n_slots) for spec in stateful]
        self._pool_of = {layer: pool for pool in self.pools for layer in pool.layers}
        self._states_of = {layer: each for each in self.states for layer in each.layers}
        self._retired: Sequence | None = None
        self.left = AbandonedSequences()
        self.tree = PageTree(self.pools, self.slots if self.states else None)
        self.store: PageStoreLike | None = None  # full pages in files
        self.lora: Lora = ()  # of new sequences

    def _n_pages(self, window: int) -> int:
        """Pages that a full sequence needs; with a window: it, a batch, and one more for reuse."""
        most = -(-self.n_ctx // PAGE) + 1
        return min(most, -(-(2 * window + self.n_batch) // PAGE) + 2) if window else most

    def pool_of(self, layer: int) -> Pool:
        """Where a layer's keys and values are."""
        return self._pool_of[layer]

    def states_of(self, layer: int) -> StatePool:
        """Where a layer's states are."""
        return self._states_of[layer]

    @property
    def n_tokens(self) -> int:
        """Tokens that all sequences together may hold."""
        return min(self._whole.n_pages * PAGE, self.kv_tokens or self.n_sequences * self.n_ctx)

    @property
    def n_bytes(self) -> int:
        """Memory reserved; only pages that were written take any."""
        return sum(cells.n_bytes for cells in (*self.pools, *self.states))

    def max_partials(self, n_tokens: int, window: int) -> int:
        """Attention items of a batch of ``n_tokens`` whose long histories are split, at most."""
        return most_partials(n_tokens, min(self.n_ctx, window or self.n_ctx))

    # -- beginnings that are known --------------------------------------------------------------

    def sequence(self, ids: Ids[int] = (), lora: Lora | None = None) -> Sequence:
        """A new sequence, with the longest known beginning of ``ids`` (``len``, whole pages)."""
        made = Sequence(self, [], [array("q") for _ in self.pools], promised=[0] * len(self.pools))
        made.lora = self.lora if lora is None else lora
        self.match(made, ids)
        return made

    def retire(self, seq: Sequence) -> None:
        """Nobody goes on with ``seq``. What it holds stays, the last page too, for a text that
        begins alike: until another one retires, or there is need of the room.
        """
        self.let_go(seq)
        if self._retired is not None:
            self._retired.close()
        self._retired = seq

    def let_go(self, seq: Sequence) -> None:
        """Nobody writes in ``seq`` for now: keep no pages for it, and let others find its own."""
        self.reserve(seq, 0)
        if seq.alone:
            seq.alone = False
            self._enter(seq, len(seq.ids))

    def revive(self, lora: Lora | None = None) -> Sequence:
        """The sequence that has retired, or a new one; one with these adapters, where given."""
        self.left.close()
        if self._retired is None or lora not in (None, self._retired.lora):
            return self.sequence((), lora)
        seq, self._retired = self._retired, None
        return seq

    def match(self, seq: Sequence, ids: Ids[int]) -> int:
        """Make ``seq`` hold the longest beginning of ``ids`` that it or the cache has; its length.

        At least the last token is left to be computed, so that there are logits.
        """
        limit, own = len(ids) - 1, 0
        while own < min(limit, len(seq.ids)) and seq.ids[own] == ids[own]:
            own += 1
        own = self.visible(seq, own)
        found = [] if seq.alone else self.tree.find(ids, limit, seq.lora)
        if len(found) * PAGE <= own or not self._may_adopt(seq, found):
            self.truncate(seq, own)
        else:
            self._adopt(seq, found)
        if self.store is not None:
            self.store.use(seq)
        return len(seq.ids)

    def visible(self, seq: Sequence, n: int) -> int:
        """``n``, or how many fewer where ``seq`` cannot go back to ``n`` tokens: to the last
        checkpoint where there is a state, to 0 where pages of a window are gone.
        """
        if n == len(seq.ids):
            return n
        if self.states:
            n = last_saved(seq.nodes[: n // PAGE])
        for pool in self.windows:
            if GONE in seq.pages[pool.index][pool.first_seen(n) : -(-n // PAGE)]:
                return 0
        return n

    def known(self, ids: Ids[int], lora: Lora = ()) -> int:
        """Tokens that ``match`` would find in the tree."""
        return len(self.tree.find(ids, len(ids) - 1, lora)) * PAGE

    def _may_adopt(self, seq: Sequence, chain: list[PageNode]) -> bool:
        """Whether a chain's idle pages are not reserved by others, and a state may be had."""
        return self._may_have_state(seq) and (
            not any(pool.promised for pool in self.pools)
            or all(
                sum(pool.is_idle(node.pages[which]) for node in chain if node.pages[which] != GONE)
                <= pool.room
                for which, pool in enumerate(self.pools)
            )
        )

    def _adopt(self, seq: Sequence, chain: list[PageNode]) -> None:
        """Make ``seq`` hold the pages of ``chain`` instead of its own."""
        seq.n_changes += 1
        for pool, pages in zip(self.pools, seq.pages, strict=True):
            old, first = list(pages), pool.first_seen(len(chain) * PAGE)
            pages[:] = array("q", [GONE] * first)
            pages.extend(node.pages[pool.index] for node in chain[first:])
            for page in pages:
                pool.hold(page)
            for page in old:
                pool.drop(page)
            self.tree.touch(pool, chain[first:])
        if self.states and seq.slots:
            self.slots.go_back(seq.slots, chain[-1])
        elif self.states:
            seq.slots = self.slots.take(chain[-1])
        seq.ids[:] = [token for node in chain for token in node.ids]
        seq.nodes[:], seq.n_state = chain, len(seq.ids)

    def commit(self, seq: Sequence) -> None:
        """After a run: enter full pages in the tree, give back those before a window, and let the
        state that was written be the sequence's. For now without what may be taken back: a state
        that has seen some of it waits for the next call, or for ``truncate`` to ``n_state``.
        """
        n = len(seq.ids) - seq.n_drafted
        if not seq.alone:
            self._enter(seq, n)
        for pool in self.windows:
            pages = seq.pages[pool.index]
            for p in range(pool.first_seen(n) - 1, -1, -1):
                if pages[p] == GONE:
                    break
                pool.drop(pages[p])
                pages[p] = GONE
        if self.states and n == len(seq.ids):
            self.slots.advance(seq.slots)
            if seq.nodes and not n % PAGE and (n - seq.n_state > 1 or not n % WORTH):
                self.slots.save(seq.nodes[-1], seq.slots[0])
            seq.n_state = n

    def _enter(self, seq: Sequence, n: int) -> None:
        """Let others find the full pages of the first ``n`` tokens."""
        for p in range(len(seq.nodes), n // PAGE):
            ids = tuple(seq.ids[p * PAGE : (p + 1) * PAGE])
            node = self.tree.enter(seq.nodes[-1] if seq.nodes else None, ids, seq.lora)
            self.tree.share(node, seq.pages, p)
            seq.nodes.append(node)
            if self.store is not None:
                self.store.keep(node, p, seq.began_ns)

    def cut(self, seq: Sequence, ids: Ids[int]) -> int:
        """How many of the next ``ids`` are for one run: with a state up to the last page's edge,
        or to one that another text has passed, where a later text may begin."""
        if not self.states or seq.alone:
            return len(ids)
        start, saved, held = len(seq.ids), last_saved(seq.nodes), len(seq.nodes) * PAGE
        last = (start + len(ids)) // PAGE * PAGE
        met = held + PAGE * self.tree.n_behind(seq.nodes, [*seq.ids[held:], *ids], seq.lora)
        if met > start and met - saved >= AGAIN:
            return met - start
        return last - start if last - saved >= WORTH else len(ids)

    # -- room -----------------------------------------------------------------------------------

    def truncate(self, seq: Sequence, n: int) -> None:
        """Forget all but the first ``n`` tokens; see ``visible``."""
        seq.n_changes += 1
        keep = -(-n // PAGE)
        for pool, pages in zip(self.pools, seq.pages, strict=True):
            for page in pages[keep:]:
                pool.drop(page)
            del pages[keep:]
        if n and seq.slots and n != seq.n_state:
            self.slots.go_back(seq.slots, seq.nodes[n // PAGE - 1])
        elif not n:
            self.slots.give_back(seq.slots)
        del seq.ids[n:]
        del seq.nodes[n // PAGE :]
        seq.n_state = n

    def fork(self, seq: Sequence) -> Sequence:
        """A second sequence with the same history; who first writes to the last page copies it."""
        if seq.slots and not self._has_state_room():
            raise self._no_room(self.states[0])
        slots = self.slots.fork(seq.slots) if seq.slots else []
        lists, nodes, none = [p[:] for p in seq.pages], list(seq.nodes), [0] * len(seq.pages)
        made = Sequence(self, list(seq.ids), lists, slots, seq.n_state, nodes, none, seq.lora)
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

    def room(self) -> list[int]:
        """Pages of each pool that are free or idle in the tree, and not reserved by a sequence."""
        return [pool.room for pool in self.pools]

    def check_room(self, seq: Sequence, n: int) -> None:
        """Raise ContextFullError if ``n`` tokens more do not fit the context, NoRoomError if there
        are no pages for them now. What has retired gives way.
        """
        self.check_context(len(seq.ids) + n)
        self._check_wanted(seq, self._wanted(seq, n, min(n, self.n_batch)))

    def reserve(self, seq: Sequence, n: int) -> None:
        """Keep pages for ``n`` tokens more of ``seq``, in place of what was kept for it before, so
        that nobody else takes them; in a pool with a window for one batch. Raises NoRoomError, with
        nothing changed.
        """
        wanted = [0] * len(self.pools)
        if n:
            wanted = self._wanted(seq, n, min(n, self.n_batch))
            self._check_wanted(seq, wanted)
            if self.states and not seq.slots:
                seq.slots = self.slots.take()
        for pool, new, old in zip(self.pools, wanted, seq.promised, strict=True):
            pool.promised += new - old
        seq.promised = wanted

    def _wanted(self, seq: Sequence, n: int, n_window: int, first: Ids[int] = ()) -> list[int]:
        """Pages of each pool that ``n`` tokens more take, ``n_window`` where there is a window;
        from page ``first`` of each pool on alone.
        """
        old, wanted = len(seq.ids), []
        for which, (pool, pages) in enumerate(zip(self.pools, seq.pages, strict=True)):
            held = max(len(pages), first[which] if first else 0)
            shared = len(pages) * PAGE > old and pool.holders[pages[-1]] > 1  # to be copied
            end = old + (n_window if pool.window else n)
            wanted.append(max(0, -(-end // PAGE) - held) + shared)
        return wanted

    def _check_wanted(self, seq: Sequence, wanted: list[int]) -> None:
        for pool, n, own in zip(self.pools, wanted, seq.promised, strict=True):
            if n > own and n - own > pool.room:
                self.revive().close()
            if n > own and n - own > pool.room:
                raise self._no_room(pool)
        if not self._may_have_state(seq):
            raise self._no_room(self.states[0])

    def _may_have_state(self, seq: Sequence) -> bool:
        """Whether ``seq`` has a state, or may have one."""
        return not self.states or bool(seq.slots) or self._has_state_room()

    def _has_state_room(self) -> bool:
        """Whether one more sequence may have a state. What has retired gives way."""
        if not self.slots.room:
            self.revive().close()
        return self.slots.room > 0

    def _no_room(self, cells: Pool | StatePool) -> NoRoomError:
        room, cure = f"{self.n_sequences} x {self.n_ctx} tokens", "load with a larger n_sequences="
        if self.n_tokens < self.n_sequences * self.n_ctx:
            what = "tokens" if self.kv_tokens else "bytes"
            room, cure = f"{self.n_tokens} tokens", f"raise kv_{what}="
        return NoRoomError(
            f"no {cells.cell_name} left in {cells.const.name}, which has room for {room}: "
            f"close a session, or {cure}"
        )

    def extend(self, seq: Sequence, ids: Ids[int], first: Ids[int] = ()) -> None:
        """Make room for ``ids`` behind ``seq``'s tokens and count them in; ``first``, where given:
        each pool's first page that there is to be room for.

        Raises ContextFullError or NoRoomError, with nothing changed, where they do not fit.
        """
        n, new = len(ids), len(seq.ids) + len(ids)
        self.check_context(new)
        wanted = self._wanted(seq, n, n, first)
        if any(wanted) or not seq.ids:  # most ids go where others of the same page are
            self._check_wanted(seq, wanted)
            self._own_last_page(seq)
            if self.states and not seq.slots:
                seq.slots = self.slots.take()
            for which, (pool, pages) in enumerate(zip(self.pools, seq.pages, strict=True)):
                while len(pages) * PAGE < new:
                    gone = first and len(pages) < first[which]
                    pages.append(GONE if gone else self._take(pool))
                kept = min(wanted[which], seq.promised[which])
                seq.promised[which] -= kept
                pool.promised -= kept
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
                pages[last] = self._take(pool)
                pool.copy(page, pages[last])
                pool.drop(page)

    def _take(self, pool: Pool) -> int:
        """A free page, held once; if need be one of the tree's that was not used for the longest
        time. The caller knows that there is one.
        """
        if not pool.free:
            self.tree.evict(pool)
        page = pool.free.pop()
        pool.holders[page] = 1
        return page

    def forget(self) -> None:
        """Drop every page that no sequence holds which is in use."""
        self.revive().close()
        self.slots.forget_all()
        for pool in reversed(self.pools):
            while self.tree.evict(pool):
                pass
