"""The paged KV cache: sequences, their pages, and prefix sharing.

Layers of the same kind share a pool (``models/config.py``). A sequence has a list of pages per
pool, one page for every PAGE tokens; in a pool with a window it frees the pages that no later token
can see. A full page never changes, so sequences with the same prefix share it: full pages form a
tree (``prefix_tree.py``) that is searched by tokens. The pages of a finished sequence stay in the
tree until their room is needed.

Layers with a recurrent state have slots instead (``StateSlots``). A state can only be rolled
back to a checkpoint, which some nodes of the tree have.
"""

from __future__ import annotations

from array import array
from collections import deque
from collections.abc import Iterator
from collections.abc import Sequence as Seq
from dataclasses import field
from time import time_ns
from typing import TYPE_CHECKING, ClassVar

from treadle.base.fast_classes import cached_property, dataclass
from treadle.errors import ContextFullError, NoRoomError
from treadle.kernels.page_sizes import kv_of, kv_sizes
from treadle.kernels.run_state import PAGE, most_partials
from treadle.kvcache.page_pool import (
    FREED,
    MIN_SAVING,
    MIN_SAVING_AT_BRANCH,
    PARTING,
    RUN,
    SYSTEM,
    Pool,
    StatePool,
    StateSlots,
    last_saved,
    n_saved,
    page_bytes,
    pages_within,
    state_bytes,
)
from treadle.kvcache.prefix_tree import (
    NOTHING_REUSED,
    OWN,
    Lora,
    PageNode,
    PageStoreLike,
    PageTree,
    n_ids,
)
from treadle.models.config import N_BATCH, PoolSpec, StateSpec

if TYPE_CHECKING:
    from treadle.kvcache.encoded_inputs import EncodedInputs
    from treadle.kvcache.media import MediaRegistry
    from treadle.models.switch import ControlTokens, Mark
    from treadle.plan.plan import Storage


N_TEXTS = 128  # texts per run in non-causal models: one partial page each
# A pool without layers, which counts tokens if every layer has a window.
TEXT = PoolSpec("text", (), 0, 0, 0, 0)


@dataclass(eq=False)
class EncodedKeys:
    """The pages with keys and values of an encoder's rows; any number of sequences attend to them.
    The last holder to call ``drop`` releases the pages.
    """

    cache: KVCache
    n_keys: int
    pages: list[array[int]]  # per pool of ``KVCache.cross``, i64
    is_stored: bool = False  # whether the pages have been written
    holders: int = 0

    def hold(self) -> EncodedKeys:
        """Add a holder; return self."""
        self.holders += 1
        return self

    def drop(self) -> None:
        """Remove a holder; the last one releases the pages."""
        self.holders -= 1
        if self.holders:
            return
        for pool, pages in zip(self.cache.cross, self.pages, strict=True):
            for page in pages:
                pool.drop(page)
        self.pages = []


@dataclass(eq=False)
class Sequence:
    """The tokens of one request or session in the KV cache, with its pages in each pool."""

    cache: KVCache
    ids: list[int] = field(default_factory=list)  # tokens with keys and values
    pages: list[array[int]] = field(default_factory=list)  # per pool, i64
    slots: list[int] = field(default_factory=list)  # of its state: current, and to be written next
    n_state: int = 0  # number of ids that its state includes
    nodes: list[PageNode] = field(default_factory=list)  # full pages in the tree, from the root
    reserved: list[int] = field(default_factory=list)  # pages per pool, reserved and not yet taken
    lora: Lora = ()  # its adapters and control vectors
    # The encoder's rows that its tokens attend to, in a model with cross attention; the sequence is
    # one of their holders. Its keys and values depend on them, so no other sequence shares these.
    encoded: EncodedKeys | None = None
    # After each picture whose tokens share positions: the index behind it, and position minus index
    # from there on (``MediaRegistry.add_shifts``).
    shifts: list[tuple[int, int]] = field(default_factory=list)
    marks: list[Mark] = field(default_factory=list)  # of its control tokens (models/switch.py)
    n_drafted: int = 0  # drafted ids at the end, which may be dropped
    is_unshared: bool = False  # uses no other sequence's pages; its own are shared once it retires
    n_changes: int = 0  # counter of changes to ids: an unchanged counter means unchanged ids
    began_ns: int = field(default_factory=time_ns)  # time of its start or last lookup
    # Lengths in tokens, 0: none.
    system_end: int = 0  # of the system prompt: its state is worth a checkpoint
    branch_point: int = 0  # where it parts from cached texts: its state is worth a checkpoint
    tail_end: int = 0  # of its last checkpoint within a page
    prompt_end: int = 0  # of the last checkpoint in the prompt, which another answer starts from
    # Origin of its state at the last ``KVCache.match``: see ``PrefixHit.state``.
    state_from: str | None = None

    def __len__(self) -> int:
        return len(self.ids)

    def close(self) -> None:
        """Release the pages and the reservation; full pages stay in the prefix tree until their
        room is needed.
        """
        self.cache.truncate(self, 0)
        self.cache.reserve(self, 0)
        if self.encoded is not None:
            self.encoded.drop()
            self.encoded = None

    def attend_to(self, encoded: EncodedKeys) -> None:
        """Make this empty sequence attend to an encoder's rows. It becomes one of their holders, in
        place of the caller.
        """
        self.encoded = encoded
        self.is_unshared = True


class AbandonedSequences(deque[Sequence]):
    """Sequences of sessions that were garbage-collected (in any thread) without being closed."""

    def close(self) -> None:
        """Close these sequences, which releases their pages; called under the engine's lock."""
        while self:
            self.popleft().close()


def pages_of(n_ctx: int, window: int, n_batch: int = N_BATCH) -> int:
    """Return the most pages of one sequence of ``n_ctx`` tokens in a pool. With a window: pages of
    one window, one run of ``n_batch`` tokens, and one more window kept for prefix reuse.
    """
    most = -(-n_ctx // PAGE) + 1
    return min(most, -(-(2 * window + n_batch) // PAGE) + 2) if window else most


def sequence_bytes(specs: Seq[PoolSpec | StateSpec], n_ctx: int, kv: str = "f16") -> int:
    """Return the bytes that pools and state slots of these ``specs`` take for one sequence of
    ``n_ctx`` tokens. ``kv``: the type of keys and values.
    """
    pools = [spec for spec in specs if isinstance(spec, PoolSpec) and not spec.n_keys]
    states = sum(state_bytes(spec) for spec in specs if isinstance(spec, StateSpec))
    pages = sum(page_bytes(spec, kv) * pages_of(n_ctx, spec.window) for spec in pools)
    pages += sum(
        page_bytes(spec, kv) * -(-spec.n_keys // PAGE)
        for spec in specs
        if isinstance(spec, PoolSpec) and spec.n_keys
    )
    return pages + states * StateSlots(1, n_saved(states)).n_slots


class KVCache:
    """The pools of one model, with room for ``n_sequences`` sequences of at most ``n_ctx`` tokens
    each; ``kv_tokens`` limits the tokens of all sequences, ``kv_bytes`` the bytes of all pages
    (None: no limit).

    specs: the pools and states that the model's layers need. kv: the type of keys and values.
    n_batch: tokens that a run writes before pages are freed.
    n_encoded: prompts of an encoder whose keys and values fit at once, by default ``n_sequences``.
    n_vocab: size of the vocabulary; ids of pictures' and sounds' rows are above it.
    """

    is_borrowed: ClassVar[bool] = False  # whether its pages are another model's, and read-only

    def __init__(
        self,
        specs: Seq[PoolSpec | StateSpec],
        device: Storage,
        n_ctx: int,
        kv: str = "f16",
        n_sequences: int = 1,
        kv_bytes: int | None = None,
        n_batch: int = N_BATCH,
        kv_tokens: int | None = None,
        n_vocab: int = 0,
        n_encoded: int | None = None,
    ) -> None:
        self.kv = kv = kv_of(*(fmt.name for fmt in kv_sizes(kv)))
        self.n_ctx = n_ctx
        self.n_sequences = n_sequences
        self.n_batch = n_batch
        self.kv_tokens = min(kv_tokens, n_sequences * n_ctx) if kv_tokens else None
        pools = [spec for spec in specs if isinstance(spec, PoolSpec) and not spec.n_keys]
        encoded = [spec for spec in specs if isinstance(spec, PoolSpec) and spec.n_keys]
        if all(spec.window for spec in pools):
            pools.append(TEXT)
        if all(spec.causal for spec in pools):
            most = n_sequences - -(kv_tokens or 1 << 40) // PAGE  # one partial page per sequence
            n_pages = [min(self._n_pages(spec.window) * n_sequences, most) for spec in pools]
        else:  # no page is freed before its text ends
            n_pages = [self._n_pages(0) * n_sequences + N_TEXTS for _ in pools]
        n_inputs = n_sequences if n_encoded is None else n_encoded
        most = n_inputs - -(kv_tokens or 1 << 40) // PAGE  # one partial page per input
        n_pages += [min(n_inputs * -(-spec.n_keys // PAGE), most) for spec in encoded]
        specs_paged = [*pools, *encoded]
        if kv_bytes is not None:
            sizes = [page_bytes(spec, kv) for spec in specs_paged]
            n_pages = pages_within(kv_bytes, n_pages, sizes)
        sized = enumerate(zip(specs_paged, n_pages, strict=True))
        every = [Pool(device, spec, index, kv, n) for index, (spec, n) in sized]
        self.pools = every[: len(pools)]
        self.cross = every[len(pools) :]
        self.windows = [pool for pool in self.pools if pool.window]
        # All full-attention pools have the same number of free pages; keep one as the
        # representative.
        self._whole = next(pool for pool in self.pools if not pool.window)
        stateful = [spec for spec in specs if isinstance(spec, StateSpec)]
        self.slots = StateSlots(n_sequences, n_saved(sum(map(state_bytes, stateful))))
        self.states = [StatePool(device, spec, self.slots.n_slots) for spec in stateful]
        indices = [pool for pool in self.pools if pool.spec.index]
        self._index_pool_of = {layer: pool for pool in indices for layer in pool.layers}
        units = [pool for pool in self.pools if pool.spec.unit > 1 and not pool.spec.index]
        self._unit_pool_of = {layer: pool for pool in units for layer in pool.layers}
        others = [pool for pool in self.pools if pool not in (*indices, *units)]
        self._pool_of = {layer: pool for pool in others for layer in pool.layers}
        self._cross_of = {layer: pool for pool in self.cross for layer in pool.layers}
        self._states_of = {
            (layer, each.spec.beside): each for each in self.states for layer in each.layers
        }
        self._retired: Sequence | None = None
        self.abandoned = AbandonedSequences()
        self.tree = PageTree(self.pools, self.slots if self.states else None)
        self.store: PageStoreLike | None = None  # full pages on disk
        self.lora: Lora = ()  # default of new sequences
        self._n_vocab = n_vocab
        self.control_tokens: ControlTokens | None = None  # that choose adapters within the model

    @cached_property
    def media(self) -> MediaRegistry:
        """The pictures and sounds whose rows texts may have as tokens. Imported on first use: most
        texts have none.
        """
        from treadle.kvcache.media import MediaRegistry

        return MediaRegistry(self._n_vocab)

    def has_media(self, ids: Seq[int]) -> bool:
        """Return whether any of ``ids`` is a row of a picture or sound."""
        return "media" in self.__dict__ and self.media.any_in(ids)

    @cached_property
    def inputs(self) -> EncodedInputs:
        """The encoded prompts of an encoder-decoder model. Imported on first use: most models have
        no encoder.
        """
        from treadle.kvcache.encoded_inputs import EncodedInputs

        return EncodedInputs(self)

    def _n_pages(self, window: int) -> int:
        return pages_of(self.n_ctx, window, self.n_batch)

    def pool_of(self, layer: int) -> Pool:
        """Return the pool with a layer's keys and values."""
        return self._pool_of[layer]

    def index_pool_of(self, layer: int) -> Pool:
        """Return the pool with the keys of a layer's indexer."""
        return self._index_pool_of[layer]

    def unit_pool_of(self, layer: int) -> Pool:
        """Return the pool with a layer's compressed rows, one row per unit of several tokens."""
        return self._unit_pool_of[layer]

    def cross_of(self, layer: int) -> Pool:
        """Return the pool with a layer's keys and values of an encoder's rows (cross attention)."""
        return self._cross_of[layer]

    def states_of(self, layer: int, *, beside: bool = False) -> StatePool:
        """Return the pool with the recurrent states of a layer's mixer; with ``beside``, the pool
        with the layer's other states (``StateSpec.beside``).
        """
        return self._states_of[layer, beside]

    @property
    def n_tokens(self) -> int:
        """Maximum number of tokens of all sequences together."""
        return min(self._whole.n_pages * PAGE, self.kv_tokens or self.n_sequences * self.n_ctx)

    @property
    def n_bytes(self) -> int:
        """Bytes reserved for all pools; the OS allocates memory on first write."""
        return sum(cells.n_bytes for cells in (*self.pools, *self.cross, *self.states))

    def max_partials(self, n_tokens: int, pool: Pool) -> int:
        """Return the most partial results of attention over the keys in ``pool``, one per split of
        a token's keys, that a batch of ``n_tokens`` can have.
        """
        n_keys = pool.spec.n_keys or min(self.n_ctx, pool.window or self.n_ctx)
        return most_partials(n_tokens, n_keys)

    def encoded(self, n_keys: int) -> EncodedKeys:
        """Take pages for the keys and values of an encoder's ``n_keys`` rows; return them with no
        holder and not written yet. Raises NoRoomError, with nothing taken, if too few pages are
        free.
        """
        n = -(-n_keys // PAGE)
        for pool in self.cross:
            if n > len(pool.free):
                raise NoRoomError(
                    f"{n} pages for an encoder's {n_keys} rows, and {len(pool.free)} are free "
                    f"({pool.const.name}): close others first"
                )
        pages = [array("q", [self._take(pool) for _ in range(n)]) for pool in self.cross]
        return EncodedKeys(self, n_keys, pages)

    # -- prefix reuse ------------------------------------------------------------------------------

    def sequence(self, ids: Seq[int] = (), lora: Lora | None = None) -> Sequence:
        """Return a new sequence that holds the longest cached prefix of ``ids``, without the last
        id. ``lora``: its adapters and control vectors; None: the cache's default, ``self.lora``.
        """
        made = Sequence(self, [], [array("q") for _ in self.pools], reserved=[0] * len(self.pools))
        made.lora = self.lora if lora is None else lora
        self.match(made, ids)
        return made

    def retire(self, seq: Sequence) -> None:
        """Keep a finished sequence, so that a prompt with the same prefix reuses its pages, the
        partial last one included. It is closed when another sequence retires or its pages are
        needed. A sequence with an encoder's rows is closed at once.
        """
        if seq.encoded is not None:
            return seq.close()
        self.release_reservation(seq)
        if self._retired is not None:
            self._retired.close()
        self._retired = seq
        return None

    def release_reservation(self, seq: Sequence) -> None:
        """Release the reserved pages of an idle sequence, and enter its full pages in the prefix
        tree.
        """
        self.reserve(seq, 0)
        if seq.is_unshared and seq.encoded is None:
            seq.is_unshared = False
            self._enter(seq, len(seq.ids))

    def revive(self, lora: Lora | None = None) -> Sequence:
        """Return the retired sequence if its adapters are ``lora`` (None: whatever they are); else
        a new sequence.
        """
        self.abandoned.close()
        if self._retired is None or lora not in (None, self._retired.lora):
            return self.sequence((), lora)
        seq = self._retired
        self._retired = None
        return seq

    def match(self, seq: Sequence, ids: Seq[int]) -> int:
        """Make ``seq`` hold the longest prefix of ``ids`` that it or the prefix tree has, without
        the last id, whose logits are to be computed. Return the prefix's length.
        """
        limit = len(ids) - 1
        own = 0
        while own < min(limit, len(seq.ids)) and seq.ids[own] == ids[own]:
            own += 1
        own = self.truncation_length(seq, own)
        found = [] if seq.is_unshared else self.tree.find(ids, limit, seq.lora)
        adopts = n_ids(found) > own and self._may_adopt(seq, found)
        if self.states:
            seq.state_from = self._origin(seq, own, found if adopts else [])
            seq.branch_point = 0
        if adopts:
            self._adopt(seq, found)
        else:
            self.truncate(seq, own)
        if self.store is not None:
            self.store.mark_used(seq)
        return len(seq.ids)

    def _origin(self, seq: Sequence, own: int, adopted: list[PageNode]) -> str:
        """Return the origin of a sequence's state (``PrefixHit.state``). ``adopted``: the nodes
        that it takes from the tree; if empty, it keeps its first ``own`` tokens.
        """
        if adopted:
            return self.slots.place_of(adopted[-1])
        if not own:
            return NOTHING_REUSED
        return OWN if own == len(seq.ids) else self.slots.place_of(seq.nodes[own // PAGE - 1])

    def truncation_length(self, seq: Sequence, n: int) -> int:
        """Return the largest length up to ``n`` to which ``seq`` can be truncated. If layers keep a
        state, this is its last checkpoint; if pages that a window needs are gone, 0.
        """
        if n == len(seq.ids):
            return n
        if self.states:
            n = last_saved(seq.nodes[: n // PAGE])
        for pool in self.windows:
            if FREED in seq.pages[pool.index][pool.first_seen(n) : -(-n // PAGE)]:
                return 0
        return n

    def n_cached_tokens(self, ids: Seq[int], lora: Lora = ()) -> int:
        """Return the number of tokens that ``match`` would find in the prefix tree for a sequence
        with the adapters and control vectors ``lora``.
        """
        return n_ids(self.tree.find(ids, len(ids) - 1, lora))

    def _may_adopt(self, seq: Sequence, chain: list[PageNode]) -> bool:
        """Return whether a sequence can take over a chain of nodes: no other sequence has reserved
        the chain's idle pages, and a state slot is free.
        """
        return self._may_have_state(seq) and (
            not any(pool.reserved for pool in self.pools)
            or all(
                sum(pool.is_idle(node.pages[which]) for node in chain if node.pages[which] != FREED)
                <= pool.n_available
                for which, pool in enumerate(self.pools)
            )
        )

    def _adopt(self, seq: Sequence, chain: list[PageNode]) -> None:
        """Replace the tokens and pages of ``seq`` by those of a chain of nodes, and its state by
        the chain's checkpoint.
        """
        seq.n_changes += 1
        n = n_ids(chain)
        for pool, pages in zip(self.pools, seq.pages, strict=True):
            old = list(pages)
            first = pool.first_seen(n)
            pages[:] = array("q", [FREED] * first)
            pages.extend(node.pages[pool.index] for node in chain[first:])
            for page in pages:
                pool.hold(page)
            for page in old:
                pool.drop(page)
            self.tree.touch(pool, chain[first:])
        if self.states and seq.slots:
            self.slots.rewind(seq.slots, chain[-1])
        elif self.states:
            seq.slots = self.slots.allocate(chain[-1])
        seq.ids[:] = [token for node in chain for token in node.ids]
        seq.nodes[:] = chain[: n // PAGE]
        seq.n_state = n
        seq.tail_end = n if n % PAGE else 0
        seq.shifts.clear()
        seq.marks.clear()
        self._note(seq, 0)

    def commit(self, seq: Sequence) -> None:
        """Finish a run: enter full pages in the tree, free pages before the window, and make the
        state that the run wrote the current one.

        Drafted tokens are left out: a state that includes some becomes current at a later call,
        once they are accepted, or is undone by ``truncate`` to ``n_state``.
        """
        n = len(seq.ids) - seq.n_drafted
        if not seq.is_unshared:
            self._enter(seq, n)
        # A sequence whose state cannot drop wrong drafts goes back to where the run began.
        least = seq.n_state if self.states and seq.n_drafted else n
        for pool in self.windows:
            pages = seq.pages[pool.index]
            for p in range(pool.first_seen(least) - 1, -1, -1):
                if pages[p] == FREED:
                    break
                pool.drop(pages[p])
                pages[p] = FREED
        if self.states and n == len(seq.ids):
            self.slots.advance(seq.slots)
            self._save_state(seq)
            seq.n_state = n

    def _save_state(self, seq: Sequence) -> None:
        """Keep a checkpoint of the current state if the sequence ends at a page edge, after a run
        of several tokens, every MIN_SAVING tokens, or where prompts part; or at the end of the
        system prompt.
        """
        n = len(seq.ids)
        place = {seq.branch_point: PARTING, seq.system_end: SYSTEM}.get(n, RUN)
        if n % PAGE:
            if place == SYSTEM and not seq.is_unshared:
                self._save_tail(seq)
        elif seq.nodes and (place != RUN or n - seq.n_state > 1 or not n % MIN_SAVING):
            self.slots.save(seq.nodes[-1], seq.slots[0], place)
            if n - seq.n_state >= PAGE:
                seq.prompt_end = n
            if place == RUN:
                self.slots.thin_checkpoints(seq.nodes, seq.prompt_end)

    def _save_tail(self, seq: Sequence) -> None:
        """Keep the state at the end of a sequence, within a page, as a checkpoint with a copy of
        that page. Without a free page nothing is kept.
        """
        parent = seq.nodes[-1] if seq.nodes else None
        ids = tuple(seq.ids[len(seq.nodes) * PAGE :])
        known = (parent or self.tree.root_of(seq.lora)).next.get(ids)
        if known is not None and FREED not in known.pages:  # its state alone was evicted
            self.slots.save(known, seq.slots[0], SYSTEM)
            seq.tail_end = len(seq.ids)
            return
        if any(pool.n_available < 1 for pool in self.pools):
            return
        copies = [self._take(pool) for pool in self.pools]  # may evict nodes: enter afterwards
        node = self.tree.enter(parent, ids, seq.lora)
        for pool, pages, copy in zip(self.pools, seq.pages, copies, strict=True):
            if node.pages[pool.index] == FREED:
                pool.copy(pages[-1], copy)
                self.tree.set_page(node, pool, copy)
            pool.drop(copy)
        self.slots.save(node, seq.slots[0], SYSTEM)
        seq.tail_end = len(seq.ids)

    def _enter(self, seq: Sequence, n: int) -> None:
        """Enter the full pages of a sequence's first ``n`` tokens in the prefix tree, and queue
        them for page files.
        """
        for p in range(len(seq.nodes), n // PAGE):
            ids = tuple(seq.ids[p * PAGE : (p + 1) * PAGE])
            node = self.tree.enter(seq.nodes[-1] if seq.nodes else None, ids, seq.lora)
            self.tree.share(node, seq.pages, p)
            seq.nodes.append(node)
            if self.store is not None:
                self.store.queue_pages(node, p, seq.began_ns)

    def run_length(self, seq: Sequence, ids: Seq[int]) -> int:
        """Return how many of the next ``ids`` to put in one run.

        If layers keep a state, the run ends where a later prompt may need a checkpoint: at the end
        of the system prompt, where another sequence branched off, or at the last page edge if it is
        MIN_SAVING tokens after the last checkpoint. Otherwise see ``MediaRegistry.run_length``.
        """
        if not self.states or seq.is_unshared:
            return self.media.run_length(ids) if self.has_media(ids) else len(ids)
        start = len(seq.ids)
        end = start + len(ids)
        saved = max(last_saved(seq.nodes), seq.tail_end)
        held = len(seq.nodes) * PAGE
        met = held + PAGE * self.tree.n_behind(seq.nodes, [*seq.ids[held:], *ids], seq.lora)
        system = seq.system_end
        cuts = []
        if (
            start < system <= end and system >= MIN_SAVING_AT_BRANCH
        ):  # every question under it saves the rest
            cuts.append(system)
        if (
            met > start
            and met - saved >= MIN_SAVING_AT_BRANCH
            and not (cuts and met == system // PAGE * PAGE)
        ):
            seq.branch_point = met
            cuts.append(met)
        if cuts:
            return min(cuts) - start
        last = end // PAGE * PAGE
        return last - start if last - saved >= MIN_SAVING else len(ids)

    def chunks(self, ids: Seq[int], n: int) -> Iterator[Seq[int]]:
        """Yield ``ids`` in slices of about ``n`` tokens, one for each run; none ends inside a
        bidirectional span, so a slice may be shorter or longer.
        """
        at = 0
        has_media = self.has_media(ids)
        while at < len(ids):
            chunk = ids[at : at + n]
            end = at + (self.media.run_length(chunk) if has_media else len(chunk))
            yield ids[at:end]
            at = end

    # -- room --------------------------------------------------------------------------------------

    def truncate(self, seq: Sequence, n: int) -> None:
        """Drop all but the first ``n`` tokens of ``seq``; ``n`` must be a length that
        ``truncation_length`` returns, or ``seq.n_state``.
        """
        seq.n_changes += 1
        keep = -(-n // PAGE)
        for pool, pages in zip(self.pools, seq.pages, strict=True):
            for page in pages[keep:]:
                pool.drop(page)
            del pages[keep:]
        if n and seq.slots and n != seq.n_state:
            self.slots.rewind(seq.slots, seq.nodes[n // PAGE - 1])
        elif not n:
            self.slots.release(seq.slots)
        del seq.ids[n:]
        while seq.shifts and seq.shifts[-1][0] > n:
            seq.shifts.pop()
        while seq.marks and seq.marks[-1][0] > n:
            seq.marks.pop()
        del seq.nodes[n // PAGE :]
        seq.n_state = n
        if n < seq.tail_end:
            seq.tail_end = 0

    def fork(self, seq: Sequence) -> Sequence:
        """Return a second sequence with the same tokens. They share all pages; the first that
        writes to the last page copies it. Raises NoRoomError without a free state slot.
        """
        if seq.slots and not self._has_state_room():
            raise self._no_room_error(self.states[0])
        slots = self.slots.fork(seq.slots) if seq.slots else []
        lists = [p[:] for p in seq.pages]
        nodes = list(seq.nodes)
        none = [0] * len(seq.pages)
        made = Sequence(self, list(seq.ids), lists, slots, seq.n_state, nodes, none, seq.lora)
        made.shifts = list(seq.shifts)
        made.marks = list(seq.marks)
        if seq.encoded is not None:
            made.attend_to(seq.encoded.hold())
        made.tail_end = seq.tail_end
        made.prompt_end = seq.prompt_end
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

    def available_pages(self) -> list[int]:
        """Return, per pool, the number of pages that can still be taken: free, or idle in the tree,
        and not reserved.
        """
        return [pool.n_available for pool in self.pools]

    def check_room(self, seq: Sequence, n: int) -> None:
        """Raise ContextFullError if ``n`` more tokens of ``seq`` exceed the context, NoRoomError if
        there are no pages for them now. Evicts the retired sequence if necessary.
        """
        self.check_context(len(seq.ids) + n)
        self._make_available(seq, self._pages_to_take(seq, n, min(n, self.n_batch)))

    def reserve(self, seq: Sequence, n: int) -> None:
        """Reserve pages for ``n`` more tokens of ``seq`` (0: none), in place of its previous
        reservation; in a pool with a window, for one run's tokens only. Raises NoRoomError, with
        nothing changed.
        """
        wanted = [0] * len(self.pools)
        if n:
            wanted = self._make_available(seq, self._pages_to_take(seq, n, min(n, self.n_batch)))
            if self.states and not seq.slots:
                seq.slots = self.slots.allocate()
        for pool, new, old in zip(self.pools, wanted, seq.reserved, strict=True):
            pool.reserved += new - old
        seq.reserved = wanted

    def _pages_to_take(
        self, seq: Sequence, n: int, n_window: int, first: Seq[int] = ()
    ) -> list[int]:
        """Return, per pool, the number of pages to take for ``n`` more tokens of ``seq``, or for
        ``n_window`` in a pool with a window; one more if the last page is shared, for its copy.
        ``first``: per pool, the index of the first page to take, if earlier ones are not needed.
        """
        old = len(seq.ids)
        wanted = []
        for which, (pool, pages) in enumerate(zip(self.pools, seq.pages, strict=True)):
            held = max(len(pages), first[which] if first else 0)
            shared = len(pages) * PAGE > old and pool.holders[pages[-1]] > 1  # to be copied
            end = old + (n_window if pool.window else n)
            wanted.append(max(0, -(-end // PAGE) - held) + shared)
        return wanted

    def _make_available(self, seq: Sequence, wanted: list[int]) -> list[int]:
        """Return ``wanted``, the pages to take per pool, if they are available. Makes room by
        closing the retired sequence, or by removing a tail of the tree that shares the last page:
        then one page less per pool. Raises NoRoomError.
        """
        for pool, n, own in zip(self.pools, wanted, seq.reserved, strict=True):
            if n > own and n - own > pool.n_available:
                self.revive().close()
            if n > own and n - own > pool.n_available:
                if not self._take_over_tail(seq):
                    raise self._no_room_error(pool)
                # The last page need not be copied.
                return self._make_available(seq, [each - 1 for each in wanted])
        if not self._may_have_state(seq):
            raise self._no_room_error(self.states[0])
        return wanted

    def _take_over_tail(self, seq: Sequence) -> bool:
        """Remove the tree's tail that has the same last pages as ``seq``, if no other sequence
        holds them: ``seq`` then writes to these pages without a copy. Return whether there was one.
        """
        if not (self.states and len(seq.ids) % PAGE):
            return False
        last = [pages[-1] for pages in seq.pages]
        tail = self.tree.tail_of(seq.nodes[-1] if seq.nodes else None, last[0], seq.lora)
        alone = all(pool.holders[page] == 2 for pool, page in zip(self.pools, last, strict=True))
        if tail is None or not alone:
            return False
        self.tree.drop(tail)
        return True

    def _may_have_state(self, seq: Sequence) -> bool:
        """Return whether ``seq`` has a state, can get one, or needs none."""
        return not self.states or bool(seq.slots) or self._has_state_room()

    def _has_state_room(self) -> bool:
        """Return whether one more sequence can have a state. Evicts the retired sequence if
        necessary.
        """
        if not self.slots.room:
            self.revive().close()
        return self.slots.room > 0

    def _no_room_error(self, cells: Pool | StatePool) -> NoRoomError:
        room = f"{self.n_sequences} x {self.n_ctx} tokens"
        cure = "load with a larger n_sequences="
        if self.n_tokens < self.n_sequences * self.n_ctx:
            what = "tokens" if self.kv_tokens else "bytes"
            room = f"{self.n_tokens} tokens"
            cure = f"raise kv_{what}="
        return NoRoomError(
            f"the KV cache is full ({cells.const.name}: no free {cells.cell_name}; capacity "
            f"{room}): close a session, or {cure}"
        )

    def extend(self, seq: Sequence, ids: Seq[int], first: Seq[int] = ()) -> None:
        """Append ``ids`` to ``seq``, and take pages for them. ``first``: per pool, the index of the
        first page to take; earlier ones that ``seq`` lacks are marked FREED.

        Raises ContextFullError or NoRoomError, with nothing changed, if the ids do not fit.
        """
        n = len(ids)
        new = len(seq.ids) + len(ids)
        self.check_context(new)
        wanted = self._pages_to_take(seq, n, n, first)
        if any(wanted) or not seq.ids:  # usually the last page has room
            wanted = self._make_available(seq, wanted)
            self._own_last_page(seq)
            if self.states and not seq.slots:
                seq.slots = self.slots.allocate()
            for which, (pool, pages) in enumerate(zip(self.pools, seq.pages, strict=True)):
                while len(pages) * PAGE < new:
                    gone = first and len(pages) < first[which]
                    pages.append(FREED if gone else self._take(pool))
                kept = min(wanted[which], seq.reserved[which])
                seq.reserved[which] -= kept
                pool.reserved -= kept
        seq.ids.extend(ids)
        seq.n_changes += 1
        self._note(seq, new - n)

    def _note(self, seq: Sequence, start: int) -> None:
        """Record two things about the ids of ``seq`` from index ``start`` on: which are control
        tokens, and how pictures among them shift the positions of later tokens.
        """
        if self.control_tokens is not None:
            self.control_tokens.add_marks(seq.marks, seq.ids, start)
        if self.has_media(seq.ids[start:] if start else seq.ids):
            self.media.add_shifts(seq.shifts, seq.ids, start)

    def _own_last_page(self, seq: Sequence) -> None:
        """Copy the last page before writing to it, if it is shared."""
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
        """Take a page with one holder: a free one, or else an evicted one of the tree. The caller
        has checked that one is available.
        """
        if not pool.free:
            self.tree.evict(pool)
        page = pool.free.pop()
        pool.holders[page] = 1
        return page

    def forget(self) -> None:
        """Evict all pages and checkpoints that no sequence in use holds."""
        self.revive().close()
        if self.cross:
            self.inputs.forget()
        self.slots.forget_all()
        for pool in reversed(self.pools):
            while self.tree.evict(pool):
                pass
