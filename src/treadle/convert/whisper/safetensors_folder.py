"""Whisper models in Hugging Face folders."""

from __future__ import annotations

import os
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from treadle.convert.hf.tokenizer.special_tokens import GENERATION, read_optional
from treadle.convert.hf.tokenizer.tokenizer import JSON
from treadle.convert.whisper.file import (
    WhisperFile,
    WhisperSizes,
    list_keys,
    model_keys,
    read_keys,
)
from treadle.convert.whisper.names import ARCH, HF
from treadle.errors import FileError, UnsupportedError
from treadle.files.metadata import MetadataReader
from treadle.files.safetensors import SafeTensor, open_safetensors, read_json
from treadle.files.splits import CONFIG
from treadle.files.tensor import Tensor
from treadle.formats import FORMATS

MODEL_TYPE = "whisper"
N_LAYER_MAX = 256
TYPES = {"F32": 0, "F16": 1, "BF16": 30}  # dtypes, and ggml's type numbers
COPIES = {"proj_out.weight"}  # of the embeddings


def is_whisper_folder(path: str | os.PathLike[str]) -> bool:
    """Return whether a folder's ``config.json`` is that of a Whisper model."""
    folder = Path(os.path.expanduser(path))
    folder = folder if folder.is_dir() else folder.parent
    if not (folder / CONFIG).is_file():
        return False
    return read_json(folder / CONFIG).get("model_type") == MODEL_TYPE


def open_whisper_folder(path: str | os.PathLike[str]) -> WhisperFile:
    """Open a folder in place. Raises FileError for damaged or missing files, UnsupportedError for
    weights of other types than F32, F16 and BF16.
    """
    given = Path(os.path.expanduser(path))
    folder = given if given.is_dir() else given.parent
    config = MetadataReader(read_json(folder / CONFIG), folder / CONFIG)
    weights = open_safetensors(given)
    try:
        tensors: dict[str, Tensor] = {}
        for theirs, tensor in weights.tensors.items():
            if theirs not in COPIES:
                tensors |= _named(theirs, tensor)
        sizes = WhisperSizes(
            config.integer("encoder_layers", hi=N_LAYER_MAX),
            config.integer("decoder_layers", hi=N_LAYER_MAX),
            config.integer("encoder_attention_heads"),
            config.integer("decoder_attention_heads"),
        )
        keys = model_keys(folder, tensors, sizes)
        keys |= _tokenizer_keys(folder, config.values, int(keys[f"{ARCH}.vocab_size"]))
        keys |= _list_keys(folder, config.values)
    except BaseException:
        weights.close()
        raise
    return WhisperFile(folder, keys, tensors, weights.maps)


def _named(theirs: str, tensor: SafeTensor) -> dict[str, Tensor]:
    if tensor.dtype not in TYPES:
        what = f"{theirs} is {tensor.dtype}"
        have = ", ".join(TYPES)
        raise UnsupportedError(f"{tensor.path}: {what}: Whisper is supported in {have}")
    stem, _, suffix = theirs.rpartition(".")
    ours = HF.name_of(stem)
    if not ours:
        what = "is no tensor of a Whisper model"
        raise FileError(what, path=tensor.path, where=theirs, offset=tensor.offset)
    name = f"{ours}.{suffix}"
    kind = TYPES[tensor.dtype]
    place = tensor.path, tensor.offset, tensor.file
    return {name: Tensor(name, tensor.shape, kind, FORMATS[kind], tensor.n_bytes, *place)}


def _tokenizer_keys(folder: Path, config: Mapping[str, Any], n_vocab: int) -> dict[str, Any]:
    keys = read_keys(folder, config, n_vocab)
    if not keys:
        raise FileError("is missing", path=folder / JSON, expected="its tokenizer")
    return keys


def _list_keys(folder: Path, config: Mapping[str, Any]) -> dict[str, Any]:
    """Return the keys of suppressed tokens and alignment heads, from generation_config.json, else
    from config.json.
    """
    generation = read_optional(folder / GENERATION)

    def listed(key: str) -> list[Any]:
        found = generation.get(key) or config.get(key)
        return found if isinstance(found, list) else []

    def ids(key: str) -> list[int]:
        return [each for each in listed(key) if isinstance(each, int) and each >= 0]

    heads = [
        (each[0], each[1])
        for each in listed("alignment_heads")
        if isinstance(each, list) and len(each) == 2 and all(isinstance(n, int) for n in each)
    ]
    return list_keys(ids("suppress_tokens"), ids("begin_suppress_tokens"), heads)
