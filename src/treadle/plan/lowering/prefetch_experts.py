"""Prefetch of experts' pages before they are read, where memory does not hold the whole model."""

from __future__ import annotations

import mmap
from collections.abc import Sequence
from typing import TYPE_CHECKING

from treadle.kernels.moe.page_in_experts import Fetch
from treadle.models.ops import tensor_of
from treadle.system import SYSTEM

if TYPE_CHECKING:
    from treadle.kernels.spec import Grid
    from treadle.plan.lowering.deferred import ExpertMatrix
    from treadle.plan.lowering.steps import Steps
    from treadle.plan.plan import Buffer


def emit_fetch(
    steps: Steps,
    label: str,
    matrices: Sequence[ExpertMatrix],
    grid: Grid,
    *,
    chosen: Buffer | None = None,
    tiles: Buffer | None = None,
) -> None:
    """Emit a step that asks the system for the experts' matrices, all at once.

    With many tokens, callers pass one product's at a time: they may be most of what memory holds.
    """
    told = SYSTEM.fetch_call() if steps.scarce else None
    if told is None:
        return
    arrays = []
    length = []
    pitch = []
    for each in matrices:
        name = tensor_of(each.stem, "weight")
        n_rows = steps.weights.n_rows(name)
        for const in steps.weight(name):
            row = const.array.nbytes // n_rows
            arrays.append(const)
            length.append(each.height * row)
            pitch.append(each.pitch * row)
            SYSTEM.expect_random(const.array)
    call, advice = told
    steps.emit(
        f"{label}.fetch",
        Fetch(len(arrays), tiled=tiles is not None),
        grid,
        call=call,
        advice=advice,
        page=mmap.PAGESIZE,
        w=arrays,
        length=length,
        pitch=pitch,
        chosen=chosen,
        tiles=tiles,
    )
