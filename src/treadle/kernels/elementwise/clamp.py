"""Clamping: to a symmetric limit (queries, keys and values of OLMo and MPT), and to two bounds
stored in the file (the inputs and products of matrices in Gemma 4's towers).
"""

from __future__ import annotations

from typing import Any, ClassVar

import numpy as np

from treadle.base.fast_classes import dataclass
from treadle.jit.language import Builder, Isa, Val
from treadle.jit.types import f32
from treadle.kernels.elementwise.elementwise import map_row
from treadle.kernels.spec import Args, Frame, Spec


@dataclass(frozen=True)
class Clamp(Spec):
    """Clamp ``k`` values of each row, from ``column`` on, in place:
    ``x = min(max(x, -limit), limit)``; NaN stays NaN. Items: tokens.
    """

    op: ClassVar[str] = "clamp"
    args = Args("x:inout stride column")
    k: int
    limit: float

    def build(self, k: Builder, isa: Isa, frame: Frame) -> None:
        def held(v: Val) -> Val:
            low = k.const(-self.limit, v.ty)
            high = k.const(self.limit, v.ty)
            return k.max(low, k.min(high, v))  # v comes second, so that NaN gives NaN

        with k.loop(frame.end, start=frame.begin) as n:
            row = frame.x + (n * frame.stride + frame.column) * 4
            map_row(k, self.k, row, held, row)

    def run_ref(self, args: Any, run: Any) -> None:
        rows = args.x.reshape(-1, args.stride)[: int(run["n_tokens"])]
        part = rows[:, args.column : args.column + self.k]
        part[:] = np.clip(part, -self.limit, self.limit)


@dataclass(frozen=True)
class ClampBetween(Spec):
    """Clamp ``k`` values of each row: ``out = min(max(x, low), high)``, read from ``column`` of
    ``x`` on and written from ``out_column`` of ``out`` on; NaN stays NaN. ``bounds``: f32, low and
    high. Items: tokens.
    """

    op: ClassVar[str] = "clamp_between"
    args = Args("x:in bounds:const out:out stride out_stride column out_column")
    k: int

    def build(self, k: Builder, isa: Isa, frame: Frame) -> None:
        low, high = (k.load(frame.bounds, f32, offset=4 * i) for i in range(2))

        def held(v: Val) -> Val:
            # v comes second, so that NaN gives NaN
            return k.max(k.splat(low, v.ty), k.min(k.splat(high, v.ty), v))

        with k.loop(frame.end, start=frame.begin) as n:
            row = frame.x + (n * frame.stride + frame.column) * 4
            out = frame.out + (n * frame.out_stride + frame.out_column) * 4
            map_row(k, self.k, out, held, row)

    def run_ref(self, args: Any, run: Any) -> None:
        n = int(run["n_tokens"])
        x = args.x.view(np.float32).reshape(-1, args.stride)[:n]
        out = args.out.view(np.float32).reshape(-1, args.out_stride)[:n]
        low, high = (float(number) for number in args.bounds[:2])
        found = np.clip(x[:, args.column : args.column + self.k], low, high)
        out[:, args.out_column : args.out_column + self.k] = found
