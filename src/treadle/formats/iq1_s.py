"""IQ1_S: 8 sub-blocks of 32 weights: four points of a grid of 2048, a scale of 3 bits, a shift.

``w = d * (1 + 2 * scale) * (grid[index] + shift)``, the shift an eighth up or down. An index has
its low 8 bits in ``qs``. A word of ``qh`` has the high 3 bits of its four, the scale, the
shift's sign.
"""

from __future__ import annotations

from typing import Any

import numpy as np

from treadle.formats import bits
from treadle.formats.format import Blocks, Builder, Codes, Field, Format, Isa, Val
from treadle.formats.kernel_grids import ORDER, eights, odd_steps, shifted
from treadle.formats.kernel_scales import repeat
from treadle.formats.numbers import searched, with_steps
from treadle.formats.scale_search import Coder
from treadle.formats.shifted import DOWN, Shifted, values
from treadle.jit.types import u16

LAYOUT = np.dtype([("d", "<f2"), ("qs", "u1", (32,)), ("qh", "<u2", (8,))])

# Also of IQ1_M. The largest weight may be far beyond its code, or any of 1 1/8, 7/8 and 1/8.
LADDER = 1 + 2 * np.arange(8, dtype=np.float32)
ENDS = 1 / np.array([1.125, 0.875, 0.125])
SCALES = np.concatenate([np.geomspace(0.25, 1.2, 10), ENDS]).astype(np.float32)
SHARES = np.concatenate([1 / LADDER, 1 / np.geomspace(2.5, 24, 12)]).astype(np.float32)
CODER = Coder(32, LADDER, Shifted(32).encode, SCALES, SHARES)


def read(blocks: Blocks) -> tuple[Any, Any]:
    """Scales and shifted points."""
    high = bits.split(blocks["qh"], 4, 3)
    down = np.repeat(blocks["qh"] >> np.uint16(15), 4, axis=-1)
    code = blocks["qs"] | high << np.uint16(8) | down << np.uint16(11)
    return LADDER[blocks["qh"] >> np.uint16(12) & np.uint16(7)], values(code)


def write(out: Blocks, found: Any) -> None:
    """The same, into blocks."""
    index, down = found.codes % DOWN, found.codes[:, ::4] // DOWN
    out["qs"] = index & 255
    out["qh"] = bits.join(index >> 8, 4, 3, "<u2")
    out["qh"] |= (found.steps | down.astype(np.uint8) << np.uint8(3)).astype(np.uint16) << 12


def unpack(k: Builder, field: Field) -> list[Val]:
    """Eight times the shifted points, plus 16."""
    words = field("qh").bits(u16 * 8)
    each = repeat(k, words, 4)
    high = ((each >> k.const([0, 3, 6, 9] * 8, each.ty)) & 7) << 8
    down = (words & 0x8000) > 0
    return [shifted(k, index, down) for index in eights(k, field("qs").to(u16) | high)]


def scales(k: Builder, isa: Isa, field: Field) -> tuple[Val, None]:
    """``d * (2 * scale + 1) / 8``."""
    words = field("qh")
    steps = (words.bits(u16 * (words.ty.lanes // 2)) >> 12) & 7
    return odd_steps(k, isa, steps, field("d"), 1 / 8), None


CODES = Codes(unpack, 16, 25, run=8, order=ORDER, scales=scales)
IQ1_S = Format(
    "IQ1_S", 19, 256, LAYOUT, with_steps(read), searched(LAYOUT, CODER.run, write), "q8", CODES
)
