"""Q4_0: 32 weights as unsigned nibbles around 8 with one scale; ``w = d * (q - 8)``.

Byte j of ``qs`` holds weight j in its low nibble and weight j + 16 in its high one.
"""

from __future__ import annotations

import numpy as np

from treadle.formats.format import Blocks, Codes, F32Array, Format
from treadle.formats.nibbles import nibbles
from treadle.formats.rounding import inverse, join_nibbles, split_nibbles, to_f16, to_int

LAYOUT = np.dtype([("d", "<f2"), ("qs", "u1", (16,))])


def dequantize(blocks: Blocks) -> F32Array:
    """blocks [...] -> float32 [..., 32]."""
    q = split_nibbles(blocks["qs"]).astype(np.float32) - np.float32(8)
    with np.errstate(invalid="ignore"):  # a scale of infinity times a quant of zero
        return q * blocks["d"].astype(np.float32)[..., None]


def quantize(x: F32Array) -> Blocks:
    """float32 [..., 32] -> blocks [...].

    The weight of largest magnitude becomes -8, the end with the longer reach: so ``d`` has
    the sign opposite to that weight's.
    """
    out = np.empty(x.shape[:-1], LAYOUT)
    extreme = np.take_along_axis(x, np.abs(x).argmax(axis=-1)[..., None], axis=-1)[..., 0]
    d = extreme / np.float32(-8)
    out["d"] = to_f16(d)
    with np.errstate(over="ignore", invalid="ignore"):
        q = to_int(x * inverse(d)[..., None] + np.float32(8.5), 0, 15)
    out["qs"] = join_nibbles(q)
    return out


Q4_0 = Format(
    "Q4_0",
    2,
    32,
    LAYOUT,
    dequantize,
    quantize,
    "q8",
    Codes(nibbles, 8, 15, run=16, order=((0,), (1,))),
)
