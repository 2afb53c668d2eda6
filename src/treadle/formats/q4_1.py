"""Q4_1: 32 weights as unsigned nibbles with one scale and one minimum; ``w = d * q + m``.

Byte j of ``qs`` holds weight j in its low nibble and weight j + 16 in its high one.
"""

from __future__ import annotations

import numpy as np

from treadle.formats.format import Blocks, Codes, F32Array, Format
from treadle.formats.nibbles import nibbles
from treadle.formats.numbers import with_scale
from treadle.formats.packing import join_bits
from treadle.formats.q4_0 import read
from treadle.formats.rounding import above, to_f16

LAYOUT = np.dtype([("d", "<f2"), ("m", "<f2"), ("qs", "u1", (16,))])


def quantize(x: F32Array) -> Blocks:
    """float32 [..., 32] -> blocks [...]; the smallest weight becomes 0, the largest 15."""
    out, found = np.empty(x.shape[:-1], LAYOUT), above(x, 15)
    out["d"], out["m"], out["qs"] = to_f16(found.d), to_f16(found.m), join_bits(found.q, 4, 16)
    return out


Q4_1 = Format(
    "Q4_1",
    3,
    32,
    LAYOUT,
    with_scale(read),
    quantize,
    "q8",
    Codes(nibbles, 0, 15, m="m", run=16, order=((0,), (1,))),
)
