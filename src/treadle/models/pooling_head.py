"""Matrices behind the pooling of a text's states, which make its vector: EmbeddingGemma has two."""

from __future__ import annotations

from typing import TYPE_CHECKING
from weakref import WeakKeyDictionary

import numpy as np

from treadle.errors import FileError

if TYPE_CHECKING:
    from treadle.files.gguf import GGUF

DENSE = ("dense_2.weight", "dense_3.weight")  # in the order in which they are applied
Floats = np.ndarray
_read: WeakKeyDictionary[GGUF, list[Floats]] = WeakKeyDictionary()


def dense_of(gguf: GGUF, n_embd: int) -> list[Floats]:
    """Float32 matrices ``[out, in]``, the first of ``n_embd`` columns; read once for each file.
    Raises FileError for shapes that do not follow.
    """
    found = _read.get(gguf)
    if found is None:
        found, width = [], n_embd
        for name in DENSE:
            if (tensor := gguf.tensors.get(name)) is None:
                continue
            if len(tensor.shape) != 2 or tensor.shape[1] != width:
                what = f"shape {list(tensor.shape)}"
                raise FileError(what, path=gguf.path, where=name, expected=f"[any, {width}]")
            found.append(tensor.dequantize())
            width = tensor.shape[0]
        _read[gguf] = found
    return found
