"""The op ``clustered``: an output matrix whose rows lie in clusters, of which only a token's best
are multiplied.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from treadle.kernels.matmul.select import matmul
from treadle.kernels.moe.route import Route
from treadle.kernels.spec import Grid
from treadle.plan.lowering.deferred import Floats
from treadle.plan.plan import Buffer

if TYPE_CHECKING:
    from treadle.models.ops import Rows
    from treadle.plan.lowering.ops import PlanOps

CHOSEN = "clusters"  # output of the plan: each token's clusters, i32 [N, n_used], best first


def clustered(
    ops: PlanOps, label: str, h: Rows, scores: Rows, *, weight: str, n: int, n_used: int
) -> Rows:
    """Return the products of ``h`` with parts of a matrix, f32 ``[N, n_used * m]``; also make the
    numbers of these parts, i32 ``[N, n_used]``, the plan's output CHOSEN.

    The matrix ``weight`` has ``n`` equal parts of ``m`` rows. A token's products are those of the
    ``n_used`` parts with the largest ``scores [N, n]``, the best part first.
    """
    steps = ops.steps
    name = f"{weight}.weight"
    m = steps.weights.n_rows(name) // n
    rows = ops.floats(scores)
    n_choices = n_used * steps.plan.n_tokens
    chosen = Buffer(f"{label}.chosen", n_choices, 4, "i4")
    steps.emit(
        f"{label}.route",
        Route(n, n_used, "softmax"),
        Grid(1, "n_tokens"),
        scores=rows,
        bias=None,
        scales=None,
        chosen=chosen,
        weights=Buffer(f"{label}.weights", n_choices, 4),
        stride=rows.row_bytes // 4,
    )
    spec = matmul(
        steps.weights.format(name), steps.isa, h.width, 1, steps.table, segments=1, experts=n_used
    )
    y = Buffer(label, steps.plan.n_tokens, n_used * m * 4)
    steps.emit(
        label,
        spec,
        Grid(spec.strips([m], steps.isa.lanes) * n_used, "n_tokens"),
        n_bytes=steps.weights.n_bytes(name),
        read_share=n_used / n,
        n_flops=2 * spec.k * m * n_used,
        shape=(m, spec.k),
        x=ops.activations(h, spec.layout()),
        y=y,
        stride=m,
        tiles=chosen,
        w=[steps.weight(name)],
        bias=None,
        factor=None,
        rows=[m],
        column=[0],
        pitch=[m],
        tokens=n_used,
    )
    steps.plan.outputs[CHOSEN] = chosen
    return Floats(label, n_used * m, y)
