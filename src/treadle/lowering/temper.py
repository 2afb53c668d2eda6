"""How the CPU lowers the temperature of attention: the word ``tempered``."""

from __future__ import annotations

from typing import TYPE_CHECKING

from treadle.kernels.spec import Grid
from treadle.kernels.temper import Temper

if TYPE_CHECKING:
    from treadle.lowering.cpu import CpuOps
    from treadle.models.ops import Rows


def tempered(ops: CpuOps, label: str, x: Rows, *, table: int) -> Rows:
    """``x`` times the cosine of each token's position in a table that turns nothing, in place."""
    rows, column = ops.place(x)
    spec, stride = Temper(x.width, table), rows.row_bytes // 4
    ops.steps.emit(label, spec, Grid(1, "n_tokens"), x=rows, stride=stride, column=column)
    return x
