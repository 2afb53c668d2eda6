"""Q2_K: 256 weights of two bits, 16 sub-blocks of 16; ``w = d * sc * q - dmin * m``.

Byte i of ``scales`` holds a sub-block's scale in its low nibble and its minimum in the high one.
32 bytes of ``qs`` hold 128 weights: byte j weight j in its lowest two bits, then j + 32 and so on.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np

from treadle.formats.format import Blocks, Codes, F32Array, Format
from treadle.formats.k_offset import OffsetSearch, product
from treadle.formats.kernel_scales import TWO_BITS, times, two_bits, two_factors
from treadle.formats.packing import join_bits, split_bits
from treadle.formats.rounding import to_f16
from treadle.jit.types import f32, i32, u16

if TYPE_CHECKING:
    from treadle.formats.kernel_scales import Field
    from treadle.isa.isa import Isa
    from treadle.jit.builder import Builder
    from treadle.jit.values import Val

LAYOUT = np.dtype([("scales", "u1", (16,)), ("qs", "u1", (64,)), ("d", "<f2"), ("dmin", "<f2")])

SEARCH = OffsetSearch(
    n_sub=16,
    levels=3,
    top=15,
    grid=product(np.linspace(-0.3, 0.7, 5)),
    starts=tuple((float(i), float(j)) for i in range(4) for j in range(3)),
)


def dequantize(blocks: Blocks) -> F32Array:
    """blocks [...] -> float32 [..., 256]."""
    scales = (blocks["scales"] & np.uint8(15)).astype(np.float32)
    minima = (blocks["scales"] >> np.uint8(4)).astype(np.float32)
    q = split_bits(blocks["qs"], 2, 32).astype(np.float32).reshape(*blocks.shape, 16, 16)
    d, dmin = (blocks[f].astype(np.float32)[..., None] for f in ("d", "dmin"))
    with np.errstate(invalid="ignore"):  # infinities times zero, and their differences
        w = (d * scales)[..., None] * q - (dmin * minima)[..., None]
    return w.reshape(*blocks.shape, 256)


def quantize(x: F32Array, weights: F32Array | None = None) -> Blocks:
    """float32 [..., 256] -> blocks [...] of least squared error, times ``weights`` as x if given.

    A NaN makes ``d`` NaN, and an infinity or a weight beyond 65504 * 15 makes it infinite: either
    way the whole block reads as NaN.
    """
    found = SEARCH.run(x, weights)
    out = np.empty(len(found.d), LAYOUT)
    out["d"], out["dmin"] = to_f16(found.d), to_f16(found.dmin)
    out["scales"] = found.sc | found.m << np.uint8(4)
    out["qs"] = join_bits(found.q, 2, 32)
    return out.reshape(x.shape[:-1])


def unpack(k: Builder, field: Field) -> list[Val]:
    """Codes 0..3."""
    return two_bits(k, field("qs"))


def scales(k: Builder, isa: Isa, field: Field) -> tuple[Val, Val]:
    """``d * sc`` and ``-dmin * m`` of the 16 sub-blocks."""
    both = field("scales")
    d, m = two_factors(k, isa, field("d", 4), 16)
    return (both & 15).to(i32).to(f32) * d, (both >> 4).to(i32).to(f32) * m


def unpack_folded(k: Builder, field: Field) -> list[Val]:
    """``sc * q``: 0..45."""
    return times(k, unpack(k, field), (field("scales") & 15).to(u16), 0, 0)


def scales_folded(k: Builder, isa: Isa, field: Field) -> tuple[Val, Val]:
    """``d`` for each 32 codes, ``-dmin * m`` for each 16."""
    d, m = two_factors(k, isa, field("d", 4), 16)
    first = k.shuffle(d, d, range(0, d.ty.lanes, 2))
    return first, (field("scales") >> 4).to(i32).to(f32) * m


FOLDED = Codes(
    unpack_folded, 0, 45, run=8, order=TWO_BITS, m_sub=16, scales=scales_folded, minimums=True
)
CODES = Codes(
    unpack, 0, 3, run=8, order=TWO_BITS, sub=16, scales=scales, minimums=True, folded=FOLDED
)
Q2_K = Format("Q2_K", 10, 256, LAYOUT, dequantize, quantize, "q8", CODES)
