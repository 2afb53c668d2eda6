"""The step that makes each query's biases of scores by distance
(``kernels/attention/relative_logits.py``).
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np

from treadle.kernels.attention.relative_logits import RelativeLogits, by_place, relative_values
from treadle.kernels.spec import Grid
from treadle.plan.lowering.deferred import Floats
from treadle.plan.plan import Buffer

if TYPE_CHECKING:
    from treadle.models.ops import Rows
    from treadle.plan.lowering.ops import PlanOps


def relative_logits(ops: PlanOps, label: str, mixes: Rows, *, layer: int, weight: str) -> Rows:
    """Return each query's biases of scores by distance, for all heads, f32 ``[N, n_head *
    relative_values]``: ``mixes [N, n_head * rank]`` times the layer's matrix ``weight [rank,
    reach]``.
    """
    steps = ops.steps
    at = ops.config.layers[layer]
    assert at.relative is not None, layer
    rows, column = ops.place(mixes)
    width = at.n_head * relative_values(at.relative.reach)
    out = Buffer(label, steps.plan.n_tokens, 4 * width)
    steps.plan.tensors_used.add(weight)
    key = f"{weight}:by place"
    if key not in steps.weights.consts:
        made = by_place(steps.weights.tensor(weight).dequantize())
        steps.weights.numbers(key, np.ravel(made))
    (table,) = steps.weights.consts[key]
    steps.emit(
        label,
        RelativeLogits(at.n_head, at.relative.rank, at.relative.reach),
        Grid(at.n_head, "n_tokens"),
        x=rows,
        proj=table,
        out=out,
        stride=rows.row_bytes // 4,
        column=column,
    )
    return Floats(label, width, out)
