"""Op of Apertus' feed-forward networks: the xIELU activation."""

from __future__ import annotations

from math import gcd
from typing import TYPE_CHECKING

from treadle.kernels.elementwise.xielu import Xielu
from treadle.kernels.spec import Grid
from treadle.plan.lowering.deferred import Floats

if TYPE_CHECKING:
    from treadle.models.ops import Rows
    from treadle.plan.lowering.ops import CpuOps

# most parts of a row; a part is a multiple of _VECTOR values
_PARTS = 16
_VECTOR = 16


def xielu(ops: CpuOps, label: str, x: Rows, *, layer: int) -> Rows:
    """Apply xIELU to each value in place, with the layer's parameters."""
    steps = ops.steps
    rows = ops.floats(x)
    groups = gcd(x.width // _VECTOR, _PARTS) if x.width % _VECTOR == 0 else 1
    steps.emit(
        label,
        Xielu(x.width, groups),
        Grid(groups, "n_tokens"),
        x=rows,
        w=steps.weights.numbers(f"{label}:f32", ops.config.layers[layer].curve),
        stride=rows.row_bytes // 4,
    )
    return Floats(label, x.width, rows)
