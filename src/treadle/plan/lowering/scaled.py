"""CPU lowering of ops that scale queries, keys or states by a factor per token or head."""

from __future__ import annotations

import math
from typing import TYPE_CHECKING

from treadle.kernels.elementwise.scale import ScaleByExpert, ScaleColumns, Temper
from treadle.kernels.recurrent.gates import UnitHeads
from treadle.kernels.spec import Grid
from treadle.plan.lowering.deferred import Floats

if TYPE_CHECKING:
    from treadle.models.ops import Rows
    from treadle.plan.lowering.ops import CpuOps


def tempered(ops: CpuOps, label: str, x: Rows, *, table: int) -> Rows:
    """Multiply ``x`` in place by each token's cosine in a rope table used for scaling only."""
    rows, column = ops.place(x)
    spec = Temper(x.width, table)
    stride = rows.row_bytes // 4
    ops.steps.emit(label, spec, Grid(1, "n_tokens"), x=rows, stride=stride, column=column)
    return x


def multiplied(ops: CpuOps, label: str, x: Rows, *, gain: float) -> Rows:
    """Multiply ``x`` by ``gain`` in place."""
    rows, column = ops.place(x)
    spec = ScaleColumns(x.width, gain)
    stride = rows.row_bytes // 4
    ops.steps.emit(label, spec, Grid(1, "n_tokens"), x=rows, stride=stride, column=column)
    return Floats(label, x.width, rows, column)


def normed_heads(ops: CpuOps, label: str, x: Rows, *, heads: int) -> Rows:
    """RMS norm without weights of each of ``heads`` equal parts, in place."""
    rows, column = ops.place(x)
    k = x.width // heads
    spec = UnitHeads(k, heads, math.sqrt(k), k * ops.config.norm_eps)
    grid = Grid(heads, "n_tokens")
    stride = rows.row_bytes // 4
    ops.steps.emit(label, spec, grid, x=rows, stride=stride, column=column)
    return x


def weighed(ops: CpuOps, label: str, x: Rows, scores: Rows) -> Rows:
    """``x`` times the sigmoid of each token's largest score."""
    rows = ops.floats(x)
    of = ops.floats(scores)
    out = ops.steps.floats(label, x.width)
    ops.steps.emit(
        label,
        ScaleByExpert(x.width, scores.width),
        Grid(1, "n_tokens"),
        x=rows,
        scores=of,
        out=out,
        stride=rows.row_bytes // 4,
        scores_stride=of.row_bytes // 4,
        out_stride=out.row_bytes // 4,
    )
    return Floats(label, x.width, out)
