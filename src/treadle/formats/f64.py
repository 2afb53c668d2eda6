"""F64: IEEE double precision; only ever an input, for treadle computes in float32."""

from __future__ import annotations

import numpy as np

from treadle.formats.format import Blocks, Builder, F32Array, Format, Isa, Val
from treadle.jit.types import f32, f64


def dequantize(blocks: Blocks) -> F32Array:
    """[...] -> float32 [..., 1], nearest even; beyond float32 it is an infinity."""
    with np.errstate(over="ignore", under="ignore"):
        return blocks.astype(np.float32)[..., None]


def quantize(x: F32Array) -> Blocks:
    """float32 [..., 1] -> [...]; exact."""
    return x[..., 0].astype("<f8")


def load(k: Builder, isa: Isa, p: Val, lanes: int, n: int) -> Val:
    """``n`` weights at ``p`` as ``f32 * lanes``, zeros behind them."""
    return k.load_first(p, f64 * lanes, n).to(f32)


F64 = Format("F64", 28, 1, np.dtype("<f8"), dequantize, quantize, load=load)
