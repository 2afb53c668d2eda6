"""IQ2_S: 16 sub-blocks of 16 weights: two points of a grid of 1024, and a scale of 4 bits.

``w = d * (scale + 0.5) / 4 * grid[index]``, signed. An index has its low 8 bits in ``qs`` and its
high 2 in ``qh``, four to a byte; ``signs`` has a bit for each weight (ggml counts it as the second
half of its ``qs``). Scales are nibbles, the low one first.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np

from treadle.formats import bits, signs
from treadle.formats.format import Blocks, Codes, F32Array, Format
from treadle.formats.grids import IQ2_S as GRID
from treadle.formats.iq2_xxs import LADDER, SCALES, SHARES
from treadle.formats.kernel_grids import (
    ORDER,
    apart,
    eights,
    gather_points,
    high_bits,
    nibble_scales,
    put_on,
)
from treadle.formats.nearest import Nearest
from treadle.formats.scale_search import Coder, fit, flat
from treadle.jit.types import u16

if TYPE_CHECKING:
    from treadle.formats.kernel_scales import Field
    from treadle.jit.builder import Builder
    from treadle.jit.values import Val

LAYOUT = np.dtype(
    [
        ("d", "<f2"),
        ("qs", "u1", (32,)),
        ("signs", "u1", (32,)),
        ("qh", "u1", (8,)),
        ("scales", "u1", (8,)),
    ]
)

CODER = Coder(16, LADDER, Nearest(GRID, 5).encode, SCALES, SHARES)


def dequantize(blocks: Blocks) -> F32Array:
    """blocks [...] -> float32 [..., 256]."""
    high = bits.split(blocks["qh"], 4, 2).astype(np.uint16)
    q = signs.put_on(GRID.points[blocks["qs"] | high << np.uint16(8)], blocks["signs"], 16)
    scale = bits.split(blocks["scales"], 2, 4).astype(np.float32)
    with np.errstate(invalid="ignore"):
        d = blocks["d"].astype(np.float32)[..., None] * (np.float32(0.5) + scale)
        return (d[..., None] * np.float32(0.25) * q).reshape(*blocks.shape, 256)


def quantize(x: F32Array, weights: F32Array | None = None) -> Blocks:
    """float32 [..., 256], and the weights of its errors, -> blocks [...]; scale_search says how."""
    rows, w = flat(x, weights)
    magnitude, sign = signs.take_off(rows, w, even=False)
    found = fit(magnitude, w, CODER)
    out = np.empty(len(rows), LAYOUT)
    out["d"] = found.d
    out["qs"] = found.codes & 255
    out["signs"] = sign
    out["qh"] = bits.join(found.codes >> 8, 4, 2, "u1")
    out["scales"] = bits.join(found.steps, 2, 4, "u1")
    return out.reshape(x.shape[:-1])


def unpack(k: Builder, field: Field) -> list[Val]:
    """Signed points, plus 64."""
    index = field("qs").to(u16) | high_bits(k, field("qh"), 2)
    points = [gather_points(k, GRID, i, 64) for i in eights(k, index)]
    return put_on(k, points, apart(k, field("signs")), 64)


CODES = Codes(unpack, 64, 107, run=8, order=ORDER, sub=16, scales=nibble_scales(1 / 8))
IQ2_S = Format("IQ2_S", 22, 256, LAYOUT, dequantize, quantize, "q8", CODES)
