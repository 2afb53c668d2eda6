"""One kernel, called as the compiled step loop calls it, in memory that shows every step outside.

A buffer ends at a page that can neither be read nor written, so an access past it faults at once
(pytest's faulthandler then names the test). In front of it lie canary bytes, checked after each
call; before the call, outputs and scratch are NaN.
"""

from __future__ import annotations

import mmap
from collections.abc import Mapping
from dataclasses import dataclass, field
from itertools import pairwise
from typing import Any, NamedTuple

import numpy as np

from tests.kernels.machine import Machine, chosen
from treadle.isa.isa import Isa
from treadle.kernels.run_state import (
    ITEM,
    LORA,
    MERGE,
    PART,
    PART_PAGES,
    SAMPLED,
    numbered,
    run_state,
)
from treadle.kernels.spec import Spec

U32 = 2.0**-24  # unit roundoff of f32
CANARY = 0xA5
UNTOUCHED = bytes([CANARY]) * mmap.PAGESIZE


class Memory:
    """Guarded buffers of one test; ``machine``: where its kernels run."""

    def __init__(self, machine: Machine | None = None) -> None:
        self.machine = machine or chosen()
        self._parts: list[tuple[str, np.ndarray, int, int]] = []

    def array(
        self,
        shape: int | tuple[int, ...],
        dtype: Any = np.uint8,
        *,
        name: str = "",
        front: bool = False,
    ) -> np.ndarray:
        """A buffer of 0xFF bytes (NaN in every float format), flush with an inaccessible page.

        That page lies behind it, or before it with ``front``.
        """
        dtype = np.dtype(dtype)
        n_bytes = int(np.prod(shape)) * dtype.itemsize
        inner = -(-max(n_bytes, 1) // mmap.PAGESIZE) * mmap.PAGESIZE
        whole = self.machine.pages(inner + mmap.PAGESIZE)
        self.machine.close_page(whole.ctypes.data + (0 if front else inner))
        usable = whole[mmap.PAGESIZE :] if front else whole[:inner]
        start = 0 if front else inner - n_bytes
        usable[:start] = CANARY
        usable[start : start + n_bytes] = 0xFF
        usable[start + n_bytes :] = CANARY
        self._parts.append((name or f"buffer {len(self._parts)}", usable, start, start + n_bytes))
        made: np.ndarray = usable[start : start + n_bytes].view(dtype).reshape(shape)
        return made

    def copy(self, values: np.ndarray, *, name: str = "", front: bool = False) -> np.ndarray:
        """A guarded copy."""
        made = self.array(values.shape, values.dtype, name=name, front=front)
        made[...] = values
        return made

    def check(self) -> None:
        """Fails where a byte outside a buffer was written."""
        for name, usable, start, stop in self._parts:
            outside = usable[:start].tobytes() + usable[stop:].tobytes()  # at most a page
            if outside != UNTOUCHED[: len(outside)]:
                at = int(np.flatnonzero(np.frombuffer(outside, np.uint8) != CANARY)[0])
                at = at - start if at < start else at - start + stop
                raise AssertionError(f"{name}: byte {at} was written, outside 0..{stop - start}")


class Picked(NamedTuple):
    """A row of logits whose largest are wanted; what of it may be chosen, bool ``[n_vocab]``."""

    row: int
    mask: np.ndarray | None = None
    first: bool = False
    total: bool = True


@dataclass
class Run:
    """The state of one run, for the kernel (``record``) and for its twin (counts by name, arrays
    as attributes).
    """

    n_tokens: int = 0
    tokens: np.ndarray = field(default_factory=lambda: np.zeros(0, np.int32))
    output_rows: np.ndarray = field(default_factory=lambda: np.zeros(0, np.int32))
    parts: np.ndarray = field(default_factory=lambda: np.zeros(0, PART))
    ropes: dict[int, np.ndarray] = field(default_factory=dict)  # by rope table
    slots: dict[int, np.ndarray] = field(default_factory=dict)  # by pool, as the rest
    items: dict[int, list[tuple[Any, np.ndarray]]] = field(default_factory=dict)
    few: dict[int, list[tuple[Any, np.ndarray]]] = field(default_factory=dict)
    merges: dict[int, list[Any]] = field(default_factory=dict)
    picked: list[Picked] = field(default_factory=list)
    lora: list[tuple[int, int, np.ndarray]] = field(default_factory=list)
    pages: list[list[np.ndarray]] = field(default_factory=list)  # of each part, by pool

    @property
    def loras(self) -> list[tuple[int, int, np.ndarray]]:
        return self.lora

    def sampled(self, n_vocab: int) -> list[tuple[int, Any, bool, bool]]:
        return [
            (row, True if mask is None else mask, first, total)
            for row, mask, first, total in self.picked
        ]

    def rope(self, table: int, rope_dims: int) -> np.ndarray:
        return self.ropes[table].reshape(-1, 2, rope_dims // 2)

    def kv_indices(self, pool: int) -> np.ndarray:
        return self.slots[pool]

    def pages_of(self, pool: int) -> list[np.ndarray]:
        return [lists[pool] for lists in self.pages]

    def attn_items(self, pool: int, *, few: bool = False) -> list[tuple[Any, np.ndarray]]:
        return (self.few if few else self.items)[pool]

    def attn_merges(self, pool: int) -> list[Any]:
        return self.merges[pool]

    def __getitem__(self, name: str) -> int:
        counts = {"n_tokens": self.n_tokens, "n_outputs": len(self.output_rows)}
        counts["n_sampled"] = len(self.picked)
        lists = (
            ("n_attn_items", self.items),
            ("n_attn_few", self.few),
            ("n_attn_merges", self.merges),
        )
        for field_, by_pool in lists:
            counts |= {numbered(field_, pool): len(made) for pool, made in by_pool.items()}
        return counts[name]

    def record(self, memory: Memory) -> np.ndarray:
        """What the kernel reads by pointer."""
        made = memory.array(1, run_state(4), name="run")

        def away(array: np.ndarray, name: str, start: int = _address(made)) -> int:
            """Where a copy of it is, as the kernel finds it: bytes behind the record."""
            return _address(memory.copy(array, name=name)) - start

        for name in ("tokens", "output_rows"):
            made[name] = away(getattr(self, name).astype(np.int32), name)
        made["parts"], made["n_parts"] = away(self.parts, "parts"), len(self.parts)
        lists = [(np.concatenate(of), len(of[0])) for of in self.pages]
        found = [(away(pages.astype(np.int64), "pages"), n) for pages, n in lists]
        made["part_pages"] = away(np.array(found, PART_PAGES), "part_pages")
        made["n_tokens"], made["n_outputs"] = self["n_tokens"], self["n_outputs"]
        made["n_sampled"], records = len(self.picked), np.zeros(len(self.picked), SAMPLED)
        for record, (row, mask, first, total) in zip(records, self.picked, strict=True):
            record["row"] = row
            record["first"] = first
            record["total"] = total
            if mask is not None:
                bits = np.packbits(mask, bitorder="little")
                record["mask"] = away(np.pad(bits, (0, -len(bits) % 4)), "mask")
        made["sampled"] = away(records, "sampled")
        records = memory.array(len(self.lora), LORA, name="loras")
        for at, (token, n, scales) in enumerate(self.lora):
            records[at] = token, n, away(scales, "scales", _address(records[at:]))
        made["loras"], made["n_loras"] = _address(records) - _address(made), len(self.lora)
        for i, table in self.ropes.items():
            made[numbered("rope", i)] = away(table.astype(np.float32), "rope")
        for i, slots in self.slots.items():
            made[numbered("kv_indices", i)] = away(slots.astype(np.int64), "slots")
        for name, by_pool in (("attn_items", self.items), ("attn_few", self.few)):
            for i, items in by_pool.items():
                records = memory.array(len(items), ITEM, name=name)
                for at, (item, pages) in enumerate(items):
                    records[at] = item
                    here = _address(records[at:])
                    records["pages"][at] = away(pages.astype(np.int64), "pages", here)
                made[numbered(name, i)] = _address(records) - _address(made)
                made[numbered(f"n_{name}", i)] = len(items)
        for i, merges in self.merges.items():
            made[numbered("attn_merges", i)] = away(np.array(merges, MERGE), "merges")
            made[numbered("n_attn_merges", i)] = len(merges)
        return made


def _address(array: np.ndarray) -> int:
    return int(array.ctypes.data)


def call(
    spec: Spec,
    isa: Isa,
    memory: Memory,
    args: Mapping[str, Any],
    run: Run,
    n_items: int,
    *,
    pieces: int = 3,
) -> None:
    """Run the whole grid, in uneven ranges and backwards, as threads that race for items might."""
    kernel = memory.machine.kernel(spec, isa)
    slots = spec.args.in_order(args)
    slots = [_address(a) if isinstance(a, np.ndarray) else int(a or 0) for a in slots]
    packed = memory.copy(np.array(slots, np.int64), name="args")
    record = run.record(memory)
    # As much as was asked for and no more; 64-byte aligned as the runtime's is.
    scratch = memory.array(-(-spec.scratch(isa.lanes) // 64) * 64, name="scratch")
    cuts = sorted({0, n_items, *(n_items * i * i // (pieces * pieces) for i in range(pieces))})
    for begin, end in reversed(list(pairwise(cuts))):
        scratch[:] = 0xFF
        kernel(_address(packed), _address(record), begin, end, _address(scratch))
    memory.check()


def step(isa: Isa) -> int:
    """Rows begin at a multiple of so many values: a GPU's plan has no other, the CPU takes any."""
    return 4 if isa.simt else 1


def assert_close(
    actual: np.ndarray, expected: np.ndarray, tolerance: np.ndarray | float, what: str
) -> None:
    """Every element within its own tolerance; a failure names the one that exceeds it most."""
    __tracebackhide__ = True
    actual = np.asarray(actual, np.float64)
    expected = np.asarray(expected, np.float64)
    assert actual.shape == expected.shape, (actual.shape, expected.shape)
    if not actual.size:
        return
    tolerance = np.broadcast_to(np.asarray(tolerance, np.float64), actual.shape)
    with np.errstate(invalid="ignore", divide="ignore"):
        same = (actual == expected) | (np.isnan(actual) & np.isnan(expected))
        excess = np.where(same, 0.0, np.abs(actual - expected) / tolerance)
    excess = np.where(np.isnan(excess), np.inf, excess)
    worst = np.unravel_index(int(excess.argmax()), actual.shape)
    if excess[worst] > 1:
        raise AssertionError(
            f"{what}: worst at {tuple(int(i) for i in worst)}: {actual[worst]:.9g}, expected "
            f"{expected[worst]:.9g}; off by {abs(actual[worst] - expected[worst]):.3g}, allowed "
            f"{tolerance[worst]:.3g}; {int((excess > 1).sum())} of {actual.size} are wrong"
        )
