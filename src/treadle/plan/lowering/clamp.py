"""The words that clamp queries, keys and values, and cap scores of experts."""

from __future__ import annotations

from typing import TYPE_CHECKING

from treadle.kernels.elementwise.clamp import Clamp
from treadle.kernels.elementwise.softcap import Softcap
from treadle.kernels.spec import Grid
from treadle.plan.lowering.deferred import Floats

if TYPE_CHECKING:
    from treadle.models.ops import Rows
    from treadle.plan.lowering.ops import CpuOps


def clamped(ops: CpuOps, label: str, x: Rows, *, limit: float) -> Rows:
    """``x`` between ``-limit`` and ``limit``, in place: what it is given is used up."""
    rows, column = ops.place(x)
    stride = rows.row_bytes // 4
    spec = Clamp(x.width, limit)
    ops.steps.emit(label, spec, Grid(1, "n_tokens"), x=rows, stride=stride, column=column)
    return Floats(label, x.width, rows, column)


def capped(ops: CpuOps, label: str, x: Rows, *, cap: float) -> Rows:
    """``cap * tanh(x / cap)``, in place: what it is given is used up."""
    rows, spec = ops.floats(x), Softcap(x.width, cap, outputs=False)
    grid = Grid(spec.pieces, spec.count)
    ops.steps.emit(label, spec, grid, y=rows, stride=rows.row_bytes // 4)
    return Floats(label, x.width, rows)
