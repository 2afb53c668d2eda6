"""IQ2_XXS: 8 sub-blocks of 32 weights: four points of a grid of 256, and a scale of 4 bits.

``w = d * (scale + 0.5) / 4 * grid[index]``, signed. Four ``qs`` a sub-block are two words of 32
bits, low half first. First word: a byte for each index. Second: 7 bits of signs for each, then the
scale.
"""

from __future__ import annotations

from typing import Any

import numpy as np

from treadle.formats import bits, signs
from treadle.formats.format import Blocks, Builder, Codes, Field, Format, Isa, Val
from treadle.formats.grids import IQ2_XXS as GRID
from treadle.formats.kernel_grids import (
    ORDER,
    eights,
    gather_points,
    odd_steps,
    put_on,
    sevens,
)
from treadle.formats.nearest import Nearest
from treadle.formats.numbers import searched, with_steps
from treadle.formats.scale_search import Coder
from treadle.jit.types import u32

LAYOUT = np.dtype([("d", "<f2"), ("qs", "<u2", (32,))])

# Of all formats of this grid's alphabet. The largest weight may get any of the three magnitudes,
# the largest scale any step; where f16 holds d badly, a step of its own may hold it exactly.
LADDER = (np.arange(16, dtype=np.float32) + np.float32(0.5)) / np.float32(4)
SCALES = np.concatenate([np.geomspace(0.5, 1.8, 16) / 43, [1 / 25, 1 / 8]]).astype(np.float32)
SHARES = np.concatenate([1 / LADDER, 8 / np.geomspace(4, 50, 12)]).astype(np.float32)
CODER = Coder(32, LADDER, Nearest(GRID, 5).encode, SCALES, SHARES, "even")


def read(blocks: Blocks) -> tuple[Any, Any]:
    """Scales and points."""
    words = np.ascontiguousarray(blocks["qs"]).view("<u4").reshape(*blocks.shape, 8, 2)
    sign = signs.even_signs()[bits.split(words[..., 1], 4, 7)]
    points = GRID.points[bits.split(words[..., 0], 4, 8)]
    return LADDER[words[..., 1] >> np.uint32(28)], signs.put_on(points, sign)


def write(out: Blocks, found: Any) -> None:
    """The same, into blocks."""
    words = np.empty((len(out), 8, 2), "<u4")
    words[..., 0] = bits.join(found.codes, 4, 8, "<u4")
    words[..., 1] = bits.join(found.signs & np.uint8(127), 4, 7, "<u4")
    words[..., 1] |= found.steps.astype(np.uint32) << np.uint32(28)
    out["qs"] = words.reshape(-1, 16).view("<u2")


def unpack(k: Builder, field: Field) -> list[Val]:
    """Signed points, plus 64."""
    qs = field("qs")
    points = [gather_points(k, GRID, index, 64) for index in eights(k, qs)]
    return put_on(k, points, sevens(k, qs, 32), 64)


def scales(k: Builder, isa: Isa, field: Field) -> tuple[Val, None]:
    """``d * (2 * scale + 1) / 8``."""
    qs = field("qs")
    steps = k.evens(qs.bits(u32 * (qs.ty.lanes // 4)), 1)[1] >> 28
    return odd_steps(k, isa, steps, field("d"), 1 / 8), None


CODES = Codes(unpack, 64, 107, run=8, order=ORDER, scales=scales)
IQ2_XXS = Format(
    "IQ2_XXS", 16, 256, LAYOUT, with_steps(read), searched(LAYOUT, CODER.run, write), "q8", CODES
)
