"""Padding rows of an output matrix: logits whose columns are no token get a value below
all others.
"""

from __future__ import annotations

from typing import Any, ClassVar

import numpy as np

from treadle.base.fast_classes import dataclass
from treadle.jit.language import Builder, Isa
from treadle.jit.types import f32
from treadle.kernels.spec import Args, Frame, Spec

NEVER = -1e30  # a logit whose token has no probability, but finite


@dataclass(frozen=True)
class Hide(Spec):
    """Set columns ``first`` to ``last - 1`` of each row of ``y f32 [n_outputs, stride]`` to NEVER,
    so that no sampler chooses them. Items: rows.
    """

    op: ClassVar[str] = "hide"
    args = Args("y:inout stride")
    first: int
    last: int

    def build(self, k: Builder, isa: Isa, frame: Frame) -> None:
        with k.loop(frame.end, start=frame.begin) as row:
            at = frame.y + (row * frame.stride + self.first) * 4
            with k.loop(self.last - self.first) as c:
                k.store(at, k.const(NEVER, f32), offset=c * 4)

    def run_ref(self, args: Any, run: Any) -> None:
        rows = args.y.reshape(-1, args.stride)[: int(run["n_outputs"])]
        rows[:, self.first : self.last] = np.float32(NEVER)
