"""Sizes of matrix products that plans and runs share."""

from __future__ import annotations

from typing import TYPE_CHECKING

from treadle.kernels.run_state import GEMV_TOKENS

if TYPE_CHECKING:
    from treadle.jit.language import Isa


COLUMNS = 128  # columns of y are padded to a multiple of this, so that no tile needs a mask


def batch_sizes(isa: Isa, floats: bool) -> tuple[int, ...]:
    """Return the batch sizes, in tokens, that have plans of their own besides the plan for many
    tokens. ``floats``: most of the model's weights are floats.
    """
    if isa.matrix is not None:
        few = (isa.tiles.float_gemv,) if floats and isa.tiles.float_gemv else ()
        return (*GEMV_TOKENS, *few, isa.matrix.vector_tokens)
    if most := {isa.tiles.lanes, isa.tiles.float_lanes * floats} - {0}:
        return tuple(sorted({*GEMV_TOKENS, isa.lanes // 2, *most}))
    return (*GEMV_TOKENS, isa.tiles.few[1]) if isa.tiles.few[1] else GEMV_TOKENS
