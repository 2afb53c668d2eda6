"""IQ2_XS: 16 sub-blocks of 16 weights: two points of a grid of 512, and a scale of 4 bits.

``w = d * (scale + 0.5) / 4 * grid[index]``, signed. Each of ``qs`` is eight weights: 9 bits of
index, then 7 of signs. Scales are nibbles, the low one first.
"""

from __future__ import annotations

from typing import Any

import numpy as np

from treadle.formats import bits, signs
from treadle.formats.format import Blocks, Builder, Codes, Field, Format, Val
from treadle.formats.grids import IQ2_XS as GRID
from treadle.formats.iq2_xxs import LADDER, SCALES, SHARES
from treadle.formats.kernel_grids import (
    ORDER,
    eights,
    even_signs,
    gather_points,
    nibble_scales,
    put_on,
)
from treadle.formats.nearest import Nearest
from treadle.formats.numbers import searched, with_steps
from treadle.formats.scale_search import Coder
from treadle.jit.types import u8, u16

LAYOUT = np.dtype([("d", "<f2"), ("qs", "<u2", (32,)), ("scales", "u1", (8,))])

CODER = Coder(16, LADDER, Nearest(GRID, 5).encode, SCALES, SHARES, "even")


def read(blocks: Blocks) -> tuple[Any, Any]:
    """Scales and points."""
    sign = signs.even_signs()[blocks["qs"] >> np.uint16(9)]
    points = GRID.points[blocks["qs"] & np.uint16(511)]
    return LADDER[bits.split(blocks["scales"], 2, 4)], signs.put_on(points, sign)


def write(out: Blocks, found: Any) -> None:
    """The same, into blocks."""
    out["qs"] = found.codes.astype(np.uint16) | found.signs.astype(np.uint16) << np.uint16(9)
    out["scales"] = bits.join(found.steps, 2, 4, "u1")


def unpack(k: Builder, field: Field) -> list[Val]:
    """Signed points, plus 64."""
    qs = field("qs").bits(u16 * 32)
    points = [gather_points(k, GRID, index, 64) for index in eights(k, qs & 511)]
    return put_on(k, points, even_signs(k, (qs >> 9).bits(u8 * 64)), 64, step=2)


CODES = Codes(unpack, 64, 107, run=8, order=ORDER, sub=16, scales=nibble_scales(1 / 8))
IQ2_XS = Format(
    "IQ2_XS", 17, 256, LAYOUT, with_steps(read), searched(LAYOUT, CODER.run, write), "q8", CODES
)
