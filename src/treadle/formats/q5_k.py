"""Q5_K: 256 weights of five bits, eight sub-blocks of 32; ``w = d * sc * q - dmin * m``.

Scales and the lower four bits lie as in Q4_K. The fifth bit of weight j of sub-block i is bit i of
byte j of ``qh``.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np

from treadle.formats.format import Blocks, Codes, F32Array, Format
from treadle.formats.k_offset import OffsetSearch, product
from treadle.formats.kernel_bits import cut
from treadle.formats.kernel_scales import six_bits
from treadle.formats.packing import join_bits, split_bits
from treadle.formats.q4_k import ORDER, scale_codes
from treadle.formats.rounding import to_f16
from treadle.formats.scales6 import join_scales

if TYPE_CHECKING:
    from treadle.formats.kernel_scales import Field
    from treadle.jit.builder import Builder
    from treadle.jit.values import Val

LAYOUT = np.dtype(
    [
        ("d", "<f2"),
        ("dmin", "<f2"),
        ("scales", "u1", (12,)),
        ("qh", "u1", (32,)),
        ("qs", "u1", (128,)),
    ]
)

SEARCH = OffsetSearch(
    n_sub=8,
    levels=31,
    top=63,
    grid=product(np.linspace(-1, 0.5, 7)),
    starts=tuple((float(i), float(j)) for i in range(4) for j in range(3)),
)


def dequantize(blocks: Blocks) -> F32Array:
    """blocks [...] -> float32 [..., 256]."""
    q = split_bits(blocks["qs"], 4, 32) | split_bits(blocks["qh"], 1, 32) << np.uint8(4)
    return scale_codes(blocks, q.astype(np.float32))


def quantize(x: F32Array, weights: F32Array | None = None) -> Blocks:
    """float32 [..., 256] -> blocks [...] of least squared error, times ``weights`` as x if given.

    A NaN makes ``d`` NaN, and an infinity or a weight beyond 65504 * 63 makes it infinite: either
    way the whole block reads as NaN.
    """
    found = SEARCH.run(x, weights)
    out = np.empty(len(found.d), LAYOUT)
    out["d"], out["dmin"] = to_f16(found.d), to_f16(found.dmin)
    out["scales"] = join_scales(found.sc, found.m)
    out["qs"] = join_bits(found.q & np.uint8(15), 4, 32)
    out["qh"] = join_bits(found.q >> np.uint8(4), 1, 32)
    return out.reshape(x.shape[:-1])


def unpack(k: Builder, field: Field) -> list[Val]:
    """Codes 0..31, in the order of Q4_K's."""
    lower = k.evens(field("qs"), 16)
    fifths = [k.each(v, 16, 4) for v in k.evens(field("qh"), 16)]
    out = []
    for odd in (0, 1):
        for first, fifth in zip(lower, fifths, strict=True):
            bits = cut(k, fifth, [odd + i for i in (0, 0, 2, 2, 4, 4, 6, 6)], 1, 4)
            out.append(cut(k, first, 4 * odd, 4) | bits)
    return out


CODES = Codes(unpack, 0, 31, run=16, order=ORDER, scales=six_bits, minimums=True)
Q5_K = Format("Q5_K", 13, 256, LAYOUT, dequantize, quantize, "q8", CODES)
