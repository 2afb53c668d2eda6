"""Sparse gate: passes only the few values of a row that are far above its mean (Gaussian top-k, You
and others, 2025).
"""

from __future__ import annotations

from typing import Any, ClassVar

import numpy as np

from treadle.base.fast_classes import dataclass
from treadle.jit.language import Builder, Isa, Val
from treadle.jit.types import f32
from treadle.kernels.activation_layout import BLOCK, DWORD, ActivationLayout, emit_store
from treadle.kernels.activations import ACTIVATIONS, gated
from treadle.kernels.elementwise.elementwise import (
    SCALES_BYTES,
    SLICE,
    blocks_of_slice,
    mean_square,
    row_mean,
)
from treadle.kernels.run_state import round_up
from treadle.kernels.spec import Args, Frame, Spec


@dataclass(frozen=True)
class SparseGate(Spec):
    """Gate ``up`` by the values of a row that are far above its mean:
    ``out = fn(max(0, x - c)) * up``, with ``c = mean(x) + cut * deviation(x)`` of the row's ``k``
    values (population deviation). ``out`` has activations of kind ``act``; ``fn`` is a name of
    ACTIVATIONS; ``up``: the first column of up in the row.

    Items: rows times slices of SLICE values, or rows if ``whole``. Each item computes the row's
    ``c``.
    """

    op: ClassVar[str] = "sparse_gate"
    args = Args("x:in out:out stride up")
    fn: str
    act: str
    k: int
    group: int  # rows in a group of the activations
    cut: float
    sub: int = BLOCK  # sub of the activations
    unit: int = DWORD  # unit of the activations
    whole: bool = False

    def layout(self) -> ActivationLayout:
        return ActivationLayout(self.act, self.k, self.group, self.sub, self.unit)

    def scratch(self, lanes: int) -> int:
        return SCALES_BYTES + self.layout().store_scratch

    @property
    def slice(self) -> int:
        """Values of a row that one item writes."""
        return round_up(self.k, SLICE) if self.whole else SLICE

    @property
    def slices(self) -> int:
        return -(-self.k // self.slice)

    def build(self, k: Builder, isa: Isa, frame: Frame) -> None:
        act = self.layout()
        lanes = isa.lanes
        n_rows = frame.run("n_tokens")

        def row_of(n: Val) -> Val:  # the last row pads its group: see ActivationLayout.grid
            return frame.x + k.min(n, n_rows - 1) * frame.stride * 4

        with k.loop(frame.end, start=frame.begin) as item:
            # A slice of all tokens of a group, which share lines of ``out``, then the next slice.
            each = self.group // act.together
            first = item // (self.slices * each) * self.group + item % each * act.together
            part = item // each % self.slices
            with k.loop(act.together) as t:
                row = row_of(first + t)
                mean = row_mean(k, row, self.k, lanes, lambda total, v, _: total + v)
                deviation = k.sqrt(mean_square(k, row, self.k, lanes, mean))
                k.store(frame.scratch + t * 4, mean + deviation * self.cut)

            def block(b: Val, count: int, first: Val = first) -> None:
                def values_of(n: Val) -> list[Val]:
                    row = row_of(n)
                    values = []
                    least = k.load(frame.scratch + (n - first) * 4, f32)
                    for i in range(0, BLOCK, lanes):
                        at = row + (b * (BLOCK * 4) + i * 4)
                        have = min(max(count - i, 0), lanes)
                        v = k.load_first(at, f32 * lanes, have)
                        v = k.max(v - k.splat(least, v.ty), k.zero(v.ty))
                        up = k.load_first(at + frame.up * 4, f32 * lanes, have)
                        values.append(ACTIVATIONS[self.fn].gate(k, v, up))
                    return values

                emit_store(k, act, frame.out, first, b, values_of, frame.scratch + SCALES_BYTES)

            blocks_of_slice(k, self.k, self.slice, part, block)

    def run_ref(self, args: Any, run: Any) -> None:
        n = int(run["n_tokens"])
        rows = args.x.view(np.float32).reshape(-1, args.stride)[:n]
        x = rows[:, : self.k].astype(np.float64)
        up = rows[:, args.up : args.up + self.k].astype(np.float64)
        least = x.mean(-1, keepdims=True) + self.cut * x.std(-1, keepdims=True)
        y = gated(self.fn, np.maximum(x - least, 0.0), up)
        self.layout().write_ref(args.out, y)
