"""Attention and Mamba-2 in parallel (Falcon-H1): both read the same input, and their results are
added.
"""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING

from treadle.models.mixers.attention import ATTENTION
from treadle.models.mixers.mamba2 import MAMBA2, ROWS

if TYPE_CHECKING:
    from treadle.models.ops import Ops, Rows


def build(g: Ops, i: int, h: Rows) -> Rows:
    """Return ``attention(h) + mamba2(h)`` of layer ``i``."""
    return g.add(ATTENTION.build(g, i, h), MAMBA2.build(g, i, h))


ATTENTION_MAMBA2 = replace(
    ATTENTION,
    build=build,
    rows=(*ATTENTION.rows, *ROWS),
    sizes=lambda layer: {**ATTENTION.sizes(layer), **MAMBA2.sizes(layer)},
    memory=lambda layer: (*ATTENTION.memory(layer), *MAMBA2.memory(layer)),
)
