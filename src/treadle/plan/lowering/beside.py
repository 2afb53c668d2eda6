"""Op of multi-token-prediction layers: embeddings next to hidden states."""

from __future__ import annotations

from typing import TYPE_CHECKING

from treadle.kernels.elementwise.column_norm import ColumnNorm
from treadle.kernels.elementwise.elementwise import Embed
from treadle.kernels.spec import Grid
from treadle.plan.lowering.deferred import Floats

if TYPE_CHECKING:
    from treadle.models.ops import Rows
    from treadle.plan.lowering.ops import CpuOps


def embedded_beside(
    ops: CpuOps, label: str, x: Rows, *, weight: str, scale: float, norms: tuple[str, str]
) -> Rows:
    """Write the tokens' embeddings into the first half of the rows of ``x`` and norm each half, in
    place.
    """
    steps = ops.steps
    rows = ops.floats(x)
    width = x.width // 2
    name = f"{weight}.weight"
    stride = rows.row_bytes // 4
    fmt = steps.weights.format(name)
    steps.emit(
        f"{label}.embd",
        Embed(fmt.name, width, scale),
        Grid(1, "n_tokens"),
        w=steps.weight(name),
        x=rows,
        stride=stride,
        **steps.row_of(name),
        shape=(width,),
    )
    for i, norm in enumerate(norms):
        steps.emit(
            norm,
            ColumnNorm(width, ops.config.norm_eps),
            Grid(1, "n_tokens"),
            x=rows,
            w=steps.vector(f"{norm}.weight"),
            stride=stride,
            column=i * width,
        )
    return Floats(label, x.width, rows)
