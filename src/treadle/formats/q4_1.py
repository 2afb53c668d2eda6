"""Q4_1: 32 weights as unsigned nibbles with one scale and one minimum; ``w = d * q + m``.

Byte j of ``qs`` holds weight j in its low nibble and weight j + 16 in its high one.
"""

from __future__ import annotations

import numpy as np

from treadle.formats.format import Blocks, Codes, F32Array, Format
from treadle.formats.nibbles import nibbles
from treadle.formats.rounding import inverse, join_nibbles, split_nibbles, to_f16, to_int

LAYOUT = np.dtype([("d", "<f2"), ("m", "<f2"), ("qs", "u1", (16,))])


def dequantize(blocks: Blocks) -> F32Array:
    """blocks [...] -> float32 [..., 32]."""
    q = split_nibbles(blocks["qs"]).astype(np.float32)
    with np.errstate(invalid="ignore"):  # a scale of infinity times a quant of zero
        scaled = q * blocks["d"].astype(np.float32)[..., None]
        return scaled + blocks["m"].astype(np.float32)[..., None]


def quantize(x: F32Array) -> Blocks:
    """float32 [..., 32] -> blocks [...]; the smallest weight becomes 0, the largest 15."""
    out = np.empty(x.shape[:-1], LAYOUT)
    m = x.min(axis=-1)
    with np.errstate(over="ignore", invalid="ignore"):
        d = (x.max(axis=-1) - m) / np.float32(15)
        q = to_int((x - m[..., None]) * inverse(d)[..., None] + np.float32(0.5), 0, 15)
    out["d"], out["m"] = to_f16(d), to_f16(m)
    out["qs"] = join_nibbles(q)
    return out


Q4_1 = Format(
    "Q4_1",
    3,
    32,
    LAYOUT,
    dequantize,
    quantize,
    "q8",
    Codes(nibbles, 0, 15, m="m", run=16, order=((0,), (1,))),
)
