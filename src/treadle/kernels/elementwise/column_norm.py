"""Norms of some columns of f32 rows, in place: queries or keys, all heads of a token together, or
parts of a row.
"""

from __future__ import annotations

from typing import Any, ClassVar

import numpy as np

from treadle.base.fast_classes import dataclass
from treadle.jit.language import Builder, Isa, Val
from treadle.kernels.elementwise.elementwise import map_row, mean_square, row_mean
from treadle.kernels.spec import Args, Frame, Spec


@dataclass(frozen=True)
class ColumnNorm(Spec):
    """RMS norm, in place, of each of ``heads`` parts of ``k`` values of a row, from ``column`` on;
    multiplied by ``w``, which all heads share, or with ``own`` by ``w [heads, k]``. ``centred``:
    LayerNorm, as in ``elementwise.Norm``. Items: tokens x heads.
    """

    op: ClassVar[str] = "column_norm"
    args = Args("x:inout w:const stride column bias:const?")
    k: int
    eps: float
    heads: int = 1
    centred: bool = False
    bias: bool = False  # added at the end, the same for all heads
    own: bool = False  # each head has weights of its own

    @property
    def needs(self) -> set[str]:
        return self.args.required | ({"bias"} if self.bias else set())

    def build(self, k: Builder, isa: Isa, frame: Frame) -> None:
        x = frame.x + frame.column * 4
        lanes = isa.lanes
        stride = frame.stride * 4
        with k.loop(frame.end, start=frame.begin) as item:
            row = x + item // self.heads * stride
            w = frame.w
            if self.heads > 1:
                part = item % self.heads * (4 * self.k)
                row = row + part
                w = w + part if self.own else w
            mean = None
            if self.centred:
                mean = row_mean(k, row, self.k, lanes, lambda total, v, _: total + v)
            gain = 1.0 / k.sqrt(mean_square(k, row, self.k, lanes, mean) + self.eps)

            def normed(v: Val, *more: Val, mean: Val | None = mean, gain: Val = gain) -> Val:
                v = v if mean is None else v - k.splat(mean, v.ty)
                v = v * k.splat(gain, v.ty) * more[0]
                return v + more[1] if self.bias else v

            map_row(k, self.k, row, normed, row, w, *([frame.bias] if self.bias else []))

    def run_ref(self, args: Any, run: Any) -> None:
        rows = args.x.reshape(-1, args.stride)[: int(run["n_tokens"])]
        part = rows[:, args.column : args.column + self.heads * self.k]
        y = part.astype(np.float64).reshape(len(rows), self.heads, self.k)
        if self.centred:
            y = y - y.mean(-1, keepdims=True)
        w = args.w[: self.k * (self.heads if self.own else 1)].reshape(-1, self.k)
        y = y / np.sqrt((y**2).mean(-1, keepdims=True) + self.eps) * w
        if self.bias:
            y = y + args.bias[: self.k]
        part[:] = y.reshape(part.shape)
