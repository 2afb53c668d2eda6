"""Relative logits: biases of attention scores by distance, made by each query for itself (Inkling,
2026).

A layer has a matrix ``[rank, reach]`` with a column for every distance back to ``reach``. A query
has ``rank`` numbers for each head; their product with the matrix is the head's row of biases, and
keys farther back have none. A step before attention computes the rows of all tokens of a run;
attention adds them to its scores.
"""

from __future__ import annotations

from typing import Any, ClassVar

import numpy as np

from treadle.base.fast_classes import dataclass
from treadle.jit.language import Builder, Isa, Val
from treadle.jit.types import f32
from treadle.kernels.run_state import PAGE
from treadle.kernels.spec import Args, Frame, Spec, widest


def relative_values(reach: int) -> int:
    """Return the number of f32 values in a head's row of biases: ``reach`` distances up to 0, and
    PAGE zeros on either side, so that a kernel may clamp the index from which it loads a vector of
    biases.
    """
    return reach + 2 * PAGE


def farthest(reach: int) -> int:
    """Return the distance (key - query, in tokens) of the first value of a row of biases
    (``relative_values``).
    """
    return 1 - reach - PAGE


def by_place(proj: np.ndarray) -> np.ndarray:
    """Return the matrix ``proj [rank, reach]``, whose columns have distance 0 first, with its
    columns reversed: a row of biases has distance 0 last.
    """
    return np.ascontiguousarray(proj[:, ::-1], np.float32)


@dataclass(frozen=True)
class RelativeLogits(Spec):
    """Compute each token's rows of biases, f32 ``[N, n_head, relative_values(reach)]``: the numbers
    ``[N, n_head * rank]`` from ``column`` of ``x`` on, times ``proj [rank, reach]`` (as
    ``by_place`` returns it). Items: tokens x heads.
    """

    op: ClassVar[str] = "relative_logits"
    args = Args("x:in proj:const out:out stride column")
    n_head: int
    rank: int
    reach: int

    def build(self, k: Builder, isa: Isa, frame: Frame) -> None:
        width = widest(isa.lanes, self.reach)
        ty = f32 * width
        ends = f32 * widest(isa.lanes, PAGE)
        with k.loop(frame.end, start=frame.begin) as item:
            token = item // self.n_head
            head = item % self.n_head
            mix = frame.x + (token * frame.stride + frame.column + head * self.rank) * 4
            row = frame.out + item * (4 * relative_values(self.reach))

            def nothing(at: Val, row: Val = row) -> None:
                k.store(row, k.zero(ends), offset=at * 4)
                k.store(row, k.zero(ends), offset=at * 4 + 4 * (self.reach + PAGE))

            with k.loop(PAGE, step=ends.lanes) as at:
                nothing(at)
            with k.loop(self.reach, step=width) as at:
                total = k.var(k.zero(ty))
                with k.loop(self.rank) as d:
                    column = frame.proj + (d * self.reach + at) * 4
                    part = k.splat(k.load(mix, f32, offset=d * 4), ty)
                    total.v = k.fma(part, k.load(column, ty, align=4), total.v)
                k.store(row, total.v, offset=at * 4 + 4 * PAGE)

    def run_ref(self, args: Any, run: Any) -> None:
        n = int(run["n_tokens"])
        width = self.n_head * self.rank
        mixes = args.x.reshape(-1, args.stride)[:n, args.column : args.column + width]
        proj = args.proj[: self.rank * self.reach].reshape(self.rank, self.reach)
        mixed = mixes.reshape(n, self.n_head, -1).astype(np.float64) @ proj.astype(np.float64)
        rows = args.out[: n * self.n_head * relative_values(self.reach)]
        rows = rows.reshape(n, self.n_head, -1)
        rows[:] = 0.0
        rows[..., PAGE : PAGE + self.reach] = mixed
