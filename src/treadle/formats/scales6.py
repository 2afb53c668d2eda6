"""Eight scales and eight minima of six bits in twelve bytes, as Q4_K and Q5_K keep them.

Bytes 0 to 3 hold scales 0 to 3, bytes 4 to 7 minima 0 to 3, in their lower six bits. Bytes 8 to 11
hold the lower nibbles of scales 4 to 7 (low) and minima 4 to 7 (high), whose upper two bits lie at
the top of bytes 0 to 3 and 4 to 7.
"""

from __future__ import annotations

import numpy as np
import numpy.typing as npt

U8Array = npt.NDArray[np.uint8]


def split_scales(packed: U8Array) -> tuple[U8Array, U8Array]:
    """[..., 12] bytes -> scales [..., 8], minima [..., 8], all below 64."""
    first, nibbles = packed[..., :8], packed[..., 8:]
    upper = first >> np.uint8(6) << np.uint8(4)
    first = first & np.uint8(63)
    scales = np.concatenate([first[..., :4], nibbles & np.uint8(15) | upper[..., :4]], axis=-1)
    minima = np.concatenate([first[..., 4:], nibbles >> np.uint8(4) | upper[..., 4:]], axis=-1)
    return scales, minima


def join_scales(scales: U8Array, minima: U8Array) -> U8Array:
    """Undoes split_scales."""
    first = np.concatenate([scales[..., :4], minima[..., :4]], axis=-1)
    last = np.concatenate([scales[..., 4:], minima[..., 4:]], axis=-1)
    nibbles = scales[..., 4:] & np.uint8(15) | minima[..., 4:] << np.uint8(4)
    return np.concatenate([first | last >> np.uint8(4) << np.uint8(6), nibbles], axis=-1)
