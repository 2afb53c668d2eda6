"""Runs the plans of a tower or a projector on a device.

Keys and values are kept for one layer only: all layers of a run use the same pages. The rows of one
picture (an *item*) attend to each other; a run may have several items. In layers with windows, rows
attend within their window.
"""

from __future__ import annotations

from collections.abc import Callable, Generator, Mapping, Sequence
from dataclasses import replace
from typing import TYPE_CHECKING

import numpy as np

from treadle.base.fast_classes import dataclass
from treadle.base.fork_safety import UseLock
from treadle.engine.batch import Inputs
from treadle.engine.prepared_plan import write_rows
from treadle.engine.step_slices import StepSlices
from treadle.errors import TreadleError
from treadle.kernels.run_state import EACH, ITEM, LINE, PAGE, numbered, round_up, run_offset
from treadle.kvcache.cache import KVCache
from treadle.kvcache.page_pool import Pool
from treadle.models.config import PoolSpec
from treadle.models.towers.tower import GIVEN, STATES, TOWER, checked, deep
from treadle.plan.weights import Weights

if TYPE_CHECKING:
    from treadle.devices.protocol import Device
    from treadle.files.gguf import GGUF
    from treadle.models.towers.config import TowerConfig
    from treadle.plan.plan import DeviceMemory, Plan, Storage

SMALLEST = 256  # rows of the smallest plan; more than attention's "few"
MOST_ROWS = 1 << 15  # of a run
MOST_ITEMS = 64  # of a run
LARGE = 4 << 20  # bytes whose copying takes milliseconds: then a slice of its own
PAGES = "f32"  # format of keys and values
Report = Callable[[float], None]


@dataclass(frozen=True)
class RunItem:
    """Consecutive rows of a run that attend to each other. ``windows``: the first row of each
    window, in ascending order from 0; () for a tower without windows.
    """

    n_rows: int
    windows: tuple[int, ...] = ()


class LayerPool(Pool):
    """A pool whose pages are reused by every layer: a tower never reads a layer's keys again."""

    def __init__(self, device: Storage, spec: PoolSpec, index: int, kv: str, n_pages: int) -> None:
        super().__init__(device, replace(spec, layers=spec.layers[:1]), index, kv, n_pages)
        self.layers = spec.layers

    def layer_off(self, layer: int) -> int:
        """Return 0: all layers have the same part of a page."""
        return 0


class TowerCache(KVCache):
    """The pages of keys and values for the runs of one plan, of up to ``n_rows`` rows. They keep
    nothing between runs, and belong to no sequences. ``kv``: the format of keys and values.
    """

    def __init__(self, specs: Sequence[PoolSpec], device: Storage, n_rows: int, kv: str) -> None:
        self.kv = kv
        self.n_ctx = n_rows
        n_pages = n_rows // PAGE + MOST_ITEMS
        of = enumerate(specs)
        self.pools: list[Pool] = [LayerPool(device, spec, i, kv, n_pages) for i, spec in of]
        self._pool_of = {layer: pool for pool in self.pools for layer in pool.layers}


class TowerInputs(Inputs):
    """The inputs of a tower's runs, in one block of memory that the plan's kernels read."""

    def __init__(self, plan: Plan, cache: TowerCache, storage: Storage) -> None:
        self._cache = cache
        self._tile = plan.query_tile
        n_numbered = max(len(cache.pools), sum(name.startswith("rope") for name in plan.inputs))
        at = round_up(run_offset(numbered(EACH[0], n_numbered)), LINE)
        offsets = {}
        for name, given in plan.inputs.items():
            offsets[name] = at
            at = round_up(at + given.n_bytes, LINE)
        self.memory = storage.memory(at, host=True)
        assert self.memory.bytes is not None
        super().__init__(self.memory.bytes)
        self._pages = offsets.pop("pages")
        for name, offset in offsets.items():
            self._set(name, offset)

    def lay_out(self, items: Sequence[RunItem], ropes: Sequence[np.ndarray]) -> None:
        """Write the inputs of a run whose rows belong to ``items``, one after the other. ``ropes``:
        for each rope table the cosines and sines of every row, f32 ``[n_rows, 2, dims / 2]``.
        """
        n_rows = sum(item.n_rows for item in items)
        for field, count in {"n_tokens": n_rows, "n_outputs": 0, "n_parts": 0}.items():
            self._set(field, count)
        for i, rows in enumerate(ropes):
            self.rope(i, 2 * rows.shape[2])[:] = rows
        pages = self._array_at(self._pages, sum(map(_n_pages, items)), "i8")
        pages[:] = np.arange(len(pages))
        slots = np.empty(n_rows, np.int64)
        row = page = 0
        for item in items:
            slots[row : row + item.n_rows] = page * PAGE + np.arange(item.n_rows)
            row += item.n_rows
            page += _n_pages(item)
        for i, pool in enumerate(self._cache.pools):
            self.kv_indices(i)[:] = slots
            records = self._records(i, items, windowed=bool(pool.window))
            for field in ("n_attn_few", "n_attn_merges"):
                self._set(numbered(field, i), 0)
            self._set(numbered("n_attn_items", i), len(records))
            at = self[numbered("attn_items", i)]
            self._array_at(at, len(records), ITEM)[:] = records

    def _records(self, pool: int, items: Sequence[RunItem], *, windowed: bool) -> np.ndarray:
        """Return the attention items of pool number ``pool``, ``[n]`` of the dtype ITEM: tiles of
        query rows, each with the range of keys that it attends to, which is its window if
        ``windowed``, else its whole item.
        """
        made: list[tuple[int, ...]] = []
        row = page = 0
        at = self[numbered("attn_items", pool)]
        for item in items:
            firsts = item.windows if windowed else (0,)
            for first, end in zip(firsts, (*firsts[1:], item.n_rows), strict=True):
                for position in range(first, end, self._tile):
                    n = min(self._tile, end - position)
                    table = self._pages + 8 * page - at - len(made) * ITEM.itemsize
                    made.append((row + position, n, position, first, end, table, -1, 0))
            row += item.n_rows
            page += _n_pages(item)
        return np.array(made, ITEM)

    def _set(self, field: str, value: int) -> None:
        self._array_at(run_offset(field), 1, "i8")[0] = value


def _n_pages(item: RunItem) -> int:
    return -(-item.n_rows // PAGE)


class TowerPlan:
    """A plan for runs of up to a fixed number of rows, ready to run: kernels compiled, buffers in
    an arena.
    """

    def __init__(self, plan: Plan, inputs: TowerInputs) -> None:
        self.plan = plan
        self.inputs = inputs

    def place(self, arena: DeviceMemory, device: Device) -> None:
        """Place the plan's buffers in the memory ``arena`` of ``device``; prepare its kernels."""
        self.program = device.ready(self.plan, arena, self.inputs.memory)
        self.slices = StepSlices(device, self.program)
        self.arena = arena

    def write(self, name: str, rows: np.ndarray) -> None:
        """Write a run's input rows, f32 ``[n, width]``, to the buffer ``name``; rows are padded
        with zeros to its width.
        """
        write_rows(self.plan, self.arena, name, rows)

    def read(self, name: str, n_rows: int, width: int) -> np.ndarray:
        """Return a copy of the last run's output ``name``, f32 ``[n_rows, width]``."""
        buffer = self.plan.outputs[name]
        data = self.arena.read(self.plan.offsets[buffer], n_rows * buffer.row_bytes)
        rows = data.view(np.float32).reshape(n_rows, -1)
        return rows[:, :width].copy()


class TowerEngine:
    """Runs one tower or projector. Raises FileError for a tensor that is missing or has another
    shape.

    ``exact``: all products in f32 (otherwise see ``int16`` of ``Device.plan``). ``lock``: held
    during each slice of a run, for a device that others use too. Plans are made once for each size:
    numbers of rows are rounded up to a power of two.
    """

    def __init__(
        self, gguf: GGUF, config: TowerConfig, device: Device, *, exact: bool = False, lock: UseLock
    ) -> None:
        self.gguf = gguf
        self.config, self.width = checked(gguf, config)
        self.device = device
        self.exact = exact
        self._lock = lock
        self._weights = Weights(gguf, device)
        self._specs = [spec for spec in TOWER.pools(self.config) if isinstance(spec, PoolSpec)]
        self._ready: dict[int, TowerPlan] = {}
        self._arena: DeviceMemory | None = None
        self._arena_bytes = 0

    def plan_for(self, n_rows: int) -> TowerPlan:
        """Return the plan for runs of up to ``n_rows``, made at the first call. Raises TreadleError
        for more than MOST_ROWS.
        """
        if n_rows > MOST_ROWS:
            name = self.config.arch.name
            raise TreadleError(f"{name}: {n_rows} rows in one run, expected at most {MOST_ROWS}")
        size = max(SMALLEST, 1 << (n_rows - 1).bit_length())
        if size not in self._ready:
            self._ready[size] = self._make(size)
        return self._ready[size]

    def warm(self, n_rows: int) -> None:
        """Compile the plan for runs of up to ``n_rows``."""
        with self._lock:
            self.plan_for(n_rows)

    def _make(self, n_rows: int) -> TowerPlan:
        device = self.device
        cache = TowerCache(self._specs, device, n_rows, PAGES)
        given = self.config, self._weights, cache, n_rows, 1
        plan = device.plan(*given, output=STATES, int16=not self.exact)
        if self._arena is None or self._arena_bytes < plan.arena_bytes:
            self._arena = device.memory(plan.arena_bytes)
            self._arena_bytes = plan.arena_bytes
            for other in self._ready.values():
                other.place(self._arena, device)
        ready = TowerPlan(plan, TowerInputs(plan, cache, device))
        ready.place(self._arena, device)
        return ready

    def run(
        self,
        given: Mapping[str, np.ndarray],
        items: Sequence[RunItem],
        ropes: Sequence[np.ndarray] = (),
        report: Report | None = None,
    ) -> Generator[None, None, dict[str, np.ndarray]]:
        """Run the input rows ``given`` by name, f32 ``[n_rows, width]``; yield between slices of
        the work. Return the outputs by name, f32 ``[n_rows, width]``: ``states`` and ``deep.N``.

        ``items``: the pictures or sounds to which the rows belong, one after the other. ``ropes``:
        for each rope table the cosines and sines, f32 ``[n_rows, 2, dims / 2]``. ``report`` is
        called after each slice with the share of the work that is done, 0 to 1. A second run must
        not begin before the first has ended.
        """
        n_rows = len(given[GIVEN])
        assert n_rows == sum(item.n_rows for item in items)
        assert len(items) <= MOST_ITEMS
        with self._lock:
            ready = self.plan_for(n_rows)
            ready.inputs.lay_out(items, ropes)
            for name in ready.plan.takes:
                ready.write(name, given[name])
        if sum(rows.nbytes for rows in given.values()) > LARGE:
            yield
        at = (0, 0)
        while at[0] < len(ready.plan):
            with self._lock:
                at = ready.slices.run(n_rows, *at)
            if report is not None:
                report(at[0] / len(ready.plan))
            if at[0] < len(ready.plan):
                yield
        widths = {STATES: self.width} | {deep(i): self.config.n_embd for i in self.config.deep}
        if 4 * n_rows * sum(widths.values()) > LARGE:
            yield
        with self._lock:
            self.gguf.check()
            return {name: ready.read(name, n_rows, n) for name, n in widths.items()}

    def close(self) -> None:
        """Release plans and weights; the file and the device stay open."""
        self._ready.clear()
        self._weights.consts.clear()
        self._arena = None


__all__ = ["GIVEN", "MOST_ITEMS", "MOST_ROWS", "STATES", "Report", "RunItem", "TowerEngine", "deep"]
