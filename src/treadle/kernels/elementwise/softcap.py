"""The softcap of Gemma 2 and Grok: bounds logits, or scores of experts."""

from __future__ import annotations

from typing import Any, ClassVar

import numpy as np

from treadle.base.fast_classes import dataclass
from treadle.jit import math
from treadle.jit.language import Builder, Isa, Val
from treadle.jit.types import f32
from treadle.kernels.spec import Args, Frame, Spec

PIECE = 1024  # values of an item


@dataclass(frozen=True)
class Softcap(Spec):
    """Bound values softly, in place: ``y = cap * tanh(y / cap)``, f32 ``[n_outputs, stride]``;
    without ``outputs`` a row for each token. Items: rows x pieces of PIECE values.
    """

    op: ClassVar[str] = "softcap"
    args = Args("y:inout stride")
    k: int  # values of a row
    cap: float
    outputs: bool = True  # rows are the run's outputs, not its tokens

    @property
    def count(self) -> str:
        return "n_outputs" if self.outputs else "n_tokens"

    @property
    def pieces(self) -> int:
        return -(-self.k // PIECE)

    def build(self, k: Builder, isa: Isa, frame: Frame) -> None:
        y = frame.y
        stride = frame.stride
        lanes = isa.lanes
        full, rest = divmod(self.k, lanes)

        def part(at: Val, n: int) -> None:
            v = k.load_first(at, f32 * lanes, n)
            k.store_first(at, math.tanh(k, v * (1 / self.cap)) * self.cap, n)

        with k.loop(frame.end, start=frame.begin) as item:
            row = item // self.pieces
            piece = item % self.pieces
            at = y + row * stride * 4
            first = piece * (PIECE // lanes)
            with k.shared_loop(k.min(first + PIECE // lanes, full), start=first) as c:
                part(at + c * (4 * lanes), lanes)
            if rest:
                with k.if_(piece.eq(self.pieces - 1)), k.once():
                    part(at + 4 * lanes * full, rest)

    def run_ref(self, args: Any, run: Any) -> None:
        rows = args.y.reshape(-1, args.stride)[: int(run[self.count]), : self.k]
        rows[:] = self.cap * np.tanh(rows.astype(np.float64) / self.cap)
