"""Packing of codes of less than a byte: the pattern that most formats share.

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
    """Return [8 // bits, 1]: the bit position of each code in its byte."""
    return np.arange(0, 8, bits, dtype=np.uint8)[:, None]


def split_bits(packed: U8Array, bits: int, run: int) -> U8Array:
    """Unpack bytes [..., n], packed in runs of ``run`` (see above), to codes [..., n * 8 // bits]
    below ``1 << bits``, a byte each.
    """
    groups = packed.reshape(*packed.shape[:-1], packed.shape[-1] // run, 1, run)
    codes: U8Array = groups >> shifts(bits) & np.uint8((1 << bits) - 1)
    return codes.reshape(*packed.shape[:-1], packed.shape[-1] * (8 // bits))


def join_bits(codes: npt.NDArray[Any], bits: int, run: int) -> U8Array:
    """Pack codes [..., n] below ``1 << bits`` into bytes [..., n * bits // 8]; inverse of
    ``split_bits``.
    """
    n = codes.shape[-1]
    each = 8 // bits
    width = gcd(run, 8)  # bytes shifted as one integer: no code crosses a byte
    wide = np.ascontiguousarray(codes, np.uint8).view(f"u{width}")
    groups = wide.reshape(*codes.shape[:-1], n // (run * each), each, run // width)
    packed = groups[..., each - 1, :].copy()
    for i in reversed(range(each - 1)):
        packed <<= packed.dtype.type(bits)
        packed |= groups[..., i, :]
    return packed.view(np.uint8).reshape(*codes.shape[:-1], n // each)


# -- several numbers in a word, the first in the lowest bits -----------------------------------


def split_words(words: npt.NDArray[Any], n: int, width: int) -> npt.NDArray[Any]:
    """Unpack the lowest ``n`` numbers of ``width`` bits of each word, the lowest first: [..., k] ->
    [..., k n].
    """
    shift = np.arange(n, dtype=words.dtype) * words.dtype.type(width)
    parts: npt.NDArray[Any] = words[..., None] >> shift & words.dtype.type((1 << width) - 1)
    return parts.reshape(*words.shape[:-1], words.shape[-1] * n)


def join_words(parts: npt.NDArray[Any], n: int, width: int, dtype: str) -> npt.NDArray[Any]:
    """Pack [..., k n] into words [..., k] of ``dtype``; the inverse of ``split_words``."""
    kind = np.dtype(dtype).type
    grouped = parts.reshape(*parts.shape[:-1], parts.shape[-1] // n, n).astype(dtype)
    word = grouped[..., 0]
    for i in range(1, n):
        word = word | grouped[..., i] << kind(i * width)
    return word
