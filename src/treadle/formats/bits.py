"""Small numbers packed side by side into words, the first in the lowest bits."""

from __future__ import annotations

from typing import Any

import numpy as np
import numpy.typing as npt


def split(words: npt.NDArray[Any], n: int, width: int) -> npt.NDArray[Any]:
    """[..., k] -> [..., k n]: the lowest ``n`` numbers of ``width`` bits of each word."""
    shift = np.arange(n, dtype=words.dtype) * words.dtype.type(width)
    parts: npt.NDArray[Any] = words[..., None] >> shift & words.dtype.type((1 << width) - 1)
    return parts.reshape(*words.shape[:-1], words.shape[-1] * n)


def join(parts: npt.NDArray[Any], n: int, width: int, dtype: str) -> npt.NDArray[Any]:
    """[..., k n] -> [..., k] of ``dtype``; undoes ``split``."""
    kind = np.dtype(dtype).type
    grouped = parts.reshape(*parts.shape[:-1], parts.shape[-1] // n, n).astype(dtype)
    word = grouped[..., 0]
    for i in range(1, n):
        word = word | grouped[..., i] << kind(i * width)
    return word
