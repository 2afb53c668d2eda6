"""MXFP4: 32 four-bit floats with one power of two; ``w = d * value(code)`` (OCP MX 1.0).

``e`` is E8M0: the scale's exponent, biased by 127; halved here, for the values are doubled (see
fp4.py). The format has neither NaN nor infinity: ggml reads ``e = 255`` as 2^127.
"""

from __future__ import annotations

import numpy as np
import numpy.typing as npt

from treadle.formats.format import Blocks, Builder, Codes, F32Array, Field, Format, Isa, Val
from treadle.formats.fp4 import TABLE, VALUES, nearest
from treadle.formats.nibbles import looked_up
from treadle.formats.packing import join_bits, split_bits
from treadle.jit.types import f32, u32

LAYOUT = np.dtype([("e", "u1"), ("qs", "u1", (16,))])
LARGEST = np.float32(1.5 * 2.0**127)


def half_scale(e: npt.NDArray[np.uint8]) -> F32Array:
    """``2 ** (e - 128)``: the two smallest are subnormal in float32, and still exact."""
    return np.ldexp(np.float32(1), e.astype(np.int32) - 128)


def dequantize(blocks: Blocks) -> F32Array:
    """blocks [...] -> float32 [..., 32]."""
    values = VALUES[split_bits(blocks["qs"], 4, 16)]
    with np.errstate(over="ignore", under="ignore"):
        return values * half_scale(blocks["e"])[..., None]


def quantize(x: F32Array, weights: F32Array | None = None) -> Blocks:
    """float32 [..., 32] -> blocks [...]; the importance ``weights`` change nothing.

    The largest magnitude's binade becomes that of 4 and 6, the top one. A NaN counts as 0, an
    infinity as the largest number the format has in float32: it cannot say either.
    """
    out = np.empty(x.shape[:-1], LAYOUT)
    x = np.nan_to_num(x).clip(-LARGEST, LARGEST)
    top = np.abs(x).max(axis=-1)
    with np.errstate(divide="ignore"):
        # Rounded to float32 as C's log2f is: just below a power of two it may be that power.
        binade = np.floor(np.log2(top.astype(np.float64)).astype(np.float32))
    out["e"] = np.where(top > 0, (binade + np.float32(125)).clip(0, 254), 0)
    out["qs"] = join_bits(nearest(x, half_scale(out["e"])[..., None]), 4, 16)
    return out


def unpack(k: Builder, field: Field) -> list[Val]:
    """Doubled values, plus 16."""
    return looked_up(k, field, TABLE)


def scales(k: Builder, isa: Isa, field: Field) -> tuple[Val, None]:
    """``half_scale``: a float's exponent, and for the two subnormal ones a bit of its mantissa."""
    e = field("e").to(u32)
    bits = k.select(e > 1, (e - 1) << 23, k.const(1 << 21, e.ty) << e)
    return bits.bits(f32.like(e.ty)), None


CODES = Codes(unpack, 16, 28, run=16, order=((0,), (1,)), scales=scales)
MXFP4 = Format("MXFP4", 39, 32, LAYOUT, dequantize, quantize, "q8", CODES)
