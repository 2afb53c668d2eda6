"""Ops of attention residuals (Kimi K3): the states before some layers are kept in a *bank*, f32
``[N, n * n_embd]``, and mixed with the current states.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from treadle.kernels.elementwise.bank import MixBank
from treadle.kernels.spec import Grid
from treadle.plan.lowering.deferred import Floats

if TYPE_CHECKING:
    from treadle.models.ops import Rows
    from treadle.plan.lowering.ops import PlanOps


def mixed_bank(
    ops: PlanOps, label: str, x: Rows, bank: Rows | None = None, *, n: int, weight: str
) -> Rows:
    """Return the weighted sum of the first ``n`` places of the bank and of ``x``, f32
    ``[N, n_embd]``. A token's weights are the softmax of scores; a score is the dot product of the
    vector ``weight`` and the RMS norm of the states.

    Without a bank, return ``x``; the file's vector is then unused.
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
