"""What quantised checkpoints hold, as blocks of ggml's or as floats.

Whole numbers with a scale and a zero point for each group of a row, ``w = scale * (code - zero)``,
become blocks with the same numbers where GGUF has such blocks: Q4_0, Q4_1 or Q8_0, whose scale is
an f16. Floats of eight bits, tables of bitsandbytes, and groups that no block fits, are multiplied
out.
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
BLOCK = 32  # weights of a block of Q4_0, Q4_1 and Q8_0
NV_BLOCK, NV_GROUP, MX_GROUP = 64, 16, 32  # weights of a block of NVFP4, and of a scale
_AT_ONCE = 1 << 16  # weights that are floats at a time: they stay in cache

E4M3 = "F8_E4M3"
FLOAT8 = {E4M3: (20, 120), "F8_E5M2": (21, 112)}  # bits left of a float32's, and its bias
INFINITIES = {"F8_E5M2": 124}  # with NaNs behind them; E4M3 has none, and one NaN: 127


def float8(codes: Array, dtype: str) -> F32Array:
    """uint8 as the float32 values they stand for: an exponent and a mantissa in their places, and
    what the exponents' biases differ by. NaNs and infinities stay what they are.
    """
    shift, bias = FLOAT8[dtype]
    bits = codes.view(np.int8).astype(np.int32)  # the sign is where it stays
    bits <<= np.int32(shift)
    bits &= np.int32(127 << shift | -1 << 31)
    values = bits.view(np.float32)
    values *= np.float32(2.0**bias)
    if (odd := is_nonfinite(codes, dtype)).any():
        values[odd & (codes & 127 == INFINITIES.get(dtype, 0))] *= np.float32(np.inf)
        values[odd & (codes & 127 != INFINITIES.get(dtype, 0))] = np.nan
    return values


def is_nonfinite(codes: Array, dtype: str) -> Array:
    """bool: which of these codes, uint8, stand for no finite number."""
    return np.asarray(codes & 127 >= INFINITIES.get(dtype, 127))


def powers(exponents: Array) -> F32Array:
    """Of two, float32: uint8, larger by 127."""
    return np.ldexp(np.float32(1), exponents.astype(np.int32) - 127)


def to_bytes(values: F32Array, dtype: str) -> Array:
    """float32 [.., K] in F16 or BF16, uint8 [.., 2 K]."""
    return by_name(dtype).quantize_rows(np.ascontiguousarray(values, np.float32))


# -- floats of eight bits ---------------------------------------------------------------------


def from_float8(codes: Array, scales: F32Array, block: tuple[int, int], dtype: str) -> Array:
    """uint8 [.., M, K], scales [.., R, C] of blocks [m, k]; BF16, uint8 [.., M, 2 K]."""
    out = np.empty((*codes.shape[:-1], 2 * codes.shape[-1]), np.uint8)
    (m, k), (n_rows, n_columns) = block, codes.shape[-2:]
    for at in np.ndindex(*codes.shape[:-2]):
        each = np.repeat(scales[at], k, 1)[:, :n_columns] if scales.shape[-1] > 1 else scales[at]
        for rows in _pieces(n_rows, n_columns):
            values = float8(codes[at][rows], dtype)
            with np.errstate(invalid="ignore"):  # whoever uses them looks for what is no number
                values *= each[np.arange(rows.start, rows.stop) // m]
            out[at][rows] = to_bytes(values, "BF16")
    return out


def float4(pairs: Array) -> F32Array:
    """Pairs of E2M1, uint8 [.., K / 2], as float32 [.., K]."""
    return VALUES[split_bytes(pairs, 4)] * np.float32(0.5)  # VALUES are doubled


# -- whole numbers ----------------------------------------------------------------------------


def split_words(words: Array, bits: int) -> Array:
    """int32 [N, W], codes one behind the other from the lowest bit on; uint8 [N, W * 32 / bits].

    32 codes are ``bits`` words, so codes of three bits may lie in two.
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
    """uint8 [.., n], codes of 2, 4 or 8 bits from the lowest on; uint8 [.., n * 8 / bits]."""
    codes = np.empty((*joined.shape, 8 // bits), np.uint8)
    for i in range(8 // bits):
        codes[..., i] = joined >> np.uint8(i * bits) & np.uint8((1 << bits) - 1)
    return codes.reshape(*joined.shape[:-1], -1)


def split_awq(words: Array) -> Array:
    """int32 [N, W]: a word's lower four nibbles are its even columns, the upper four its odd ones,
    which suits a GPU's conversion to f16; uint8 [N, 8 W].
    """
    halves = split_words(words, 4).reshape(len(words), -1, 2, 4)
    return halves.swapaxes(-1, -2).reshape(len(words), -1)


def whole_numbers(
    dtype: str, codes: Array, scales: F32Array, zeros: Array, groups: Array | None = None
) -> Array:
    """``scales * (codes - zeros)`` in ``dtype``: codes [M, K] of any whole numbers, scales and
    zeros [M, G]; uint8 [M, bytes of a row].

    ``groups`` [K]: each weight's; None: they follow each other. Q4_0 wants zeros that are all the
    same and codes from 8 below them to 7 above; Q4_1 codes from 0 to 15. OverflowError for scales
    that are not finite in blocks.
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
        raise OverflowError("scales that are no numbers of f16")
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
    """``scales * codes + minimums`` in Q4_1 or floats: codes [M, K], from 0 on, the others [M, G];
    uint8 [M, bytes of a row]. OverflowError for what is not finite in blocks.
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
                raise OverflowError("scales that are no numbers of f16")
    halves = codes.reshape(m, -1, 2, BLOCK // 2)
    made["qs"] = halves[..., 0, :] | halves[..., 1, :] << 4
    return made.view(np.uint8).reshape(m, -1)


# -- floats of four bits ----------------------------------------------------------------------


def from_mxfp4(pairs: Array, scales: Array) -> Array:
    """uint8 [.., K / 2] and exponents [.., K / 32]; ggml's blocks, uint8 [.., bytes of a row]."""
    return mxfp4_blocks(pairs.reshape(*scales.shape, -1), scales)


def from_nvfp4(pairs: Array, scales: Array) -> Array:
    """uint8 [.., K / 2] and scales in E4M3 [.., K / 16]; ggml's blocks, as above."""
    codes = split_bytes(pairs, 4).reshape(*scales.shape, 2, NV_GROUP // 2)
    joined = codes[..., 0, :] | codes[..., 1, :] << 4
    a_block = NV_BLOCK // NV_GROUP
    shape = *scales.shape[:-1], scales.shape[-1] // a_block
    blocks = np.concatenate([scales.reshape(*shape, -1), joined.reshape(*shape, -1)], -1)
    return blocks.reshape(*shape[:-1], -1)


# -- bitsandbytes -----------------------------------------------------------------------------


def from_table(pairs: Array, table: F32Array, scales: F32Array, dtype: str) -> Array:
    """uint8 [n / 2], the even weight in the upper half, one scale for each of N neighbours whatever
    their row; F16 or BF16, uint8 [2 n].
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
    """Rows, some at a time."""
    step = max(1, _AT_ONCE // max(1, k))
    return [slice(at, min(at + step, m)) for at in range(0, m, step)]
