"""Where the sums of a packed product go: with bias and residual, to y."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from typing import TYPE_CHECKING

from treadle.jit.types import f32
from treadle.kernels.matmul import RESIDUAL, Y_STRIDE, Segment, Y, add_bias

if TYPE_CHECKING:
    from treadle.isa.isa import Isa
    from treadle.jit.builder import Builder
    from treadle.jit.values import Operand, Val
    from treadle.kernels.gemm import Gemm
    from treadle.kernels.spec import Frame


@dataclass
class Out:
    """Where a tile's sums go: a segment's columns of y, from ``token`` on. Rows of y are padded to
    whole panels and to whole groups, so no edge needs a mask.
    """

    k: Builder
    isa: Isa
    spec: Gemm
    frame: Frame
    seg: Segment
    token: Val

    def _place(self, row: Operand, t: int) -> Val:
        """Where the panel's row of token t is, in bytes, in y and in the residual."""
        column = self.seg.column + self.seg.first + row
        return (self.token + t) * (self.frame.int(Y_STRIDE) * 4) + column * 4

    def load(self, m: int, t: int) -> Val:
        """What y holds."""
        at = self.frame.ptr(Y) + self._place(self.isa.lanes * m, t)
        return self.k.load(at, f32 * self.isa.lanes, align=4)

    def store(self, sums: Iterable[tuple[int, int, Val]], above: Val, again: bool) -> None:
        """Write sums, each a vector from some row on (``above`` it others) of some token, with bias
        and residual; ``again``: on top of what was written before, with which vectors began and
        matrix registers did not.
        """
        k = self.k
        for row_in_tile, t, y in sums:
            row = above + row_in_tile
            place, ty = self._place(row, t), y.ty
            bias = add_bias(k, self.seg, self.seg.first + row, ty.lanes)
            if bias is not None and not again:
                y = y + bias
            if self.spec.residual and not again:
                y = y + k.load(self.frame.ptr(RESIDUAL) + place, ty, align=4)
            if again and self.spec.matrix:
                y = y + k.load(self.frame.ptr(Y) + place, ty, align=4)
            k.store(self.frame.ptr(Y) + place, y, align=4)
