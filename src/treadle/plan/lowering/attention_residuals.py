"""The op of attention residuals (Kimi K3): the states before each block of layers are kept side by
side, f32 ``[N, n * n_embd]``, and mixed with the current states.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from treadle.kernels.elementwise.attention_residuals import AttentionResidual
from treadle.kernels.spec import Grid
from treadle.plan.lowering.deferred import Floats

if TYPE_CHECKING:
    from treadle.models.ops import Rows
    from treadle.plan.lowering.ops import PlanOps


def attention_residual(
    ops: PlanOps, label: str, x: Rows, blocks: Rows | None = None, *, n: int, weight: str
) -> Rows:
    """Return a weighted sum of the first ``n`` states in ``blocks`` and of ``x``, f32 ``[N,
    n_embd]``. A token's weights are the softmax of ``n + 1`` scores, one for each of these states:
    the dot product of the vector ``weight`` and the RMS norm of the state.

    Without ``blocks``, return ``x``; the file's vector is then unused.
    """
    if blocks is None:
        ops.steps.plan.tensors_ignored |= {f"{weight}.weight"}
        return x
    rows, column = ops.place(x)
    kept = ops.floats(blocks)
    out = ops.steps.floats(label, x.width)
    ops.steps.emit(
        label,
        AttentionResidual(x.width, n, ops.config.norm_eps),
        Grid(1, "n_tokens"),
        blocks=kept,
        x=rows,
        w=ops.steps.vector(f"{weight}.weight"),
        out=out,
        blocks_stride=kept.row_bytes // 4,
        stride=rows.row_bytes // 4,
        column=column,
        out_stride=out.row_bytes // 4,
    )
    return Floats(label, x.width, out)
