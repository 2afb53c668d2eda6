"""GEMM epilogue: factor, bias, residual, store to y."""

from __future__ import annotations

from collections.abc import Iterator
from typing import TypeAlias

from treadle.base.fast_classes import dataclass
from treadle.jit.language import Builder, Operand, Val
from treadle.jit.types import f32
from treadle.kernels.matmul.matmul import Matmul, Segment, finish
from treadle.kernels.spec import Frame

# First row in the tile, token in the tile, and a vector of sums of rows from there on.
Sums: TypeAlias = "Iterator[tuple[int, int, Val]]"


@dataclass
class Epilogue:
    """Destination of a tile's sums: a segment's columns of y, for the tokens from ``token`` on.
    Rows of y are padded to whole panels and to whole groups, so no edge needs a mask.
    """

    k: Builder
    spec: Matmul
    frame: Frame
    seg: Segment
    token: Val

    @property
    def stride(self) -> Val:
        """Bytes from one token's row of y to the next one's."""
        return self.frame.stride * 4

    def output_address(self, row: Operand, t: int) -> Val:
        """Return the address in y of token ``t``'s value for row ``row`` of the panel."""
        return self.frame.y + self._place(row, t)

    def _place(self, row: Operand, t: int) -> Val:
        """Return the byte offset, in y and in the residual, of token ``t``'s value for row ``row``
        of the panel.
        """
        column = self.seg.column + self.seg.rows.first + row
        return (self.token + t) * self.stride + column * 4

    def load(self, m: int, t: int) -> Val:
        """Load the values that y holds now: token ``t``, the panel's ``m``-th vector of rows."""
        at = self.output_address(self.k.isa.lanes * m, t)
        return self.k.load(at, f32 * self.k.isa.lanes, align=4)

    def store(self, sums: Sums, above: Val, again: bool, *, add: bool) -> None:
        """Store a tile's ``sums`` to y, times the factor; ``above``: the number of the panel's rows
        before the tile. Bias and residual are added unless ``again`` (a later part of K); with
        ``add`` the values that y holds are added.
        """
        k = self.k
        for row_in_tile, t, y in sums:
            row = above + row_in_tile
            place = self._place(row, t)
            ty = y.ty
            y = finish(k, self.seg, y, self.seg.rows.first + row, biased=not again)
            if self.spec.residual and not again:
                y = y + k.load(self.frame.residual + place, ty, align=4)
            if add:
                y = y + k.load(self.frame.y + place, ty, align=4)
            k.store(self.frame.y + place, y, align=4)
