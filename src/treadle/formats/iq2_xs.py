"""IQ2_XS: 16 sub-blocks of 16 weights: two points of a grid of 512, and a scale of 4 bits.

``w = d * (scale + 0.5) / 4 * grid[index]``, signed. Each of ``qs`` is eight weights: 9 bits of
index, then 7 of signs. Scales are nibbles, the low one first.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np

from treadle.formats import bits, signs
from treadle.formats.format import Blocks, Codes, F32Array, Format
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
from treadle.formats.scale_search import Coder, fit, flat
from treadle.jit.types import u8, u16

if TYPE_CHECKING:
    from treadle.formats.kernel_scales import Field
    from treadle.jit.builder import Builder
    from treadle.jit.values import Val

LAYOUT = np.dtype([("d", "<f2"), ("qs", "<u2", (32,)), ("scales", "u1", (8,))])

CODER = Coder(16, LADDER, Nearest(GRID, 5).encode, SCALES, SHARES)


def dequantize(blocks: Blocks) -> F32Array:
    """blocks [...] -> float32 [..., 256]."""
    sign = signs.even_signs()[blocks["qs"] >> np.uint16(9)]
    q = signs.put_on(GRID.points[blocks["qs"] & np.uint16(511)], sign, 16)
    scale = bits.split(blocks["scales"], 2, 4).astype(np.float32)
    with np.errstate(invalid="ignore"):
        d = blocks["d"].astype(np.float32)[..., None] * (np.float32(0.5) + scale)
        return (d[..., None] * np.float32(0.25) * q).reshape(*blocks.shape, 256)


def quantize(x: F32Array, weights: F32Array | None = None) -> Blocks:
    """float32 [..., 256], and the weights of its errors, -> blocks [...]; scale_search says how."""
    rows, w = flat(x, weights)
    magnitude, sign = signs.take_off(rows, w, even=True)
    found = fit(magnitude, w, CODER)
    out = np.empty(len(rows), LAYOUT)
    out["d"] = found.d
    out["qs"] = found.codes.astype(np.uint16) | sign.astype(np.uint16) << np.uint16(9)
    out["scales"] = bits.join(found.steps, 2, 4, "u1")
    return out.reshape(x.shape[:-1])


def unpack(k: Builder, field: Field) -> list[Val]:
    """Signed points, plus 64."""
    qs = field("qs").bits(u16 * 32)
    points = [gather_points(k, GRID, index, 64) for index in eights(k, qs & 511)]
    return put_on(k, points, even_signs(k, (qs >> 9).bits(u8 * 64)), 64, step=2)


CODES = Codes(unpack, 64, 107, run=8, order=ORDER, sub=16, scales=nibble_scales(1 / 8))
IQ2_XS = Format("IQ2_XS", 17, 256, LAYOUT, dequantize, quantize, "q8", CODES)
