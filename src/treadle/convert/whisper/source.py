"""Whisper models as conversion sources."""

from __future__ import annotations

from pathlib import Path

from treadle.convert.sources.gguf import source_tensor
from treadle.convert.sources.source import FILE_TYPES, Source
from treadle.convert.whisper.file import WhisperFile
from treadle.convert.whisper.names import EMBEDDINGS
from treadle.convert.whisper.open import open_whisper


def open_whisper_source(path: Path, tokenizer: Path | None = None) -> Source:
    """Open a Whisper model that is not a GGUF file as a conversion source, with the tokenizer's
    merges. ``tokenizer`` is unused. Raises FileError and UnsupportedError.
    """
    file = open_whisper(path)
    assert isinstance(file, WhisperFile)
    file.with_merges()
    metadata = dict(file.metadata)
    kind = file.tensors[f"{EMBEDDINGS}.weight"].type_name
    if kind in FILE_TYPES:
        metadata["general.file_type"] = FILE_TYPES[kind]
    tensors = {}
    for name, tensor in sorted(file.tensors.items()):
        made = source_tensor(tensor)
        tensors[name] = made.as_f32() if len(tensor.shape) == 1 else made
    return Source(file.path, metadata, tensors, [file])
