"""IQ1_M: 16 sub-blocks of 16 weights: two points of IQ1_S's grid, a shift each, a scale of 3 bits.

``w = d * (1 + 2 * scale) * (grid[index] + shift)``, the shift an eighth up or down. An index has
its low 8 bits in ``qs`` and its high 3 in a nibble of ``qh``, whose top bit is the shift's sign.
Two bytes of ``scales`` are a word: four scales, then 4 bits of d, which has no field of its own.
"""

from __future__ import annotations

from typing import Any

import numpy as np

from treadle.formats import bits
from treadle.formats.format import Blocks, Builder, Codes, F32Array, Field, Format, Isa, Val
from treadle.formats.iq1_s import LADDER, SCALES, SHARES
from treadle.formats.kernel_grids import ORDER, eights, high_bits, odd_steps, shifted
from treadle.formats.kernel_scales import repeat
from treadle.formats.numbers import searched, with_steps
from treadle.formats.scale_search import Coder
from treadle.formats.shifted import DOWN, Shifted, values
from treadle.jit.types import u16

LAYOUT = np.dtype([("qs", "u1", (32,)), ("qh", "u1", (16,)), ("scales", "u1", (8,))])

CODER = Coder(16, LADDER, Shifted(8).encode, SCALES, SHARES)


def scale(blocks: Blocks) -> F32Array:
    """d, put together from the tops of four words."""
    tops = np.ascontiguousarray(blocks["scales"]).view("<u2") >> np.uint16(12)
    d: F32Array = bits.join(tops, 4, 4, "<u2").view("<f2").astype(np.float32)
    return d


def read(blocks: Blocks) -> tuple[Any, Any]:
    """Scales and shifted points."""
    code = blocks["qs"] | bits.split(blocks["qh"], 2, 4).astype(np.uint16) << np.uint16(8)
    words = np.ascontiguousarray(blocks["scales"]).view("<u2")
    return LADDER[bits.split(words, 4, 3)], values(code)


def write(out: Blocks, found: Any) -> None:
    """The same and d, into blocks."""
    out["qs"] = found.codes & 255
    out["qh"] = bits.join(found.codes >> 8, 2, 4, "u1")
    half = bits.split(found.d.astype("<f2").view("<u2")[:, None], 4, 4)
    words = bits.join(found.steps, 4, 3, "<u2") | half << np.uint16(12)
    out["scales"] = np.ascontiguousarray(words).view(np.uint8)


def unpack(k: Builder, field: Field) -> list[Val]:
    """Eight times the shifted points, plus 16."""
    code = field("qs").to(u16) | high_bits(k, field("qh"), 4)
    return [shifted(k, v & (DOWN - 1), (v & DOWN) > 0) for v in eights(k, code)]


def scales(k: Builder, isa: Isa, field: Field) -> tuple[Val, None]:
    """``d * (2 * scale + 1) / 8``, ``d`` put together from the tops of four words."""
    packed = field("scales")
    n = packed.ty.lanes // 8
    words = packed.bits(u16 * (4 * n))
    tops = (words >> 12) << k.const([0, 4, 8, 12] * n, words.ty)
    for far in (2, 1):
        tops = tops | k.shuffle(
            tops, tops, [i ^ far for i in range(4 * n)]
        )  # at last, d everywhere
    steps = (repeat(k, words, 4) >> k.const([0, 3, 6, 9] * (4 * n), u16 * (16 * n))) & 7
    return odd_steps(k, isa, steps, tops.bits(packed.ty), 1 / 8), None


CODES = Codes(unpack, 16, 25, run=8, order=ORDER, sub=16, scales=scales)
IQ1_M = Format(
    "IQ1_M",
    29,
    256,
    LAYOUT,
    with_steps(read, scale),
    searched(LAYOUT, CODER.run, write),
    "q8",
    CODES,
)
