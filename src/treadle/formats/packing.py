"""Codes of less than a byte, packed in bytes: the one pattern that most formats share.

``run`` neighbouring bytes hold ``run * 8 // bits`` weights: the first ``run`` weights in the
lowest bits, the next ``run`` in the bits above, and so on. So Q4_0 is 4 bits in runs of 16, Q4_K
4 bits in runs of 32, and a plain little-endian bit mask is 1 bit in runs of 1.
"""

from __future__ import annotations

from math import gcd
from typing import Any

import numpy as np
import numpy.typing as npt

U8Array = npt.NDArray[np.uint8]


def shifts(bits: int) -> U8Array:
    """[8 // bits, 1]: where in its byte each code lies."""
    return np.arange(0, 8, bits, dtype=np.uint8)[:, None]


def split_bits(packed: U8Array, bits: int, run: int) -> U8Array:
    """[..., n] bytes -> [..., n * 8 // bits] codes below ``1 << bits``, a byte each."""
    groups = packed.reshape(*packed.shape[:-1], packed.shape[-1] // run, 1, run)
    codes: U8Array = groups >> shifts(bits) & np.uint8((1 << bits) - 1)
    return codes.reshape(*packed.shape[:-1], packed.shape[-1] * (8 // bits))


def join_bits(codes: npt.NDArray[Any], bits: int, run: int) -> U8Array:
    """[..., n] codes below ``1 << bits`` -> [..., n * bits // 8] bytes; undoes split_bits."""
    n, each = codes.shape[-1], 8 // bits
    width = gcd(run, 8)  # bytes shifted together: no code leaves its own
    wide = np.ascontiguousarray(codes, np.uint8).view(f"u{width}")
    groups = wide.reshape(*codes.shape[:-1], n // (run * each), each, run // width)
    packed = groups[..., each - 1, :].copy()
    for i in reversed(range(each - 1)):
        packed <<= packed.dtype.type(bits)
        packed |= groups[..., i, :]
    return packed.view(np.uint8).reshape(*codes.shape[:-1], n // each)


# -- numbers side by side in a word, the first in the lowest bits ------------------------------


def split_words(words: npt.NDArray[Any], n: int, width: int) -> npt.NDArray[Any]:
    """[..., k] -> [..., k n]: the lowest ``n`` numbers of ``width`` bits of each word."""
    shift = np.arange(n, dtype=words.dtype) * words.dtype.type(width)
    parts: npt.NDArray[Any] = words[..., None] >> shift & words.dtype.type((1 << width) - 1)
    return parts.reshape(*words.shape[:-1], words.shape[-1] * n)


def join_words(parts: npt.NDArray[Any], n: int, width: int, dtype: str) -> npt.NDArray[Any]:
    """[..., k n] -> [..., k] of ``dtype``; undoes ``split_words``."""
    kind = np.dtype(dtype).type
    grouped = parts.reshape(*parts.shape[:-1], parts.shape[-1] // n, n).astype(dtype)
    word = grouped[..., 0]
    for i in range(1, n):
        word = word | grouped[..., i] << kind(i * width)
    return word
