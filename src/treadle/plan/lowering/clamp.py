"""Ops that clamp queries, keys and values, and cap expert scores."""

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
    """Clamp ``x`` to between ``-limit`` and ``limit``, in place."""
    rows, column = ops.place(x)
    stride = rows.row_bytes // 4
    spec = Clamp(x.width, limit)
    ops.steps.emit(label, spec, Grid(1, "n_tokens"), x=rows, stride=stride, column=column)
    return Floats(label, x.width, rows, column)


def capped(ops: CpuOps, label: str, x: Rows, *, cap: float) -> Rows:
    """Replace ``x`` by ``cap * tanh(x / cap)``, in place."""
    rows = ops.floats(x)
    spec = Softcap(x.width, cap, outputs=False)
    grid = Grid(spec.pieces, spec.count)
    ops.steps.emit(label, spec, grid, y=rows, stride=rows.row_bytes // 4)
    return Floats(label, x.width, rows)
