"""GGUF files written again with other keys and tensors."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import numpy as np

from treadle.files.gguf import GGUFWriter, open_gguf


def write_changed(
    source: Path,
    to: Path,
    keys: Mapping[str, Any] | None = None,
    tensors: Mapping[str, np.ndarray | None] | None = None,
    *,
    without: Callable[[str], bool] = lambda name: False,
) -> Path:
    """Write the file ``source`` to ``to`` with other or more ``keys`` and ``tensors``, the latter
    as F32; None removes one. ``without``: whether to remove another key or tensor, by its name. The
    rest is copied as it is. Return ``to``.
    """
    keys = keys or {}
    tensors = tensors or {}
    writer = GGUFWriter(to)
    with open_gguf(source) as gguf:
        for key, value in gguf.metadata.items():
            if key not in keys and not without(key):
                writer.add(key, value, gguf.types[key])
        for key, value in keys.items():
            if value is not None:
                writer.add(key, value)
        for name, tensor in gguf.tensors.items():
            if name not in tensors and not without(name):
                writer.add_tensor(name, tensor.shape, tensor.ggml_type, tensor.data)
        for name, values in tensors.items():
            if values is not None:
                rows = np.ascontiguousarray(values, np.float32)
                writer.add_tensor(name, rows.shape, "F32", rows)
        writer.write()
    return to
