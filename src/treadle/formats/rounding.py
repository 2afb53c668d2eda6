"""Arithmetic that the block quantisers share, each rounding as ggml's C does.

Blocks of finite numbers and infinities come out as from ggml, bit for bit. A NaN differs on
purpose: ggml's comparisons skip it (or not, by its place), and it may end as some finite
weight. Here, as in the ``gguf`` package, it makes the scale NaN and so the whole block.
"""

from __future__ import annotations

from typing import Any

import numpy as np
import numpy.typing as npt

from treadle.formats.format import F32Array


def inverse(d: F32Array) -> F32Array:
    """1 / d, and 0 where d is 0: a block of zeros has no scale."""
    with np.errstate(divide="ignore", over="ignore"):
        inverted: F32Array = np.where(d == 0, np.float32(0), np.float32(1) / d)
    return inverted


def half_away(x: F32Array) -> F32Array:
    """C's ``roundf``: to nearest, halves away from zero (numpy rounds them to even)."""
    a = np.abs(x)
    whole = np.floor(a)
    rounded: F32Array = np.copysign(whole + (a - whole >= np.float32(0.5)), x)
    return rounded


def to_int(x: F32Array, lo: int, hi: int) -> npt.NDArray[np.int8]:
    """Cut towards zero and clip; NaN and infinity, undefined in C, are 0 here."""
    return np.where(np.isfinite(x), x, np.float32(0)).clip(lo, hi).astype(np.int8)


def to_f16(x: F32Array) -> npt.NDArray[np.float16]:
    """Nearest even; too large is infinity, too small is zero."""
    with np.errstate(over="ignore", under="ignore"):
        return x.astype("<f2")


def split_nibbles(qs: npt.NDArray[np.uint8]) -> npt.NDArray[np.uint8]:
    """[..., n] bytes -> [..., 2 n]: first all low nibbles, then all high ones."""
    return np.concatenate([qs & np.uint8(15), qs >> np.uint8(4)], axis=-1)


def join_nibbles(q: npt.NDArray[Any]) -> npt.NDArray[np.uint8]:
    """[..., 2 n] values of 0 to 15 -> [..., n] bytes; undoes split_nibbles."""
    lo, hi = np.split(q.astype(np.uint8), 2, axis=-1)
    return lo | hi << np.uint8(4)
