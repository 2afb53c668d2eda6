"""Ops of attention residuals: states from between layers are kept side by side, and mixed."""

from __future__ import annotations

from typing import TYPE_CHECKING

from treadle.kernels.elementwise.altup import CopyColumns
from treadle.kernels.elementwise.bank import MixBank
from treadle.kernels.spec import Grid
from treadle.plan.lowering.deferred import Floats

if TYPE_CHECKING:
    from treadle.models.ops import Rows
    from treadle.plan.lowering.ops import CpuOps


def banked(ops: CpuOps, label: str, x: Rows, bank: Rows | None = None, *, at: int, n: int) -> Rows:
    """Return the bank of ``n`` rows of states with a copy of ``x`` in place ``at``; a new bank if
    there is none.
    """
    rows, column = ops.place(x)
    out = ops.steps.floats(label, n * x.width) if bank is None else ops.floats(bank)
    ops.steps.emit(
        label,
        CopyColumns(x.width),
        Grid(1, "n_tokens"),
        x=rows,
        out=out,
        stride=rows.row_bytes // 4,
        out_stride=out.row_bytes // 4,
        column=column,
        to=at * x.width,
    )
    return Floats(label, n * x.width, out)


def mixed_bank(
    ops: CpuOps, label: str, x: Rows, bank: Rows | None = None, *, n: int, weight: str
) -> Rows:
    """Return the weighted sum of the first ``n`` rows of the bank and ``x``, by the softmax of
    their scores; ``weight``: a score is the sum of the row's RMS norm with these weights. Without a
    bank it is ``x``, and files have weights that nothing reads.
    """
    if bank is None:
        ops.steps.plan.tensors_ignored |= {f"{weight}.weight"}
        return x
    rows, column = ops.place(x)
    kept = ops.floats(bank)
    out = ops.steps.floats(label, x.width)
    ops.steps.emit(
        label,
        MixBank(x.width, n, ops.config.norm_eps),
        Grid(1, "n_tokens"),
        bank=kept,
        x=rows,
        w=ops.steps.vector(f"{weight}.weight"),
        out=out,
        bank_stride=kept.row_bytes // 4,
        stride=rows.row_bytes // 4,
        column=column,
        out_stride=out.row_bytes // 4,
    )
    return Floats(label, x.width, out)
