"""Memory pools of the KV cache: pages of keys and values, and recurrent states."""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Sequence
from typing import TYPE_CHECKING

from treadle.base.cached_property import cached_property
from treadle.errors import NoMemoryError, TreadleError
from treadle.kernels.page_sizes import PageSizes, rows_of
from treadle.kernels.run_state import PAGE as PAGE
from treadle.kernels.run_state import round_up
from treadle.models.cache_spec import PoolSpec, StateSpec
from treadle.plan.plan import ALIGN, Const, Storage

if TYPE_CHECKING:
    import numpy as np

    from treadle.kernels.attention.page_layout import PageLayout


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


def pages_within(n_bytes: int, full: Sequence[int], sizes: Sequence[int]) -> list[int]:
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
