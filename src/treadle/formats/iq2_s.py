"""IQ2_S: 16 sub-blocks of 16 weights: two points of a grid of 1024, and a scale of 4 bits.

``w = d * (scale + 0.5) / 4 * grid[index]``, signed. An index has its low 8 bits in ``qs`` and its
high 2 in ``qh``, four to a byte; ``signs`` has a bit for each weight (ggml counts it as the second
half of its ``qs``). Scales are nibbles, the low one first.
"""

from __future__ import annotations

from typing import Any

import numpy as np

from treadle.formats import bits, signs
from treadle.formats.format import Blocks, Builder, Codes, Field, Format, Val
from treadle.formats.grids import IQ2_S as GRID
from treadle.formats.iq2_xxs import LADDER, SCALES, SHARES
from treadle.formats.kernel_grids import (
    ORDER,
    apart,
    eights,
    gather_points,
    high_bits,
    nibble_scales,
    put_on,
)
from treadle.formats.nearest import Nearest
from treadle.formats.numbers import searched, with_steps
from treadle.formats.scale_search import Coder
from treadle.jit.types import u16

LAYOUT = np.dtype(
    [
        ("d", "<f2"),
        ("qs", "u1", (32,)),
        ("signs", "u1", (32,)),
        ("qh", "u1", (8,)),
        ("scales", "u1", (8,)),
    ]
)

CODER = Coder(16, LADDER, Nearest(GRID, 5).encode, SCALES, SHARES, "any")


def read(blocks: Blocks) -> tuple[Any, Any]:
    """Scales and points."""
    high = bits.split(blocks["qh"], 4, 2).astype(np.uint16)
    points = GRID.points[blocks["qs"] | high << np.uint16(8)]
    return LADDER[bits.split(blocks["scales"], 2, 4)], signs.put_on(points, blocks["signs"])


def write(out: Blocks, found: Any) -> None:
    """The same, into blocks."""
    out["qs"], out["signs"] = found.codes & 255, found.signs
    out["qh"] = bits.join(found.codes >> 8, 4, 2, "u1")
    out["scales"] = bits.join(found.steps, 2, 4, "u1")


def unpack(k: Builder, field: Field) -> list[Val]:
    """Signed points, plus 64."""
    index = field("qs").to(u16) | high_bits(k, field("qh"), 2)
    points = [gather_points(k, GRID, i, 64) for i in eights(k, index)]
    return put_on(k, points, apart(k, field("signs")), 64)


CODES = Codes(unpack, 64, 107, run=8, order=ORDER, sub=16, scales=nibble_scales(1 / 8))
IQ2_S = Format(
    "IQ2_S", 22, 256, LAYOUT, with_steps(read), searched(LAYOUT, CODER.run, write), "q8", CODES
)
