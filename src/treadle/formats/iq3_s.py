"""IQ3_S: 8 sub-blocks of 32 weights: eight points of a grid of 512, and a scale of 4 bits.

``w = d * (1 + 2 * scale) * grid[index]``, signed. An index, of four weights, has its low 8 bits in
``qs`` and its high one in ``qh``, eight to a byte; ``signs`` has a bit for each weight. Scales are
nibbles, the low one first.
"""

from __future__ import annotations

from typing import Any

import numpy as np

from treadle.formats import bits, signs
from treadle.formats.format import Blocks, Builder, Codes, Field, Format, Val
from treadle.formats.grids import IQ3_S as GRID
from treadle.formats.kernel_grids import (
    ORDER,
    apart,
    fours,
    gather_points,
    nibble_scales,
    put_on,
)
from treadle.formats.nearest import Nearest
from treadle.formats.numbers import searched, with_steps
from treadle.formats.scale_search import Coder
from treadle.jit.types import u32

LAYOUT = np.dtype(
    [
        ("d", "<f2"),
        ("qs", "u1", (64,)),
        ("qh", "u1", (8,)),
        ("signs", "u1", (32,)),
        ("scales", "u1", (4,)),
    ]
)

# The largest weight may get any magnitude and the largest scale any step, as in IQ2_XXS.
LADDER = 1 + 2 * np.arange(16, dtype=np.float32)
ENDS = 1 / np.array(GRID.alphabet)
CODER = Coder(
    sub=32,
    ladder=LADDER,
    encode=Nearest(GRID, 16).encode,
    scales=np.concatenate([np.geomspace(0.6, 1.5, 14) / 15, ENDS]).astype(np.float32),
    shares=np.concatenate([1 / LADDER, 1 / np.geomspace(4, 50, 12)]).astype(np.float32),
    signs="any",
)


def read(blocks: Blocks) -> tuple[Any, Any]:
    """Scales and points."""
    high = bits.split(blocks["qh"], 8, 1).astype(np.uint16)
    points = GRID.points[blocks["qs"] | high << np.uint16(8)]
    return LADDER[bits.split(blocks["scales"], 2, 4)], signs.put_on(points, blocks["signs"])


def write(out: Blocks, found: Any) -> None:
    """The same, into blocks."""
    out["qs"], out["signs"] = found.codes & 255, found.signs
    out["qh"] = bits.join(found.codes >> 8, 8, 1, "u1")
    out["scales"] = bits.join(found.steps, 2, 4, "u1")


def unpack(k: Builder, field: Field) -> list[Val]:
    """Signed points, plus 16."""
    qh, points = field("qh"), []
    spread = k.shuffle(qh, k.zero(qh.ty), [at for s in range(8) for at in (s, 8, 8, 8) * 2])
    high = spread.bits(u32 * 16)  # of a sub-block, for its even points and its odd ones
    for i, low in enumerate(fours(k, field("qs"))):
        bit = (high << k.const([8 - 2 * i, 7 - 2 * i] * 8, high.ty)) & 256
        points.append(gather_points(k, GRID, low | bit, 16))
    return put_on(k, points, apart(k, field("signs")), 16)


CODES = Codes(unpack, 16, 31, run=8, order=ORDER, scales=nibble_scales(1))
IQ3_S = Format(
    "IQ3_S", 21, 256, LAYOUT, with_steps(read), searched(LAYOUT, CODER.run, write), "q8", CODES
)
