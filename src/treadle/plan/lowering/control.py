"""The step that adds control vectors to the states after a layer."""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np

from treadle.kernels.elementwise.control_vectors import AddDirections
from treadle.kernels.spec import Grid
from treadle.plan.lowering.deferred import Floats

if TYPE_CHECKING:
    from treadle.models.ops import Rows
    from treadle.plan.lowering.ops import PlanOps
    from treadle.plan.plan import Const


def emit_control(ops: PlanOps, label: str, x: Rows, layer: int) -> Rows:
    """Add to ``x``, the states after ``layer``, the control vectors of each row's sequence, in
    place. Without a direction for this layer, return ``x``.
    """
    steps = ops.steps
    weights = steps.weights
    if not any(layer in directions for directions in weights.directions):
        return x
    rows = ops.summand(x)
    n_vectors = len(weights.directions)
    n_embd = ops.config.n_embd
    steps.emit(
        label,
        AddDirections(n_embd, x.width // n_embd),
        Grid(1, "n_loras"),
        n_bytes=4 * n_vectors * n_embd,
        shape=(n_vectors, n_embd),
        x=rows,
        w=_packed(ops, label, layer),
        stride=rows.row_bytes // 4,
        first=weights.n_scales - n_vectors,
        n_vectors=n_vectors,
    )
    return Floats(label, x.width, rows)


def _packed(ops: PlanOps, label: str, layer: int) -> Const:
    """Return the directions of all control vectors for a layer, f32 ``[n_vectors, n_embd]``, with
    zeros for control vectors that have none there; divided by ``residual_scale``, as the residual
    stream is.
    """
    weights = ops.steps.weights
    rows = np.zeros((len(weights.directions), ops.config.n_embd), np.float32)
    for row, directions in zip(rows, weights.directions, strict=True):
        if layer in directions:
            row[:] = directions[layer] / np.float32(ops.config.residual_scale)
    return weights.numbers(f"{label}:f32", rows.ravel())
