"""Signs of eight weights: a byte with bit j set if weight j is negative, or 7 bits of such a byte.

Formats with 7 bits only allow bytes with an even number of ones: bit 7 is the parity of the others.
"""

from __future__ import annotations

from functools import cache
from typing import Any

import numpy as np
import numpy.typing as npt

from treadle.formats.format import F32Array


@cache
def even_signs() -> npt.NDArray[np.uint8]:
    """Return uint8 [128]: the sign byte of each 7-bit code, with an even number of ones."""
    code = np.arange(128, dtype=np.uint8)
    odd = np.bitwise_count(code) & np.uint8(1)
    return read_only(code | odd << np.uint8(7))


@cache
def plus_minus() -> npt.NDArray[np.int8]:
    """Return int8 [256, 8]: the signs of each byte as 1 and -1."""
    bits = np.unpackbits(np.arange(256, dtype=np.uint8)[:, None], axis=1, bitorder="little")
    return read_only(np.int8(1) - np.int8(2) * bits.astype(np.int8))


def read_only(a: npt.NDArray[Any]) -> npt.NDArray[Any]:
    """Make a shared array read-only, and return it."""
    a.flags.writeable = False
    return a


def split_signs(
    x: F32Array, weights: F32Array | None, even: bool
) -> tuple[F32Array, npt.NDArray[np.uint8]]:
    """Split float32 [n, block] into magnitudes of the same shape, and sign bytes [n, block / 8].

    With ``even``, eight weights with an odd number of minus signs get the cheapest sign flipped;
    its magnitude is returned negative. It will be coded as the smallest magnitude, s, which costs
    ``weights * (|x| + s) ** 2``, or less if |x| had no code nearby: about ``weights * |x| * (|x| +
    2 s)``. The mean magnitude of the eight serves as an estimate of 2 s.
    """
    eights = x.reshape(-1, 8)
    magnitude = np.abs(eights)
    signs = np.packbits(np.signbit(eights), axis=-1, bitorder="little")[:, 0]
    if even:
        odd = np.bitwise_count(signs) & np.uint8(1)
        with np.errstate(over="ignore", under="ignore", invalid="ignore"):
            cost = magnitude
            if weights is not None:
                mean = magnitude.mean(axis=-1, keepdims=True)
                cost = weights.reshape(eights.shape) * magnitude * (magnitude + mean)
            flip = odd << cost.argmin(axis=-1).astype(np.uint8)
            magnitude *= plus_minus().take(flip, axis=0)
        signs ^= flip
    return magnitude.reshape(x.shape), signs.reshape(len(x), x.shape[1] // 8)


def apply_signs(
    points: npt.NDArray[np.uint8], signs: npt.NDArray[np.uint8]
) -> npt.NDArray[np.int16]:
    """Apply sign bytes [..., n * dim / 8] to points [..., n, dim]; return signed weights [..., n *
    dim].
    """
    eights: npt.NDArray[np.int16] = points.reshape(*signs.shape, 8) * plus_minus()[signs]
    return eights.reshape(*signs.shape[:-1], signs.shape[-1] * 8)
