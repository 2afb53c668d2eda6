"""Scale each row by its own factor (attention temperature, expert inputs)."""

from __future__ import annotations

from typing import Any, ClassVar

import numpy as np

from treadle.base.fast_classes import dataclass
from treadle.jit import math
from treadle.jit.language import Builder, Isa, Val
from treadle.jit.types import f32, ptr
from treadle.kernels.activations import activated
from treadle.kernels.elementwise.elementwise import map_row
from treadle.kernels.run_state import numbered
from treadle.kernels.spec import Args, Frame, Spec, f32_values


@dataclass(frozen=True)
class Temper(Spec):
    """Multiply ``k`` columns of each row from ``column`` on by the token's attention temperature,
    in place. It is the cosine in rope table number ``table``, which has one pair. Items: tokens.
    """

    op: ClassVar[str] = "temper"
    args = Args("x:inout stride column")
    k: int
    table: int

    def build(self, k: Builder, isa: Isa, frame: Frame) -> None:
        gains = frame.run(numbered("rope", self.table), ptr)
        with k.loop(frame.end, start=frame.begin) as n:
            x = frame.x + (n * frame.stride + frame.column) * 4
            gain = k.load(gains + n * 8, f32)
            map_row(k, self.k, x, times(k, gain), x)

    def run_ref(self, args: Any, run: Any) -> None:
        rows = args.x.reshape(-1, args.stride)[: int(run["n_tokens"])]
        rows[:, args.column : args.column + self.k] *= run.rope(self.table, 2)[:, 0]


@dataclass(frozen=True)
class ScaleColumns(Spec):
    """Multiply ``k`` columns of each row from ``column`` on by ``gain``, in place. Items:
    tokens.
    """

    op: ClassVar[str] = "times"
    args = Args("x:inout stride column")
    k: int
    gain: float

    def build(self, k: Builder, isa: Isa, frame: Frame) -> None:
        with k.loop(frame.end, start=frame.begin) as n:
            x = frame.x + (n * frame.stride + frame.column) * 4
            map_row(k, self.k, x, times(k, k.const(self.gain, f32)), x)

    def run_ref(self, args: Any, run: Any) -> None:
        rows = args.x.reshape(-1, args.stride)[: int(run["n_tokens"])]
        rows[:, args.column : args.column + self.k] *= np.float32(self.gain)


@dataclass(frozen=True)
class ScaleByExpert(Spec):
    """``out = x * sigmoid(max(scores))``: a token's hidden state times its best expert's weight.

    ``x`` and ``out`` have ``k`` values a row, ``scores`` ``n`` (one an expert). Items: tokens.
    """

    op: ClassVar[str] = "weigh"
    args = Args("x:in scores:in out:out stride scores_stride out_stride")
    k: int
    n: int

    def build(self, k: Builder, isa: Isa, frame: Frame) -> None:
        with k.loop(frame.end, start=frame.begin) as token:
            scores = frame.scores + token * frame.scores_stride * 4
            best = k.var(k.load(scores, f32))
            with k.loop(self.n, start=1) as i:
                best.v = k.max(best.v, k.load(scores, f32, offset=i * 4))
            x = frame.x + token * frame.stride * 4
            out = frame.out + token * frame.out_stride * 4
            map_row(k, self.k, out, times(k, math.sigmoid(k, best.v)), x)

    def run_ref(self, args: Any, run: Any) -> None:
        n = int(run["n_tokens"])
        x = f32_values(args.x).reshape(-1, args.stride)[:n, : self.k]
        out = args.out.reshape(-1, args.out_stride)[:n, : self.k]
        best = args.scores.reshape(-1, args.scores_stride)[:n, : self.n].max(-1, keepdims=True)
        out[:] = x * activated("sigmoid", best.astype(np.float64))


def times(k: Builder, gain: Val) -> Any:
    """Return a function that multiplies vectors by the scalar ``gain``."""
    return lambda v: v * k.splat(gain, v.ty)
