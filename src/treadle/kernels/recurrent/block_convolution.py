"""Short convolutions within a block of tokens, whose weights each token makes (DFlash 2)."""

from __future__ import annotations

from typing import Any, ClassVar

import numpy as np

from treadle.base.fast_classes import dataclass
from treadle.jit.language import Builder, Isa, Val
from treadle.jit.types import f32
from treadle.kernels.recurrent.convolution import AHEAD, ByChannel
from treadle.kernels.spec import Args, Frame, f32_values, whole_rows, widest


@dataclass(frozen=True)
class BlockConvolution(ByChannel):
    """Convolve each channel with its last values in the same run: ``y[t] = sum_j (base[j] +
    delta[t, j]) x[t - j]`` replaces ``x``, for j below ``taps``. Values before a sequence's first
    token in the run are 0.

    ``base`` is ``[taps, k]``, from element ``first`` on. ``delta`` has a row per token, ``[taps,
    k / group]`` from column ``delta_column`` on: ``group`` channels share a value. Items as in
    ``ByChannel``.
    """

    op: ClassVar[str] = "block_convolution"
    args = Args("x:inout delta:in base:const stride column delta_stride delta_column first")
    k: int
    taps: int
    group: int

    def lanes(self, isa: Isa) -> int:
        """Return the number of lanes of a vector, whose channels are of one group."""
        return widest(super().lanes(isa), self.group)

    def _channels(
        self, k: Builder, frame: Frame, record: dict[str, Val], at: Val, lanes: int, n: int
    ) -> None:
        """Process all tokens of a sequence for the ``n`` channels from ``at`` on. ``record``: the
        fields of the sequence's PART record.
        """
        ty = f32 * lanes
        groups = self.k // self.group
        home = frame.base + (frame.first + at) * 4
        base = [k.load_first(home + 4 * j * self.k, ty, n) for j in range(self.taps)]
        last = [k.var(k.zero(ty)) for _ in range(self.taps - 1)]  # the newest first
        with k.loop(record["n_tokens"]) as t:
            token = record["token"] + t
            row = frame.x + (token * frame.stride + frame.column + at) * 4
            k.prefetch(row + frame.stride * (4 * AHEAD))  # rows are far apart
            column = frame.delta_column + at // self.group
            own = frame.delta + (token * frame.delta_stride + column) * 4
            values = [k.load_first(row, ty, n), *(var.v for var in last)]
            y = k.zero(ty)
            for j, value in enumerate(values):
                delta = k.splat(k.load(own, f32, offset=4 * j * groups), ty)
                y = k.fma(base[j] + delta, value, y)
            k.store_first(row, y, n)
            for var, value in zip(last, values, strict=False):
                var.v = value

    def run_ref(self, args: Any, run: Any) -> None:
        n = self.k
        groups = n // self.group
        rows = whole_rows(f32_values(args.x), args.stride)[:, args.column :]
        deltas = whole_rows(args.delta, args.delta_stride)[:, args.delta_column :]
        base = args.base[args.first :][: self.taps * n].reshape(self.taps, n).astype(np.float64)
        for part in run.parts:
            here = slice(int(part["token"]), int(part["token"] + part["n_tokens"]))
            x = rows[here, :n].astype(np.float64)
            delta = deltas[here, : self.taps * groups].reshape(-1, self.taps, groups)
            weights = base + np.repeat(delta.astype(np.float64), self.group, 2)
            y = np.zeros_like(x)
            for j in range(min(self.taps, len(x))):
                y[j:] += weights[j:, j] * x[: len(x) - j]
            rows[here, :n] = y
