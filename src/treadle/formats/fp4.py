"""MXFP4 and NVFP4: weights as E2M1, the four-bit float of the microscaling formats (OCP MX 1.0).

E2M1 has a sign, two exponent bits and one mantissa bit: its magnitudes are 0, 0.5, 1, 1.5, 2, 3, 4
and 6. Like ggml, treadle doubles them, so that kernels can multiply them as integer bytes, and
halves the scales instead. Neither format can represent NaN or infinity.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable

import numpy as np
import numpy.typing as npt

from treadle.formats.format import Blocks, Builder, Codes, F32Array, Field, Format, Isa, Val
from treadle.formats.kernel_bits import lookup_nibbles, paired_words
from treadle.formats.packing import join_bits, split_bits
from treadle.formats.rounding import relative
from treadle.jit.types import f16, f32, u16, u32

MAGNITUDES = np.array([0, 1, 2, 3, 4, 6, 8, 12], np.float32)
VALUES = np.concatenate([MAGNITUDES, -MAGNITUDES])  # by code; code 8, the negative zero, is 0
VALUES[8] = 0
TABLE = [16 + int(v) for v in VALUES]  # as bytes, for kernels
LEAST = 1e-4  # lowest importance, relative to the mean
MIDDLES = ((MAGNITUDES[1:] + MAGNITUDES[:-1]) / 2).tolist()


def nearest(x: F32Array, d: F32Array) -> npt.NDArray[np.uint8]:
    """Return the codes, uint8 [...], whose values times scale ``d`` are nearest to ``x`` [...];
    ``d`` broadcasts to x. Ties take the smaller magnitude.

    NaN becomes 0; weights beyond the largest value are clipped; where ``d`` is 0, so is the code.
    """
    a = np.abs(x)
    q = np.zeros(x.shape, np.uint8)
    for middle in MIDDLES:
        q += a > d * np.float32(middle)
    q[(x < 0) & (q > 0)] += np.uint8(8)
    return np.where(d > 0, q, np.uint8(0))


def best_scale(
    x: F32Array,
    weights: F32Array,
    code: npt.NDArray[np.uint8],
    moves: Iterable[int],
    scale: Callable[[npt.NDArray[np.uint8]], F32Array],
    top: int,
) -> npt.NDArray[np.uint8]:
    """Return, for each block, that of the scale codes ``code + moves`` clipped to 0..``top`` which
    has the least weighted squared error, uint8 [...]; ties take the first. ``x``, ``weights``
    (importances): float32 [..., n]; ``code``: [...]; ``scale`` maps scale codes to scales.
    """
    unit = np.abs(x).max(axis=-1, keepdims=True)
    unit = np.where(unit > 0, unit, np.float32(1))  # so that no square overflows
    weights = relative(weights, LEAST)
    least = np.full(code.shape, np.inf)
    best = code
    for move in moves:
        tried = (code.astype(np.int16) + np.int16(move)).clip(0, top).astype(np.uint8)
        d = scale(tried)[..., None]
        with np.errstate(over="ignore", under="ignore"):
            off = VALUES[nearest(x, d)] * d / unit - x / unit
        loss = (off.astype(np.float64) ** 2 * weights).sum(axis=-1)
        best = np.where(loss < least, tried, best)
        least = np.minimum(loss, least)
    return best


def unpack(k: Builder, field: Field) -> list[Val]:
    """Implement ``Codes.unpack``: emit doubled values plus 16, the first half of each 32 (NVFP4:
    16) weights, then the second half.
    """
    return lookup_nibbles(k, field, TABLE)


# -- MXFP4: 32 weights with one power of two ---------------------------------------------------
#
# ``e`` is E8M0: the scale's exponent, biased by 127; halved here. ggml reads ``e = 255`` as 2^127.

MX_LAYOUT = np.dtype([("e", "u1"), ("qs", "u1", (16,))])
LARGEST = np.float32(1.5 * 2.0**127)
MX_MOVES = (0, -1, 1)


def half_scale(e: npt.NDArray[np.uint8]) -> F32Array:
    """Return half of the scale with E8M0 exponent ``e``: ``2 ** (e - 128)``. The two smallest are
    subnormal in float32, but exact.
    """
    return np.ldexp(np.float32(1), e.astype(np.int32) - 128)


def dequantize_mx(blocks: Blocks) -> F32Array:
    """Dequantise MXFP4 blocks [...] to float32 [..., 32]."""
    values = VALUES[split_bits(blocks["qs"], 4, 16)]
    with np.errstate(over="ignore", under="ignore"):
        return values * half_scale(blocks["e"])[..., None]


def quantize_mx(x: F32Array, weights: F32Array | None = None) -> Blocks:
    """Quantise float32 [..., 32] to MXFP4 blocks [...].

    The scale puts the largest magnitude into the binade of 4 and 6, the highest one. With
    importances ``weights`` the next or previous scale is taken if its error is lower. NaN counts as
    0, infinity as the largest number that the format can represent in float32.
    """
    out = np.empty(x.shape[:-1], MX_LAYOUT)
    x = np.nan_to_num(x).clip(-LARGEST, LARGEST)
    top = np.abs(x).max(axis=-1)
    with np.errstate(divide="ignore"):
        # Rounded to float32 like C's log2f: just below a power of two it may round up to it.
        binade = np.floor(np.log2(top.astype(np.float64)).astype(np.float32))
    out["e"] = np.where(top > 0, (binade + np.float32(125)).clip(0, 254), 0)
    if weights is not None:
        out["e"] = best_scale(x, weights, out["e"], MX_MOVES, half_scale, 254)
    out["qs"] = join_bits(nearest(x, half_scale(out["e"])[..., None]), 4, 16)
    return out


def scales_mx(k: Builder, isa: Isa, field: Field) -> tuple[Val, None]:
    """Implement ``Codes.scales``: emit ``half_scale`` as f32, built from its bits: the exponent, or
    for the two subnormals a mantissa bit.
    """
    e = field("e").to(u32)
    bits = k.select(e > 1, (e - 1) << 23, k.const(1 << 21, e.ty) << e)
    return bits.bits(f32.like(e.ty)), None


LEVELS = tuple(VALUES.tolist())
MX_CODES = Codes(
    unpack,
    16,
    28,
    run=16,
    order=((0,), (1,)),
    scales=scales_mx,
    levels=LEVELS,
    words=paired_words,
)
MXFP4 = Format("MXFP4", 39, 32, MX_LAYOUT, dequantize_mx, quantize_mx, "q8", MX_CODES, aware=True)


# -- NVFP4: 64 weights in four groups of 16 with a scale each ----------------------------------
#
# ``d`` is unsigned E4M3: four exponent bits biased by 7, three of mantissa, no infinity; halved
# here. ggml reads the NaN of that type, 127, as 0, and does not treat the top bit as a sign: if it
# is set, the lower four exponent bits still count.

NV_LAYOUT = np.dtype([("d", "u1", (4,)), ("qs", "u1", (32,))])


def half_scales() -> F32Array:
    """Return float32 [256]: half the scale that each byte of ``d`` stands for."""
    code = np.arange(256)
    exponent = code >> 3 & 15
    mantissa = code & 7
    value = np.where(exponent > 0, mantissa + 8, mantissa) * 2.0 ** (np.maximum(exponent, 1) - 10)
    return np.where(code == 127, 0, value / 2).astype(np.float32)


NV_SCALES = half_scales()
NV_MOVES = (0, -1, 1, -2, 2, -3, 3, -4, 4, -5, -6, -7)  # a binade has 8 codes


def to_e4m3(x: F32Array) -> npt.NDArray[np.uint8]:
    """Return the E4M3 codes nearest to ``x`` >= 0, halves rounded up; 126 (448) from 256 on, as in
    ggml.
    """
    small = x < 2.0**-6  # subnormal: zero, or in the lowest binade without the leading bit
    binade = np.where(small, -6, np.frexp(x)[1] - 1)
    steps = np.floor(np.ldexp(x, 3 - binade) + np.float32(0.5))
    steps = np.where(small, np.minimum(steps, 7), steps)
    code = (binade + 6) * 8 + steps
    return np.where(code < 120, code, 126).astype(np.uint8)


def dequantize_nv(blocks: Blocks) -> F32Array:
    """Dequantise NVFP4 blocks [...] to float32 [..., 64]."""
    values = VALUES[split_bits(blocks["qs"], 4, 8)].reshape(*blocks.shape, 4, 16)
    w: F32Array = values * NV_SCALES[blocks["d"]][..., None]
    return w.reshape(*blocks.shape, 64)


def quantize_nv(x: F32Array, weights: F32Array | None = None) -> Blocks:
    """Quantise float32 [..., 64] to NVFP4 blocks [...].

    A group's scale maps its largest magnitude to 6; with importances ``weights`` a nearby scale is
    taken if its error is lower. NaN counts as 0, and magnitudes beyond 6 * 448, infinity included,
    as 6 * 448.
    """
    out = np.empty(x.shape[:-1], NV_LAYOUT)
    groups = np.nan_to_num(x).reshape(*x.shape[:-1], 4, 16)
    out["d"] = to_e4m3(np.abs(groups).max(axis=-1) / np.float32(6))
    if weights is not None:
        shares = np.broadcast_to(weights, x.shape).reshape(groups.shape)
        out["d"] = best_scale(groups, shares, out["d"], NV_MOVES, NV_SCALES.take, 126)
    codes = nearest(groups, NV_SCALES[out["d"]][..., None])
    out["qs"] = join_bits(codes.reshape(x.shape), 4, 8)
    return out


def scales_nv(k: Builder, isa: Isa, field: Field) -> tuple[Val, None]:
    """Implement ``Codes.scales``: emit ``half_scales`` as f32. Except for its bias, E4M3 is the
    upper part of an f16.
    """
    code = field("d")
    half = ((code & 127).to(u16) << 7).bits(f16.like(code.ty))
    scale = isa.widen_f16(k, half) * 128.0
    return k.select(code.eq(127), k.zero(scale.ty), scale), None


NV_ORDER = (0, 2, 4, 6), (1, 3, 5, 7)
NV_CODES = Codes(unpack, 16, 28, run=8, order=NV_ORDER, sub=16, scales=scales_nv)
NVFP4 = Format("NVFP4", 40, 64, NV_LAYOUT, dequantize_nv, quantize_nv, "q8", NV_CODES, aware=True)
