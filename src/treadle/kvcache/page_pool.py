"""Memory pools of the KV cache: pages of keys and values, and recurrent states.

Slots of states: a sequence with a state holds two. A run reads one and writes the other, and they
are swapped when the run has succeeded. The slot that is read may have other holders: a fork, or a
node of the page tree whose checkpoint it is. Then it is never written to, so a checkpoint needs no
copy.

Checkpoints are at page edges: at the end of a prefill run, at intervals during decoding, and where
two prompts part; and at the end of a system prompt, which may lie within a page. Those of a long
text are thinned out. When a slot is needed, a checkpoint is dropped: first the least recently used
of those that no later prompt has used, so that one long text cannot evict the states that many
prompts begin with.
"""

from __future__ import annotations

from bisect import bisect_right
from collections import OrderedDict
from collections.abc import Sequence as Seq
from itertools import chain as joined
from itertools import pairwise
from typing import TYPE_CHECKING

from treadle.base.fast_classes import cached_property
from treadle.errors import NoMemoryError, TreadleError
from treadle.kernels.page_sizes import PageSizes, rows_of
from treadle.kernels.run_state import PAGE as PAGE
from treadle.kernels.run_state import round_up
from treadle.models.config import PoolSpec, StateSpec
from treadle.plan.plan import ALIGN, Const, Storage

if TYPE_CHECKING:
    import numpy as np

    from treadle.kernels.attention.page_layout import PageLayout
    from treadle.kvcache.prefix_tree import PageNode


FREED = -1  # page list entry: freed, because it lies before the window


class Cells:
    """``n`` cells of equal size (pages or states); each cell has a part for every layer. Memory is
    reserved at once; the OS allocates it on first write.
    """

    what: str  # for messages
    cell_name: str  # "page" or "state", for messages

    def __init__(
        self, device: Storage, name: str, layers: tuple[int, ...], layer_bytes: int, n: int
    ) -> None:
        self._device = device
        self.layers = layers
        self._layer_bytes = layer_bytes
        self.cell_bytes = layer_bytes * len(layers)
        self.n_bytes = n * self.cell_bytes
        try:
            memory = device.memory(self.n_bytes)
        except (MemoryError, ValueError) as error:  # too large for this machine, or for any
            why = f" ({error})" if isinstance(error, NoMemoryError) else ""
            raise TreadleError(
                f"no memory for {self.n_bytes >> 20} MiB of {self.what} ({name}){why}: "
                "lower context= or n_sequences=, or set kv_bytes="
            ) from error
        self.const = Const(name, memory, memory.bytes)

    def layer_off(self, layer: int) -> int:
        """Return the byte offset of a layer's part in a cell."""
        return self.layers.index(layer) * self._layer_bytes

    def read(self, i: int) -> np.ndarray:
        """Return the bytes of cell ``i``, uint8 ``[cell_bytes]``: a copy, or a view that is valid
        until the next run.
        """
        return self.const.memory.read(i * self.cell_bytes, self.cell_bytes)

    def write(self, i: int, data: np.ndarray) -> None:
        """Write the bytes of cell ``i``; only between runs."""
        self.const.memory.write(i * self.cell_bytes, data)

    def copy(self, i: int, to: int) -> None:
        """Copy the bytes of cell ``i`` to cell ``to``."""
        size = self.cell_bytes
        self._device.copy(self.const.memory, to * size, i * size, size)


def page_bytes(spec: PoolSpec, kv: str) -> int:
    """Return the bytes of one page of a pool, over all its layers. ``kv``: the type of keys and
    values.
    """
    return sizes_of(spec, kv).layer_bytes * len(spec.layers)


def state_bytes(spec: StateSpec) -> int:
    """Return the bytes of one recurrent state, over all layers of ``spec``."""
    return round_up(4 * spec.n_values, ALIGN) * len(spec.layers)


def sizes_of(spec: PoolSpec, kv: str) -> PageSizes:
    """Return the sizes of one layer's part of a page in a pool of ``spec``. ``kv``: the type of
    keys and values.
    """
    sizes = spec.n_head_kv, spec.head_dim, spec.head_dim_v
    return PageSizes(kv, *sizes, spec.latent, rows_of(spec.unit))


def pages_within(n_bytes: int, full: Seq[int], sizes: Seq[int]) -> list[int]:
    """Return how many pages each pool gets within ``n_bytes``. ``full``: the most pages that a pool
    needs; ``sizes``: bytes of a page. Each pool gets the same number of pages, up to its ``full``.

    Raises TreadleError if there is no room for a page of each.
    """

    def pages(most: int) -> list[int]:
        return [min(most, n) for n in full]

    def n_bytes_of(most: int) -> int:
        return sum(n * size for n, size in zip(pages(most), sizes, strict=True))

    most = bisect_right(range(max(full) + 1), n_bytes, key=n_bytes_of) - 1
    if not most:
        raise TreadleError(
            f"kv_bytes={n_bytes}: expected at least {sum(sizes)} ({-(-sum(sizes) >> 20)} MiB), a "
            f"page of {PAGE} tokens in every layer"
        )
    return pages(most)


class Pool(Cells):
    """The pages of layers of one shape, with a count of holders for each page: sequences and the
    prefix tree share pages.
    """

    what = "keys and values"
    is_borrowed = False  # whether it is another model's pool, which runs read and do not write
    cell_name = "page"

    def __init__(self, device: Storage, spec: PoolSpec, index: int, kv: str, n_pages: int) -> None:
        self.spec = spec
        self.index = index
        self.window = spec.window
        self.causal = spec.causal
        self.chunk = spec.window if spec.chunked else 0
        self.n_pages = n_pages
        self._sizes = sizes_of(spec, kv)
        super().__init__(device, spec.name, spec.layers, self._sizes.layer_bytes, n_pages)
        self.free = list(range(n_pages - 1, -1, -1))
        self.holders = [0] * n_pages
        self._in_tree = [False] * n_pages  # whether the tree is one of a page's holders
        self.idle = 0  # pages that only the tree holds: evicted when room is needed
        self.reserved = 0  # pages reserved by sequences and not yet taken

    @cached_property
    def layout(self) -> PageLayout:
        """The layout of a page; runs of stored plans do not import it."""
        from treadle.kernels.attention.page_layout import PageLayout

        return PageLayout(**vars(self._sizes))

    def first_seen(self, n: int) -> int:
        """Return the index of the first page that the last of ``n`` tokens may attend to, 0 without
        a window. Later tokens need no earlier page.
        """
        return max(0, n - self.window) // PAGE if self.window else 0

    @property
    def n_available(self) -> int:
        """Pages that can be taken: free or idle, and not reserved. Taking an idle page evicts it
        from the tree.
        """
        return len(self.free) + self.idle - self.reserved

    def is_idle(self, page: int) -> bool:
        """Return whether the prefix tree is the only holder of a page."""
        return self.holders[page] == 1 and self._in_tree[page]

    def hold(self, page: int) -> None:
        """Add a holder to a page, unless it is FREED."""
        if page != FREED:
            self.idle -= self.is_idle(page)
            self.holders[page] += 1

    def drop(self, page: int) -> None:
        """Remove a holder from a page; without holders the page is free."""
        if page != FREED:
            self.holders[page] -= 1
            if not self.holders[page]:
                self.free.append(page)
            self.idle += self.is_idle(page)

    def hold_in_tree(self, page: int) -> None:
        """Add the prefix tree as a holder of a page that a sequence holds."""
        if page != FREED:
            self.holders[page] += 1
            self._in_tree[page] = True

    def drop_from_tree(self, page: int) -> None:
        """Remove the prefix tree as a holder of a page."""
        if page != FREED:
            self.idle -= self.is_idle(page)
            self._in_tree[page] = False
            self.drop(page)


class StatePool(Cells):
    """The recurrent states of layers of one shape, one cell per slot of ``StateSlots``."""

    what = "states"
    cell_name = "state"

    def __init__(self, device: Storage, spec: StateSpec, n: int) -> None:
        self.spec = spec
        size = state_bytes(spec) // len(spec.layers)
        super().__init__(device, spec.name, spec.layers, size, n)


# -- slots of states -----------------------------------------------------------------------------

# minimum tokens that a checkpoint must save a later prompt if it costs an extra run
MIN_SAVING = 8 * PAGE
MIN_SAVING_AT_BRANCH = 2 * PAGE  # the same, at a known branching point of prompts
SAVED_BYTES, SAVED = 256 << 20, range(4, 65)  # memory and number of checkpoints
NO_CHECKPOINT = -1  # a node without a checkpoint
# Places of a checkpoint.
RUN = "run"  # the end of a run, or an interval of a text that is written
SYSTEM = "system"  # the end of a system prompt
PARTING = "parting"  # the place where two prompts part


def n_saved(state_bytes: int) -> int:
    """Return how many checkpoints to keep, given the bytes of a state: SAVED_BYTES of them, within
    the range SAVED.
    """
    return min(max(SAVED_BYTES // max(state_bytes, 1), SAVED.start), SAVED.stop - 1)


def last_saved(chain: Seq[PageNode]) -> int:
    """Return the number of tokens up to the last checkpoint of a chain of full pages; 0 without
    one.
    """
    return PAGE * next(
        (p for p in range(len(chain), 0, -1) if chain[p - 1].state != NO_CHECKPOINT), 0
    )


class StateSlots:
    """Slots for the states of ``n_sequences`` sequences, two each, and ``n_saved`` checkpoints."""

    def __init__(self, n_sequences: int, n_saved: int) -> None:
        self.n_slots = 2 * n_sequences + n_saved
        self.room = n_sequences  # sequences that can still get a state
        self._free = list(range(self.n_slots))
        self._holders = [0] * self.n_slots
        # A segmented LRU of places by node, in each segment least recently used first: checkpoints
        # that no prompt has used since, and those that one has used or is expected to use.
        self._fresh: OrderedDict[PageNode, str] = OrderedDict()
        self._used: OrderedDict[PageNode, str] = OrderedDict()
        self._max_used = n_saved - n_saved // 4  # bound of ``_used``: new ones need room, too

    # -- of sequences ------------------------------------------------------------------------------

    def allocate(self, node: PageNode | None = None) -> list[int]:
        """Return two slots for one more sequence: its state, new or the checkpoint of ``node``, and
        the one to write next. The caller has checked ``room``.
        """
        self.room -= 1
        if node is None:
            return [self._allocate(), self._allocate()]
        self._note_use(node)
        return [self._hold(node.state), self._allocate()]

    def fork(self, slots: list[int]) -> list[int]:
        """Return two slots for a second sequence with the state of ``slots``. The caller has
        checked ``room``.
        """
        self.room -= 1
        return [self._hold(slots[0]), self._allocate()]

    def release(self, slots: list[int]) -> None:
        """Release a sequence's slots, and empty the list."""
        self.room += bool(slots)
        while slots:
            self._drop(slots.pop())

    def advance(self, slots: list[int]) -> None:
        """Swap a sequence's two slots after a run: the one it wrote is the state now. The next run
        writes the other, or a new slot if that one has other holders.
        """
        slots.reverse()
        if self._holders[slots[1]] > 1:
            self._drop(slots[1])
            slots[1] = self._allocate()

    def rewind(self, slots: list[int], node: PageNode) -> None:
        """Reset the state of the sequence with these ``slots`` to the checkpoint of ``node``."""
        self._drop(slots[0])
        slots[0] = self._hold(node.state)
        self._note_use(node)

    # -- of nodes ----------------------------------------------------------------------------------

    @property
    def saved(self) -> list[PageNode]:
        """The nodes with a checkpoint, in the order in which checkpoints are dropped."""
        return [*self._fresh, *self._used]

    def place_of(self, node: PageNode) -> str:
        """Return the place of a node's checkpoint: RUN, SYSTEM or PARTING."""
        return self._used.get(node) or self._fresh[node]

    def save(self, node: PageNode, slot: int, place: str = RUN) -> None:
        """Keep the state in ``slot`` as the checkpoint of ``node``, unless it has one; ``place``:
        RUN, SYSTEM or PARTING.
        """
        if node.state == NO_CHECKPOINT:
            node.state = self._hold(slot)
            self._fresh[node] = place
        if place != RUN or node in self._used:
            self._note_use(node)
        else:
            self._fresh.move_to_end(node)

    def thin_checkpoints(self, chain: Seq[PageNode], prompt_end: int = 0) -> None:
        """Drop checkpoints of a chain of pages that lie close to the one before and the one after,
        if they are at ends of runs, no prompt has used them, and they are not at ``prompt_end``
        tokens.

        The distance that remains is at most half of that to the nearer end of the text, or
        ``2 * MIN_SAVING`` if that is more. So a text of n tokens keeps about ``4 log2(n /
        MIN_SAVING)`` checkpoints.
        """
        at = [p for p, node in enumerate(chain, 1) if node.state != NO_CHECKPOINT]
        before = 0
        for p, after in pairwise(at):
            room = max(2 * MIN_SAVING, min(before, len(chain) - after) * PAGE // 2)
            node = chain[p - 1]
            is_thin = (after - before) * PAGE <= room and p * PAGE != prompt_end
            if is_thin and self._fresh.get(node) == RUN:
                self.forget(node)
            else:
                before = p

    def forget(self, node: PageNode) -> None:
        """Drop a node's checkpoint, if it has one."""
        if node.state != NO_CHECKPOINT:
            segment = self._fresh if node in self._fresh else self._used
            del segment[node]
            self._drop(node.state)
            node.state = NO_CHECKPOINT

    def forget_all(self) -> None:
        """Drop every checkpoint."""
        for node in self.saved:
            self.forget(node)

    def _note_use(self, node: PageNode) -> None:
        """Move a node's checkpoint to the segment of those that prompts use, as the most recently
        used one.
        """
        self._used[node] = self.place_of(node)
        self._used.move_to_end(node)
        self._fresh.pop(node, None)
        if len(self._used) > self._max_used:
            oldest, place = self._used.popitem(last=False)
            self._fresh[oldest] = place

    # -- slots -------------------------------------------------------------------------------------

    def _hold(self, slot: int) -> int:
        self._holders[slot] += 1
        return slot

    def _drop(self, slot: int) -> None:
        self._holders[slot] -= 1
        if not self._holders[slot]:
            self._free.append(slot)

    def _allocate(self) -> int:
        """Take a slot with one holder, dropping a checkpoint if necessary. One is always available:
        sequences hold at most two each, and all other holders are checkpoints.
        """
        if not self._free:
            saved = joined(self._fresh, self._used)
            self.forget(next(node for node in saved if self._holders[node.state] == 1))
        return self._hold(self._free.pop())
