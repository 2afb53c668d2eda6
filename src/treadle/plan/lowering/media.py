"""Ops on the rows of pictures and sound, which the host writes before a run."""

from __future__ import annotations

from typing import TYPE_CHECKING

from treadle.kernels.elementwise.media_rows import MediaRowsKernel
from treadle.kernels.run_state import MEDIA, MEDIA_HEAD
from treadle.kernels.spec import Grid
from treadle.plan.lowering.deferred import Floats

if TYPE_CHECKING:
    from treadle.models.ops import Rows
    from treadle.plan.lowering.ops import PlanOps


def media_rows(ops: PlanOps, label: str, x: Rows, *, level: int = 0) -> Rows:
    """Write the media rows (pictures, sound) of a batch into ``x``, in the rows of the tokens that
    stand for them: level 0 replaces the embeddings, level i adds the rows for layer i (deepstack).
    """
    steps = ops.steps
    n_embd = ops.config.n_embd
    takes = steps.plan.takes
    if MEDIA not in takes:
        takes[MEDIA] = steps.floats(MEDIA, MEDIA_HEAD + n_embd * (1 + ops.config.media.n_deepstack))
    rows = ops.floats(x)
    steps.emit(
        label,
        MediaRowsKernel(x.width, level * n_embd, level > 0),
        Grid(1, "n_tokens"),
        x=rows,
        media=takes[MEDIA],
        stride=rows.row_bytes // 4,
        media_stride=takes[MEDIA].row_bytes // 4,
    )
    return Floats(label, x.width, rows)
