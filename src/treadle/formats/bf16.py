"""BF16: the upper half of a float32, rounded to nearest even."""

from __future__ import annotations

import numpy as np

from treadle.formats.format import Blocks, Builder, F32Array, Format, Isa, Val
from treadle.jit.types import f32, u16, u32


def dequantize(blocks: Blocks) -> F32Array:
    """[...] -> float32 [..., 1]; exact."""
    return (blocks.astype(np.uint32) << np.uint32(16)).view(np.float32)[..., None]


def quantize(x: F32Array) -> Blocks:
    """float32 [..., 1] -> [...].

    Rounding a NaN could carry into its exponent and end as an infinity or a zero, so a NaN
    is cut instead, with its quiet bit set (ggml does the same).
    """
    u = x[..., 0].view(np.uint32)
    with np.errstate(over="ignore"):  # of a NaN, which is not used
        rounded = (u + np.uint32(0x7FFF) + (u >> np.uint32(16) & np.uint32(1))) >> np.uint32(16)
    quiet = u >> np.uint32(16) | np.uint32(0x40)
    return np.where(np.isnan(x[..., 0]), quiet, rounded).astype("<u2")


def load(k: Builder, isa: Isa, p: Val, lanes: int, n: int) -> Val:
    """``n`` weights at ``p`` as ``f32 * lanes``, zeros behind them."""
    return (k.load_first(p, u16 * lanes, n).to(u32) << 16).bits(f32 * lanes)


BF16 = Format("BF16", 30, 1, np.dtype("<u2"), dequantize, quantize, "bf16", load=load)
