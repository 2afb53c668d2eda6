"""NVFP4: 64 four-bit floats in four groups of 16, each with a scale; ``w = d * value(code)``.

``d`` is unsigned E4M3: four exponent bits biased by 7, three of mantissa, no infinity; halved here,
for the values are doubled (see fp4.py). ggml reads the NaN of that type, 127, as 0, and never
looks at the top bit's sign: with it set, the exponent's lower four bits still count.
"""

from __future__ import annotations

import numpy as np
import numpy.typing as npt

from treadle.formats.format import Blocks, Builder, Codes, F32Array, Field, Format, Isa, Val
from treadle.formats.fp4 import TABLE, VALUES, nearest
from treadle.formats.nibbles import looked_up
from treadle.formats.packing import join_bits, split_bits
from treadle.jit.types import f16, u16

LAYOUT = np.dtype([("d", "u1", (4,)), ("qs", "u1", (32,))])


def half_scales() -> F32Array:
    """[256]: half the value of every byte of ``d``."""
    code = np.arange(256)
    exponent, mantissa = code >> 3 & 15, code & 7
    value = np.where(exponent > 0, mantissa + 8, mantissa) * 2.0 ** (np.maximum(exponent, 1) - 10)
    return np.where(code == 127, 0, value / 2).astype(np.float32)


SCALES = half_scales()


def to_e4m3(x: F32Array) -> npt.NDArray[np.uint8]:
    """Codes nearest to ``x`` of at least 0, halves up; ggml's 256 and above are all the top one."""
    small = x < 2.0**-6  # subnormal: zero, or of the lowest binade without its leading bit
    binade = np.where(small, -6, np.frexp(x)[1] - 1)
    steps = np.floor(np.ldexp(x, 3 - binade) + np.float32(0.5))
    steps = np.where(small, np.minimum(steps, 7), steps)
    code = (binade + 6) * 8 + steps
    return np.where(code < 120, code, 126).astype(np.uint8)


def dequantize(blocks: Blocks) -> F32Array:
    """blocks [...] -> float32 [..., 64]."""
    values = VALUES[split_bits(blocks["qs"], 4, 8)].reshape(*blocks.shape, 4, 16)
    w: F32Array = values * SCALES[blocks["d"]][..., None]
    return w.reshape(*blocks.shape, 64)


def quantize(x: F32Array, weights: F32Array | None = None) -> Blocks:
    """float32 [..., 64] -> blocks [...]; the importance ``weights`` change nothing.

    The largest magnitude of a group becomes 6. A NaN counts as 0, and what is beyond 6 * 448 as
    that, infinities too: this format cannot say either.
    """
    out = np.empty(x.shape[:-1], LAYOUT)
    groups = np.nan_to_num(x).reshape(*x.shape[:-1], 4, 16)
    out["d"] = to_e4m3(np.abs(groups).max(axis=-1) / np.float32(6))
    codes = nearest(groups, SCALES[out["d"]][..., None])
    out["qs"] = join_bits(codes.reshape(x.shape), 4, 8)
    return out


def unpack(k: Builder, field: Field) -> list[Val]:
    """Doubled values, plus 16: the first eight of each group, then the others."""
    return looked_up(k, field, TABLE)


def scales(k: Builder, isa: Isa, field: Field) -> tuple[Val, None]:
    """``half_scales``: but for its bias, E4M3 is the upper part of an f16."""
    code = field("d")
    half = ((code & 127).to(u16) << 7).bits(f16.like(code.ty))
    scale = isa.widen_f16(k, half) * 128.0
    return k.select(code.eq(127), k.zero(scale.ty), scale), None


CODES = Codes(unpack, 16, 28, run=8, order=((0, 2, 4, 6), (1, 3, 5, 7)), sub=16, scales=scales)
NVFP4 = Format("NVFP4", 40, 64, LAYOUT, dequantize, quantize, "q8", CODES)
