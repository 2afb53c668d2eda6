"""IQ3_XXS: 8 sub-blocks of 32 weights: eight points of a grid of 256, and a scale of 4 bits.

``w = d * (scale + 0.5) / 2 * grid[index]``, signed. ``qs`` is the indices, each of four weights. A
word of ``scales_and_signs`` has 7 bits of signs for each eight weights, then the scale (ggml counts
these words as the end of its ``qs``).
"""

from __future__ import annotations

from typing import Any

import numpy as np

from treadle.formats import bits, signs
from treadle.formats.format import Blocks, Builder, Codes, Field, Format, Isa, Val
from treadle.formats.grids import IQ3_XXS as GRID
from treadle.formats.kernel_grids import (
    ORDER,
    apart,
    fours,
    gather_points,
    odd_steps,
    put_on,
    sevens,
)
from treadle.formats.nearest import Nearest
from treadle.formats.numbers import searched, with_steps
from treadle.formats.scale_search import Coder
from treadle.jit.types import u32

LAYOUT = np.dtype([("d", "<f2"), ("qs", "u1", (64,)), ("scales_and_signs", "<u4", (8,))])

# The largest weight may get any magnitude and the largest scale any step, as in IQ2_XXS.
LADDER = (np.arange(16, dtype=np.float32) + np.float32(0.5)) / np.float32(2)
ENDS = 1 / np.array(GRID.alphabet)
CODER = Coder(
    sub=32,
    ladder=LADDER,
    encode=Nearest(GRID, 16).encode,
    scales=np.concatenate([np.geomspace(0.6, 1.5, 14) / 62, ENDS]).astype(np.float32),
    shares=np.concatenate([1 / LADDER, 4 / np.geomspace(4, 50, 12)]).astype(np.float32),
    signs="even",
)


def read(blocks: Blocks) -> tuple[Any, Any]:
    """Scales and points."""
    words = blocks["scales_and_signs"]
    sign = signs.even_signs()[bits.split(words, 4, 7)]
    return LADDER[words >> np.uint32(28)], signs.put_on(GRID.points[blocks["qs"]], sign)


def write(out: Blocks, found: Any) -> None:
    """The same, into blocks."""
    out["qs"] = found.codes
    sevens = bits.join(found.signs & np.uint8(127), 4, 7, "<u4")
    out["scales_and_signs"] = sevens | found.steps.astype(np.uint32) << np.uint32(28)


def unpack(k: Builder, field: Field) -> list[Val]:
    """Signed points, plus 64."""
    points = [gather_points(k, GRID, index, 64) for index in fours(k, field("qs"))]
    return put_on(k, points, sevens(k, apart(k, field("scales_and_signs")), 0), 64)


def scales(k: Builder, isa: Isa, field: Field) -> tuple[Val, None]:
    """``d * (2 * scale + 1) / 4``."""
    words = field("scales_and_signs")
    steps = words.bits(u32 * (words.ty.lanes // 4)) >> 28
    return odd_steps(k, isa, steps, field("d"), 1 / 4), None


CODES = Codes(unpack, 64, 126, run=8, order=ORDER, scales=scales)
IQ3_XXS = Format(
    "IQ3_XXS", 18, 256, LAYOUT, with_steps(read), searched(LAYOUT, CODER.run, write), "q8", CODES
)
