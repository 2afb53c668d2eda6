"""The temperature of attention: queries times a number that their position says."""

from __future__ import annotations

from typing import Any, ClassVar

from treadle.jit.language import Builder, Isa, Val
from treadle.jit.types import f32, ptr
from treadle.kernels.elementwise import map_row
from treadle.kernels.spec import Args, Frame, Spec, numbered
from treadle.record import dataclass


@dataclass(frozen=True)
class Temper(Spec):
    """``k`` columns of each row from ``column`` on, times the cosine of the rope table ``table``,
    which has one pair; in place. Items: tokens.
    """

    op: ClassVar[str] = "temper"
    args = Args("x:inout stride column")
    k: int
    table: int

    def build(self, k: Builder, isa: Isa, frame: Frame) -> None:
        gains = frame.run(numbered("rope", self.table), ptr)
        with k.loop(frame.end, start=frame.begin) as n:
            x, gain = frame.x + (n * frame.stride + frame.column) * 4, k.load(gains + n * 8, f32)

            def times(v: Val, gain: Val = gain) -> Val:
                return v * k.splat(gain, v.ty)

            map_row(k, self.k, x, times, x)

    def run_ref(self, args: Any, run: Any) -> None:
        rows = args.x.reshape(-1, args.stride)[: int(run["n_tokens"])]
        rows[:, args.column : args.column + self.k] *= run.rope(self.table, 2)[:, 0]
