"""Q2_0: 64 weights, two bits each, with one scale; ``w = d * (q - 1)``, so -d, 0, d or 2 d.

Byte j of ``qs`` holds weights 4 j to 4 j + 3. The quantiser of ggml makes the largest magnitude 1,
for models trained to ternary weights: it never writes code 3, and nor does this one.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np

from treadle.formats.format import Blocks, Codes, F32Array, Format
from treadle.formats.kernel_scales import shared
from treadle.formats.packing import join_bits, split_bits
from treadle.formats.rounding import to_f16
from treadle.formats.tq2_0 import ternary
from treadle.jit.types import u8, u32

if TYPE_CHECKING:
    from treadle.formats.kernel_scales import Field
    from treadle.jit.builder import Builder
    from treadle.jit.values import Val

LAYOUT = np.dtype([("d", "<f2"), ("qs", "u1", (16,))])


def dequantize(blocks: Blocks) -> F32Array:
    """blocks [...] -> float32 [..., 64]."""
    q = split_bits(blocks["qs"], 2, 1).astype(np.float32) - np.float32(1)
    with np.errstate(invalid="ignore"):  # a scale of infinity times a quant of zero
        return q * blocks["d"].astype(np.float32)[..., None]


def quantize(x: F32Array, weights: F32Array | None = None) -> Blocks:
    """float32 [..., 64] -> blocks [...]; the importance ``weights`` change nothing.

    A NaN makes the scale NaN, an infinity or more than 65519 makes it infinite.
    """
    out = np.empty(x.shape[:-1], LAYOUT)
    d, q = ternary(x)
    out["d"] = to_f16(d)
    out["qs"] = join_bits(q, 2, 1)
    return out


def unpack(k: Builder, field: Field) -> list[Val]:
    """Codes 0..3: each byte is spread over four, whose lowest two bits no other copy reaches."""
    qs = field("qs").to(u32)
    qs = qs | (qs << 6)
    qs = (qs | (qs << 12)) & 0x03030303
    return [qs.bits(u8 * (4 * qs.ty.lanes))]


CODES = Codes(unpack, 1, 3, scales=shared(2), run=64)
Q2_0 = Format("Q2_0", 42, 64, LAYOUT, dequantize, quantize, "q8", CODES)
