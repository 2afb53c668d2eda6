"""xIELU (Huang and Schlag, 2024): an activation with four learned parameters a layer."""

from __future__ import annotations

from math import factorial
from typing import Any, ClassVar

import numpy as np

from treadle.base.fast_classes import dataclass
from treadle.jit import math
from treadle.jit.language import Builder, Isa, Val
from treadle.jit.types import f32
from treadle.kernels.elementwise.elementwise import map_row
from treadle.kernels.spec import Args, Frame, Spec

# (e**x - 1 - x) / x**2 on -1/2 <= x <= 0: its series up to x**7, with a relative error below 2e-9.
# Below -1/2 subtraction loses at most two bits.
SERIES = tuple(1 / factorial(n) for n in range(9, 1, -1))
NEAR = -0.5


@dataclass(frozen=True)
class Xielu(Spec):
    """xIELU of ``k`` values of each row, in place: ``p x**2 + b x`` above 0, else
    ``n (e**min(x, eps) - 1 - x) + b x``. ``w``: the four parameters p, n, b and eps, f32. Items:
    tokens x ``groups`` equal parts of a row.
    """

    op: ClassVar[str] = "xielu"
    args = Args("x:inout w:const stride")
    k: int
    groups: int = 1

    def build(self, k: Builder, isa: Isa, frame: Frame) -> None:
        size = self.k // self.groups
        numbers = [k.load(frame.w, f32, offset=4 * i) for i in range(4)]
        with k.loop(frame.end, start=frame.begin) as item:
            n = item // self.groups
            at = item % self.groups * size
            x = frame.x + (n * frame.stride + at) * 4
            map_row(k, size, x, lambda v: apply_xielu(k, v, *numbers), x)

    def run_ref(self, args: Any, run: Any) -> None:
        rows = args.x.reshape(-1, args.stride)[: int(run["n_tokens"]), : self.k]
        p, n, b, eps = (float(number) for number in args.w[:4])
        x = rows.astype(np.float64)
        below = n * (np.expm1(np.minimum(x, eps)) - x)
        rows[:] = np.where(x > 0, p * x * x, below) + b * x


def apply_xielu(k: Builder, x: Val, p: Val, n: Val, b: Val, eps: Val) -> Val:
    """Return xIELU of the vector ``x``, with scalars ``p``, ``n``, ``b`` and ``eps``."""
    p, n, b, eps = (k.splat(number, x.ty) for number in (p, n, b, eps))
    low = k.min(eps, x)  # x comes second, so that NaN gives NaN
    near = low * low * math.polynomial(k, low, SERIES)
    far = math.exp(k, low) - 1.0 - low
    less = k.select(low < NEAR, far, near) + (low - x)  # e**low - 1 - x
    bend = k.select(k.const(0.0, x.ty) < x, p * (x * x), n * less)
    return k.fma(b, x, bend)
