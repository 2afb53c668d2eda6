"""F32: IEEE single precision, as it stands."""

from __future__ import annotations

import numpy as np

from treadle.formats.format import Blocks, Builder, F32Array, Format, Isa, Val
from treadle.jit.types import f32


def dequantize(blocks: Blocks) -> F32Array:
    """[...] -> float32 [..., 1]."""
    return blocks.astype(np.float32, copy=False)[..., None]


def quantize(x: F32Array) -> Blocks:
    """float32 [..., 1] -> [...]; every bit is kept, those of a NaN included."""
    return x[..., 0].astype("<f4", copy=False)


def load(k: Builder, isa: Isa, p: Val, lanes: int, n: int) -> Val:
    """``n`` weights at ``p`` as ``f32 * lanes``, zeros behind them."""
    return k.load_first(p, f32 * lanes, n)


F32 = Format("F32", 0, 1, np.dtype("<f4"), dequantize, quantize, load=load)
