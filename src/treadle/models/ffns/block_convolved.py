"""Gated FFN between two short convolutions within a drafted block (DFlash 2); see
``mixers/block_convolved.py``.
"""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING

from treadle.models.ffns.gated import GATED
from treadle.models.mixers.block_convolved import convolved, rows_of, sizes_of

if TYPE_CHECKING:
    from treadle.models.ops import Ops, Rows


def build(g: Ops, i: int, h: Rows) -> Rows:
    """Return ``convolution(ffn(convolution(h)))`` of layer ``i``, with a gated FFN."""
    return convolved(g, i, h, GATED)


GATED_BLOCK_CONVOLVED = replace(
    GATED,
    build=build,
    rows=rows_of(GATED),
    sizes=lambda layer: {**GATED.sizes(layer), **sizes_of(layer)},
)
