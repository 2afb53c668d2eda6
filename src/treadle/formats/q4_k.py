"""Q4_K: 256 weights as unsigned nibbles, eight sub-blocks of 32; ``w = d * sc * q - dmin * m``.

Each sub-block has a scale ``sc`` and a minimum ``m`` of six bits (scales6.py). Byte j of each 32 of
``qs`` holds weight j of one sub-block in its low nibble, and of the next in its high one.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np

from treadle.formats.format import Blocks, Codes, F32Array, Format
from treadle.formats.k_offset import OffsetSearch, product
from treadle.formats.kernel_bits import cut
from treadle.formats.kernel_scales import six_bits
from treadle.formats.packing import join_bits, split_bits
from treadle.formats.rounding import to_f16
from treadle.formats.scales6 import join_scales, split_scales

if TYPE_CHECKING:
    from treadle.formats.kernel_scales import Field
    from treadle.jit.builder import Builder
    from treadle.jit.values import Val

LAYOUT = np.dtype([("d", "<f2"), ("dmin", "<f2"), ("scales", "u1", (12,)), ("qs", "u1", (128,))])

SEARCH = OffsetSearch(
    n_sub=8,
    levels=15,
    top=63,
    grid=product(np.linspace(-1, 0.5, 7)),
    starts=tuple((float(i), float(j)) for i in range(4) for j in range(3)),
)


def scale_codes(blocks: Blocks, codes: F32Array) -> F32Array:
    """``d * sc * q - dmin * m`` for float32 codes [..., 256]; Q5_K shares it."""
    scales, minima = (a.astype(np.float32)[..., None] for a in split_scales(blocks["scales"]))
    d, dmin = (blocks[f].astype(np.float32)[..., None, None] for f in ("d", "dmin"))
    with np.errstate(invalid="ignore"):  # infinities times zero, and their differences
        w = d * scales * codes.reshape(*blocks.shape, 8, 32) - dmin * minima
    return w.reshape(codes.shape)


def dequantize(blocks: Blocks) -> F32Array:
    """blocks [...] -> float32 [..., 256]."""
    return scale_codes(blocks, split_bits(blocks["qs"], 4, 32).astype(np.float32))


def quantize(x: F32Array, weights: F32Array | None = None) -> Blocks:
    """float32 [..., 256] -> blocks [...] of least squared error, times ``weights`` as x if given.

    A NaN makes ``d`` NaN, and an infinity or a weight beyond 65504 * 63 makes it infinite: either
    way the whole block reads as NaN.
    """
    found = SEARCH.run(x, weights)
    out = np.empty(len(found.d), LAYOUT)
    out["d"], out["dmin"] = to_f16(found.d), to_f16(found.dmin)
    out["scales"] = join_scales(found.sc, found.m)
    out["qs"] = join_bits(found.q, 4, 32)
    return out.reshape(x.shape[:-1])


def unpack(k: Builder, field: Field) -> list[Val]:
    """Codes 0..15: the first halves of sub-blocks 0, 2, 4 and 6, then the second ones; then those
    of 1, 3, 5 and 7.
    """
    first, second = k.evens(field("qs"), 16)
    return [cut(k, v, at, 4) for at in (0, 4) for v in (first, second)]


# Both halves of a sub-block stand in the same lanes, so their dots are scaled together.
ORDER = ((0, 4, 8, 12), (1, 5, 9, 13), (2, 6, 10, 14), (3, 7, 11, 15))
CODES = Codes(unpack, 0, 15, run=16, order=ORDER, scales=six_bits, minimums=True)
Q4_K = Format("Q4_K", 12, 256, LAYOUT, dequantize, quantize, "q8", CODES)
