"""TQ2_0: 256 ternary weights, two bits each, with one scale; ``w = d * (q - 1)``.

For models trained to weights of -1, 0 and 1: anything else loses most of its precision. The
fourth code, 3, is never written, and read as 2.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np

from treadle.formats.format import Blocks, Codes, F32Array, Format
from treadle.formats.kernel_scales import TWO_BITS, shared, two_bits
from treadle.formats.packing import join_bits, split_bits
from treadle.formats.rounding import half_away, inverse, to_f16, to_int

if TYPE_CHECKING:
    from treadle.formats.kernel_scales import Field
    from treadle.jit.builder import Builder
    from treadle.jit.values import Val

LAYOUT = np.dtype([("qs", "u1", (64,)), ("d", "<f2")])


def dequantize(blocks: Blocks) -> F32Array:
    """blocks [...] -> float32 [..., 256]."""
    q = split_bits(blocks["qs"], 2, 32).astype(np.float32) - np.float32(1)
    with np.errstate(invalid="ignore"):  # a scale of infinity times a quant of zero
        return q * blocks["d"].astype(np.float32)[..., None]


def ternary(x: F32Array) -> tuple[F32Array, np.ndarray[tuple[int, ...], np.dtype[np.int8]]]:
    """[..., n] -> the largest magnitude [...], and codes 0, 1, 2 for ``round(x / it) + 1``."""
    d = np.abs(x).max(axis=-1)
    with np.errstate(over="ignore", invalid="ignore"):
        return d, to_int(half_away(x * inverse(d)[..., None]), -1, 1) + np.int8(1)


def quantize(x: F32Array, weights: F32Array | None = None) -> Blocks:
    """float32 [..., 256] -> blocks [...]; the importance ``weights`` change nothing.

    A NaN makes the scale NaN, an infinity or more than 65519 makes it infinite.
    """
    out = np.empty(x.shape[:-1], LAYOUT)
    d, q = ternary(x)
    out["d"] = to_f16(d)
    out["qs"] = join_bits(q, 2, 32)
    return out


def unpack(k: Builder, field: Field) -> list[Val]:
    """Codes 0..3."""
    return two_bits(k, field("qs"))


CODES = Codes(unpack, 1, 3, run=8, order=TWO_BITS, scales=shared(8))
TQ2_0 = Format("TQ2_0", 35, 256, LAYOUT, dequantize, quantize, "q8", CODES)
