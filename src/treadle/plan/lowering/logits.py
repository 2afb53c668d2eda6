"""Steps after the output projection: logit softcap, and each row's top logits."""

from __future__ import annotations

from typing import TYPE_CHECKING

from treadle.kernels.elementwise.top_logits import (
    N_VOCAB_MAX,
    PARTIAL,
    JoinTop,
    TopLogitsKernel,
    slices,
)
from treadle.kernels.run_state import QUERIES, RESULT
from treadle.kernels.spec import Grid
from treadle.plan.lowering.inputs import sampled_inputs
from treadle.plan.plan import Buffer

if TYPE_CHECKING:
    from treadle.models.ops import Rows
    from treadle.plan.lowering.steps import Steps


def emit_result(steps: Steps, name: str, x: Rows, buffer: Buffer) -> None:
    """Make ``x``, which ``buffer`` holds, the plan's output ``name``. For "logits", also emit the
    largest logits of each row, as the output "top".
    """
    steps.plan.outputs[name] = buffer
    if name == "logits":
        _emit_top(steps, x.label, buffer, x.width)


def _emit_top(steps: Steps, label: str, y: Buffer, n_vocab: int) -> None:
    """Emit the softcap of ``y``, f32 ``[n_outputs, n_vocab]``, the mask of rows that are no tokens,
    and the largest logits by the queries of samplers.
    """
    plan = steps.plan
    stride = y.row_bytes // 4
    cap = steps.config.logit_softcap
    if cap:
        from treadle.kernels.elementwise.softcap import Softcap

        softcap = Softcap(n_vocab, cap)
        grid = Grid(softcap.pieces, softcap.count)
        steps.emit(f"{label}.softcap", softcap, grid, y=y, stride=stride)
    if steps.config.n_unpadded:
        from treadle.kernels.elementwise.fill import Hide

        hide = Hide(steps.config.n_unpadded, n_vocab)
        steps.emit(f"{label}.hide", hide, Grid(1, "n_outputs"), y=y, stride=stride)
    assert n_vocab <= N_VOCAB_MAX, n_vocab
    n_rows = QUERIES * plan.n_outputs
    n_slices = slices(n_vocab)
    partials = Buffer(f"{label}.slices", n_rows * n_slices, PARTIAL.itemsize, "u1")
    top = Buffer(f"{label}.top", n_rows, RESULT.itemsize, "u1")
    grid = Grid(n_slices, "n_sampled")
    steps.emit(f"{label}.top", TopLogitsKernel(), grid, x=y, out=partials, stride=stride, n=n_vocab)
    grid = Grid(1, "n_sampled")
    steps.emit(f"{label}.top.join", JoinTop(), grid, partials=partials, out=top, n=n_vocab)
    plan.outputs["top"] = top
    plan.inputs |= sampled_inputs(plan.n_outputs, n_vocab)
