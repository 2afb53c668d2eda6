"""Rounding functions of the block quantisers, identical to ggml's C.

Blocks of finite numbers and infinities give ggml's result, bit for bit. NaN differs on purpose:
in ggml it may become a finite weight, depending on its position. Here, as in the ``gguf``
package, it makes the scale NaN, and so the whole block.
"""

from __future__ import annotations

from typing import NamedTuple

import numpy as np
import numpy.typing as npt

from treadle.formats.format import F32Array


def inverse(d: F32Array) -> F32Array:
    """Return 1 / d, and 0 where d is 0 (the scale of a block of zeros)."""
    with np.errstate(divide="ignore", over="ignore"):
        inverted: F32Array = np.where(d == 0, np.float32(0), np.float32(1) / d)
    return inverted


def half_away(x: F32Array) -> F32Array:
    """Round as C's ``roundf``: to the nearest integer, halves away from zero (numpy's go to
    even).
    """
    a = np.abs(x)
    whole = np.floor(a)
    rounded: F32Array = np.copysign(whole + (a - whole >= np.float32(0.5)), x)
    return rounded


def to_int(x: F32Array, lo: int, hi: int) -> npt.NDArray[np.int8]:
    """Truncate towards zero, and clip to ``lo`` .. ``hi``; NaN and infinity, undefined in C, become
    0.
    """
    return np.where(np.isfinite(x), x, np.float32(0)).clip(lo, hi).astype(np.int8)


def to_f16(x: F32Array) -> npt.NDArray[np.float16]:
    """Round to the nearest f16, ties to even; overflow gives infinity, underflow zero."""
    with np.errstate(over="ignore", under="ignore"):
        return x.astype("<f2")


def relative(weights: F32Array, least: float) -> F32Array:
    """Normalise importances [n, block] to a mean of 1 in each block, plus ``least``, so that none
    is 0.

    Negative, NaN and infinite importances count as 0; a block of zeros gets equal importances.
    """
    w = np.where(np.isfinite(weights), weights, np.float32(0)).clip(0)
    top = w.max(axis=-1, keepdims=True)
    w = w / np.where(top > 0, top, np.float32(1))  # first, because the sum might overflow
    mean = w.mean(axis=-1, keepdims=True)
    with np.errstate(all="ignore"):
        return np.where(mean > 0, w / mean, np.float32(1)) + np.float32(least)


class RoundedBlocks(NamedTuple):
    """Quantised blocks, not yet packed: ``w = d * (q - offset)``, or ``w = d * q + m``."""

    d: F32Array  # [n]
    q: npt.NDArray[np.uint8]  # [n, block]
    m: F32Array = np.zeros(0, np.float32)  # [n], or empty


def signed(x: F32Array, half: int) -> RoundedBlocks:
    """Quantise float32 [n, block] to integers from ``-half`` to ``half - 1``, stored as codes with
    offset ``half``.

    The weight of largest magnitude becomes ``-half``, the longer end of the range, so ``d`` has the
    opposite sign of that weight.
    """
    extreme = np.take_along_axis(x, np.abs(x).argmax(axis=-1)[..., None], axis=-1)[..., 0]
    d = extreme / np.float32(-half)
    with np.errstate(over="ignore", invalid="ignore"):
        q = to_int(x * inverse(d)[..., None] + np.float32(half + 0.5), 0, 2 * half - 1)
    return RoundedBlocks(d, q.view(np.uint8))


def quantize_unsigned(x: F32Array, top: int) -> RoundedBlocks:
    """Quantise float32 [n, block] to codes from 0 (the smallest weight, which is the minimum ``m``)
    to ``top`` (the largest).
    """
    m = x.min(axis=-1)
    with np.errstate(over="ignore", invalid="ignore"):
        d = (x.max(axis=-1) - m) / np.float32(top)
        q = to_int((x - m[..., None]) * inverse(d)[..., None] + np.float32(0.5), 0, top)
    return RoundedBlocks(d, q.view(np.uint8), m)
