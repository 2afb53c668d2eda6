"""Dense layers that are applied to pooled embeddings: EmbeddingGemma has two."""

from __future__ import annotations

from typing import TYPE_CHECKING
from weakref import WeakKeyDictionary

import numpy as np

from treadle.errors import FileError

if TYPE_CHECKING:
    from treadle.files.gguf import GGUF

DENSE = ("dense_2.weight", "dense_3.weight")  # in order of application
Floats = np.ndarray
_read: WeakKeyDictionary[GGUF, list[Floats]] = WeakKeyDictionary()


def dense_of(gguf: GGUF, n_embd: int) -> list[Floats]:
    """Return the matrices of a file's dense layers after pooling, float32 ``[out, in]``, in the
    order of their application; [] if it has none. The first has ``n_embd`` columns. They are cached
    per file. Raises FileError if shapes do not match.
    """
    found = _read.get(gguf)
    if found is None:
        found = []
        width = n_embd
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
