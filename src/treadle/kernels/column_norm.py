"""Norms of some columns of f32 rows, in place: queries or keys, all heads of a token together; or
of parts of a row.
"""

from __future__ import annotations

from typing import Any, ClassVar

import numpy as np

from treadle.jit.language import Builder, Isa
from treadle.kernels.elementwise import map_row, mean_square
from treadle.kernels.spec import Args, Frame, Spec
from treadle.record import dataclass


@dataclass(frozen=True)
class ColumnNorm(Spec):
    """RMS norm of each of ``heads`` parts of ``k`` values from ``column`` on, times ``w``, which
    all share. Items: tokens x heads.
    """

    op: ClassVar[str] = "column_norm"
    args = Args("x:inout w:const stride column")
    k: int
    eps: float
    heads: int = 1

    def build(self, k: Builder, isa: Isa, frame: Frame) -> None:
        x, w, lanes = frame.x + frame.column * 4, frame.w, isa.lanes
        stride = frame.stride * 4
        with k.loop(frame.end, start=frame.begin) as item:
            row = x + item // self.heads * stride
            if self.heads > 1:
                row = row + item % self.heads * (4 * self.k)
            gain = 1.0 / k.sqrt(mean_square(k, row, self.k, lanes) + self.eps)
            map_row(k, self.k, row, lambda v, w, g=gain: v * k.splat(g, v.ty) * w, row, w)

    def run_ref(self, args: Any, run: Any) -> None:
        rows = args.x.reshape(-1, args.stride)[: int(run["n_tokens"])]
        part = rows[:, args.column : args.column + self.heads * self.k]
        y = part.astype(np.float64).reshape(len(rows), self.heads, self.k)
        y = y / np.sqrt((y**2).mean(-1, keepdims=True) + self.eps) * args.w[: self.k]
        part[:] = y.reshape(part.shape)
