"""Q4_0: 32 weights as unsigned nibbles around 8 with one scale; ``w = d * (q - 8)``.

Byte j of ``qs`` holds weight j in its low nibble and weight j + 16 in its high one.
"""

from __future__ import annotations

from typing import Any

import numpy as np

from treadle.formats.format import Blocks, Codes, F32Array, Format
from treadle.formats.nibbles import nibbles
from treadle.formats.numbers import with_scale
from treadle.formats.packing import join_bits, split_bits
from treadle.formats.rounding import signed, to_f16

LAYOUT = np.dtype([("d", "<f2"), ("qs", "u1", (16,))])


def read(blocks: Blocks) -> Any:
    """Codes."""
    return split_bits(blocks["qs"], 4, 16)


def quantize(x: F32Array) -> Blocks:
    """float32 [..., 32] -> blocks [...]."""
    out, found = np.empty(x.shape[:-1], LAYOUT), signed(x, 8)
    out["d"], out["qs"] = to_f16(found.d), join_bits(found.q, 4, 16)
    return out


Q4_0 = Format(
    "Q4_0",
    2,
    32,
    LAYOUT,
    with_scale(read, 8),
    quantize,
    "q8",
    Codes(nibbles, 8, 15, run=16, order=((0,), (1,))),
)
