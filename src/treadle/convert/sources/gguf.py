"""Current GGUF files as conversion sources: to merge shards, to split, or to change the type."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np

from treadle.convert.sources.source import Source, SourceTensor
from treadle.files.gguf import GGUF, Tensor, open_gguf
from treadle.files.metadata import DTYPES, ValueType


def open_gguf_source(path: Path, tokenizer: Path | None = None) -> Source:
    """Open a GGUF file with all its shards as a source; errors as ``open_gguf``'s. ``tokenizer`` is
    unused.
    """
    return gguf_source(open_gguf(path))


def gguf_source(gguf: GGUF) -> Source:
    """Return an open GGUF model as a source, which takes over closing it."""
    metadata = {key: _typed(gguf, key) for key in gguf.metadata}
    tensors = {name: source_tensor(tensor) for name, tensor in gguf.tensors.items()}
    return Source(gguf.path, metadata, tensors, [gguf], verbatim=True)


def _typed(gguf: GGUF, key: str) -> Any:
    """Return the metadata value of ``key``, a number as a numpy scalar, so that the writer keeps
    its GGUF type.
    """
    value = gguf.metadata[key]
    kind = gguf.types[key]
    if not isinstance(value, (int, float)) or kind is ValueType.BOOL:
        return value
    return np.array(value, DTYPES[kind])[()]


def source_tensor(tensor: Tensor) -> SourceTensor:
    """Return a file's tensor as a source tensor with the same type and bytes."""
    origin = f"{tensor.path}: {tensor.name}"
    return SourceTensor(
        tensor.name, tensor.shape, tensor.ggml_type, lambda: tensor.data, origin, (tensor,)
    )
