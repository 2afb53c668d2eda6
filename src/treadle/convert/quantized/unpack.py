"""Numbers of quantised checkpoints as ggml blocks or as floats.

Integers with a scale and a zero point per group, ``w = scale * (code - zero)``, become blocks with
the same numbers if GGUF has such blocks: Q4_0, Q4_1 or Q8_0, whose scale is an f16. 8-bit floats,
bitsandbytes' tables, and groups that fit no block are multiplied out.
"""

from __future__ import annotations

from typing import Any

import numpy as np
import numpy.typing as npt

from treadle.convert.sources.derived_tensors import mxfp4_blocks
from treadle.formats import by_name
from treadle.formats.fp4 import VALUES

Array = npt.NDArray[Any]
F32Array = npt.NDArray[np.float32]

WORD = 32  # bits
BLOCK = 32  # weights per block of Q4_0, Q4_1 and Q8_0
NV_BLOCK = 64  # weights per NVFP4 block
NV_GROUP = 16  # weights per NVFP4 scale
MX_GROUP = 32
_AT_ONCE = 1 << 16  # weights converted at a time: the floats stay in cache

E4M3 = "F8_E4M3"
FLOAT8 = {E4M3: (20, 120), "F8_E5M2": (21, 112)}  # shift to float32's bits, and bias difference
INFINITIES = {"F8_E5M2": 124}  # larger codes are NaNs; E4M3 has only one NaN: 127


def float8(codes: Array, dtype: str) -> F32Array:
    """Decode 8-bit floats of type ``dtype``, uint8, to float32: shift exponent and mantissa into
    place, then multiply by the difference of the exponent biases. NaNs and infinities are kept.
    """
    shift, bias = FLOAT8[dtype]
    bits = codes.view(np.int8).astype(np.int32)  # sign-extends: the sign bit is in place
    bits <<= np.int32(shift)
    bits &= np.int32(127 << shift | -1 << 31)
    values = bits.view(np.float32)
    values *= np.float32(2.0**bias)
    if (odd := is_nonfinite(codes, dtype)).any():
        values[odd & (codes & 127 == INFINITIES.get(dtype, 0))] *= np.float32(np.inf)
        values[odd & (codes & 127 != INFINITIES.get(dtype, 0))] = np.nan
    return values


def is_nonfinite(codes: Array, dtype: str) -> Array:
    """Return a bool per 8-bit float of type ``dtype``: whether it is an infinity or a NaN."""
    return np.asarray(codes & 127 >= INFINITIES.get(dtype, 127))


def powers(exponents: Array) -> F32Array:
    """Return powers of two, float32, from uint8 exponents with bias 127."""
    return np.ldexp(np.float32(1), exponents.astype(np.int32) - 127)


def to_bytes(values: F32Array, dtype: str) -> Array:
    """Convert float32 [.., K] to ``dtype``, F16 or BF16, as bytes, uint8 [.., 2 K]."""
    return by_name(dtype).quantize_rows(np.ascontiguousarray(values, np.float32))


# -- 8-bit floats -----------------------------------------------------------------------------


def from_float8(codes: Array, scales: F32Array, block: tuple[int, int], dtype: str) -> Array:
    """Return 8-bit float codes of type ``dtype``, uint8 [.., M, K], times their scales, [.., R, C],
    as BF16, uint8 [.., M, 2 K]. ``block``: rows and columns of weights that share a scale.
    """
    out = np.empty((*codes.shape[:-1], 2 * codes.shape[-1]), np.uint8)
    (m, k), (n_rows, n_columns) = block, codes.shape[-2:]
    for at in np.ndindex(*codes.shape[:-2]):
        each = np.repeat(scales[at], k, 1)[:, :n_columns] if scales.shape[-1] > 1 else scales[at]
        for rows in _pieces(n_rows, n_columns):
            values = float8(codes[at][rows], dtype)
            with np.errstate(invalid="ignore"):  # callers check for NaN
                values *= each[np.arange(rows.start, rows.stop) // m]
            out[at][rows] = to_bytes(values, "BF16")
    return out


def float4(pairs: Array) -> F32Array:
    """Decode pairs of E2M1, uint8 [.., K / 2], to float32 [.., K]."""
    return VALUES[split_bytes(pairs, 4)] * np.float32(0.5)  # VALUES are doubled


# -- integers ---------------------------------------------------------------------------------


def split_words(words: Array, bits: int) -> Array:
    """Unpack int32 [N, W], codes contiguous from the lowest bit on, to uint8 [N, W * 32 / bits].

    32 codes take ``bits`` words, so a 3-bit code may span two words.
    """
    words = np.ascontiguousarray(words).view(np.uint32)
    if 8 % bits == 0:
        return split_bytes(words.view(np.uint8), bits)
    words = words.reshape(len(words), -1, bits)
    codes = np.empty((*words.shape[:2], WORD), np.uint8)
    for i in range(WORD):
        word, low = divmod(i * bits, WORD)
        found = words[..., word] >> np.uint32(low)
        if low + bits > WORD:
            found |= words[..., word + 1] << np.uint32(WORD - low)
        codes[..., i] = found & np.uint32((1 << bits) - 1)
    return codes.reshape(len(words), -1)


def split_bytes(joined: Array, bits: int) -> Array:
    """Unpack uint8 [.., n], codes of 2, 4 or 8 bits from the lowest on, to uint8 [.., n * 8 /
    bits].
    """
    codes = np.empty((*joined.shape, 8 // bits), np.uint8)
    for i in range(8 // bits):
        codes[..., i] = joined >> np.uint8(i * bits) & np.uint8((1 << bits) - 1)
    return codes.reshape(*joined.shape[:-1], -1)


def split_awq(words: Array) -> Array:
    """Unpack AWQ words, int32 [N, W], to codes in column order, uint8 [N, 8 W].

    In a word the lower four nibbles are even columns, the upper four odd ones, which suits a GPU's
    conversion to f16.
    """
    halves = split_words(words, 4).reshape(len(words), -1, 2, 4)
    return halves.swapaxes(-1, -2).reshape(len(words), -1)


def whole_numbers(
    dtype: str, codes: Array, scales: F32Array, zeros: Array, groups: Array | None = None
) -> Array:
    """Compute ``scales * (codes - zeros)`` in ``dtype``, Q4_0, Q4_1, Q8_0 or a float type: codes
    [M, K] of any integer type, scales and zeros [M, G]; return uint8 [M, bytes of a row].

    ``groups`` [K]: each weight's group; None: groups are contiguous. Q4_0 needs all zeros equal and
    codes from 8 below to 7 above them; Q4_1 needs codes from 0 to 15. Raises OverflowError for
    block scales that are not finite.
    """
    m, k = codes.shape
    fmt = by_name(dtype)
    if fmt.block == 1:
        which = np.arange(k) // (k // scales.shape[1]) if groups is None else groups
        out = np.empty((m, 2 * k), np.uint8)
        for rows in _pieces(m, k):
            floats = codes[rows].astype(np.float32) - zeros[rows][:, which]
            out[rows] = to_bytes(floats * scales[rows][:, which], dtype)
        return out
    out = np.empty((m, k // BLOCK), fmt.dtype)
    a_group = k // BLOCK // scales.shape[1]  # blocks
    with np.errstate(over="ignore"):
        out["d"] = np.repeat(scales, a_group, 1)
    if not np.isfinite(out["d"]).all():
        raise OverflowError("scales are not finite in f16")
    if fmt.dtype["qs"].base.kind == "i":
        steps = codes.astype(np.int16).reshape(m, scales.shape[1], -1) - zeros[..., None]
        out["qs"] = steps.reshape(out["qs"].shape)
    else:
        if "m" in out.dtype.names:
            out["m"] = np.repeat(-scales * zeros, a_group, 1)
        else:
            codes = codes + (8 - zeros.flat[0]).astype(np.uint8)
        halves = codes.astype(np.uint8).reshape(m, -1, 2, BLOCK // 2)
        out["qs"] = halves[..., 0, :] | halves[..., 1, :] << 4
    return out.view(np.uint8).reshape(m, -1)


def affine(dtype: str, codes: Array, scales: F32Array, minimums: F32Array) -> Array:
    """Compute ``scales * codes + minimums`` in ``dtype``, Q4_1 or a float type: codes [M, K] from 0
    on, the others [M, G]; return uint8 [M, bytes of a row]. Raises OverflowError for block scales
    or minimums that are not finite.
    """
    m, k = codes.shape
    group = k // scales.shape[1]
    fmt = by_name(dtype)
    if fmt.block == 1:
        out = np.empty((m, k * fmt.dtype.itemsize), np.uint8)
        for rows in _pieces(m, k):
            floats = codes[rows].astype(np.float32) * np.repeat(scales[rows], group, 1)
            out[rows] = to_bytes(floats + np.repeat(minimums[rows], group, 1), dtype)
        return out
    made = np.empty((m, k // BLOCK), fmt.dtype)
    with np.errstate(over="ignore"):
        for name, values in (("d", scales), ("m", minimums)):
            made[name] = np.repeat(values, group // BLOCK, 1)
            if not np.isfinite(made[name]).all():
                raise OverflowError("scales are not finite in f16")
    halves = codes.reshape(m, -1, 2, BLOCK // 2)
    made["qs"] = halves[..., 0, :] | halves[..., 1, :] << 4
    return made.view(np.uint8).reshape(m, -1)


# -- 4-bit floats -----------------------------------------------------------------------------


def from_mxfp4(pairs: Array, scales: Array) -> Array:
    """Convert pairs of E2M1, uint8 [.., K / 2], with a power of two per 32 weights (uint8 exponents
    [.., K / 32]) to ggml's MXFP4 blocks, uint8 [.., row bytes].
    """
    return mxfp4_blocks(pairs.reshape(*scales.shape, -1), scales)


def from_nvfp4(pairs: Array, scales: Array) -> Array:
    """Convert pairs of E2M1, uint8 [.., K / 2], with E4M3 scales, uint8 [.., K / 16], to ggml's
    NVFP4 blocks, uint8 [.., row bytes].
    """
    codes = split_bytes(pairs, 4).reshape(*scales.shape, 2, NV_GROUP // 2)
    joined = codes[..., 0, :] | codes[..., 1, :] << 4
    a_block = NV_BLOCK // NV_GROUP
    shape = *scales.shape[:-1], scales.shape[-1] // a_block
    blocks = np.concatenate([scales.reshape(*shape, -1), joined.reshape(*shape, -1)], -1)
    return blocks.reshape(*shape[:-1], -1)


# -- bitsandbytes -----------------------------------------------------------------------------


def from_table(pairs: Array, table: F32Array, scales: F32Array, dtype: str) -> Array:
    """Look up 4-bit codes (``pairs``, uint8 [n / 2] with the even weight in the upper half) in
    ``table`` [16], times one scale per block of neighbours, regardless of rows. Return ``dtype``,
    F16 or BF16, as uint8 [2 n].
    """
    a_block = 2 * pairs.size // scales.size
    byte = np.arange(256)
    both = np.stack([table[byte >> 4], table[byte & 15]], -1).view(np.float64)[:, 0]  # two at once
    out = np.empty((scales.size, 2 * a_block), np.uint8)
    pairs = pairs.reshape(scales.size, -1)
    for part in _pieces(scales.size, a_block):
        values = np.take(both, pairs[part]).view(np.float32) * scales[part, None]
        out[part] = to_bytes(values, dtype)
    return out.reshape(-1)


def _pieces(m: int, k: int) -> list[slice]:
    """Return slices of ``m`` rows of ``k`` weights, each of about ``_AT_ONCE`` weights."""
    step = max(1, _AT_ONCE // max(1, k))
    return [slice(at, min(at + step, m)) for at in range(0, m, step)]
