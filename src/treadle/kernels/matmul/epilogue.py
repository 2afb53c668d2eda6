"""Where the sums of a packed product go: with factor, bias and residual, to y."""

from __future__ import annotations

from collections.abc import Iterator
from typing import TypeAlias

from treadle.base.fast_dataclass import dataclass
from treadle.jit.language import Builder, Operand, Val
from treadle.jit.types import f32
from treadle.kernels.matmul.matmul import Matmul, Segment, finish
from treadle.kernels.spec import Frame

# Row and token in a tile, and a vector of rows from there on.
Sums: TypeAlias = "Iterator[tuple[int, int, Val]]"


@dataclass
class Epilogue:
    """Where a tile's sums go: a segment's columns of y, from ``token`` on. Rows of y are padded to
    whole panels and to whole groups, so no edge needs a mask.
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

    def at(self, row: Operand, t: int) -> Val:
        """Where in y the panel's row of token t is."""
        return self.frame.y + self._place(row, t)

    def _place(self, row: Operand, t: int) -> Val:
        """Where the panel's row of token t is, in bytes, in y and in the residual."""
        column = self.seg.column + self.seg.rows.first + row
        return (self.token + t) * self.stride + column * 4

    def load(self, m: int, t: int) -> Val:
        """What y holds."""
        at = self.at(self.k.isa.lanes * m, t)
        return self.k.load(at, f32 * self.k.isa.lanes, align=4)

    def store(self, sums: Sums, above: Val, again: bool, *, add: bool) -> None:
        """Write sums, each a vector from some row on (``above`` it others) of some token, times the
        factor, with bias and residual unless it is written ``again``; ``add``: on top of what y
        holds.
        """
        k = self.k
        for row_in_tile, t, y in sums:
            row = above + row_in_tile
            place, ty = self._place(row, t), y.ty
            y = finish(k, self.seg, y, self.seg.rows.first + row, biased=not again)
            if self.spec.residual and not again:
                y = y + k.load(self.frame.residual + place, ty, align=4)
            if add:
                y = y + k.load(self.frame.y + place, ty, align=4)
            k.store(self.frame.y + place, y, align=4)
