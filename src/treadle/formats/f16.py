"""F16: IEEE half precision, rounded to nearest even."""

from __future__ import annotations

import numpy as np

from treadle.formats.format import Blocks, Builder, F32Array, Format, Isa, Val
from treadle.jit.types import f16


def dequantize(blocks: Blocks) -> F32Array:
    """[...] -> float32 [..., 1]; exact."""
    return blocks.astype(np.float32)[..., None]


def quantize(x: F32Array) -> Blocks:
    """float32 [..., 1] -> [...]; beyond 65519 it is an infinity, as in ggml."""
    with np.errstate(over="ignore", under="ignore"):
        return x[..., 0].astype("<f2")


def load(k: Builder, isa: Isa, p: Val, lanes: int, n: int) -> Val:
    """``n`` weights at ``p`` as ``f32 * lanes``, zeros behind them."""
    wide: Val = isa.widen_f16(k, k.load_first(p, f16 * lanes, n))
    return wide


F16 = Format("F16", 1, 1, np.dtype("<f2"), dequantize, quantize, load=load)
