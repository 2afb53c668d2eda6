"""Clamping to a symmetric limit: queries, keys and values of OLMo and MPT."""

from __future__ import annotations

from typing import Any, ClassVar

import numpy as np

from treadle.base.fast_dataclass import dataclass
from treadle.jit.language import Builder, Isa, Val
from treadle.kernels.elementwise.elementwise import map_row
from treadle.kernels.spec import Args, Frame, Spec


@dataclass(frozen=True)
class Clamp(Spec):
    """``x = min(max(x, -limit), limit)`` for ``k`` values of each row from ``column`` on, in place;
    NaN stays NaN. Items: tokens.
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
