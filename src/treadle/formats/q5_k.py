"""Q5_K: 256 weights of five bits, eight sub-blocks of 32; ``w = d * sc * q - dmin * m``.

Scales and the lower four bits lie as in Q4_K. The fifth bit of weight j of sub-block i is bit i of
byte j of ``qh``.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np

from treadle.formats.format import Blocks, Codes, F32Array, Format
from treadle.formats.k_offset import OffsetSearch, product
from treadle.formats.kernel_scales import six_bits
from treadle.formats.packing import join_bits, split_bits
from treadle.formats.q4_k import scale_codes
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
    """Codes 0..31: sub-blocks 0 and 2, 1 and 3, 4 and 6, 5 and 7."""
    first, last = k.split(field("qs"), 64)
    bits = k.concat(field("qh"), field("qh") >> 2)  # those of sub-blocks 0 and 2 the lowest
    return [
        (first & 15) | ((bits << 4) & 16),
        (first >> 4) | ((bits << 3) & 16),
        (last & 15) | (bits & 16),
        (last >> 4) | ((bits >> 1) & 16),
    ]


ORDER = ((0, 2), (1, 3), (4, 6), (5, 7))
CODES = Codes(unpack, 0, 31, order=ORDER, scales=six_bits, minimums=True)
Q5_K = Format("Q5_K", 13, 256, LAYOUT, dequantize, quantize, "q8", CODES)
