"""Checkpoint detection by content: a row for each kind of checkpoint."""

from __future__ import annotations

import os
import struct
from collections.abc import Callable
from pathlib import Path

from treadle.base.fast_classes import dataclass
from treadle.convert.legacy.ggml import open_gguf_v1, open_legacy
from treadle.convert.legacy.llama2c import open_llama2c
from treadle.convert.legacy.meta_llama import PARAMS, SHARD, open_meta
from treadle.convert.sources.gguf import open_gguf_source
from treadle.convert.sources.source import Source
from treadle.errors import FileError, TreadleError, why
from treadle.files.checkpoint import ZIP_MAGIC
from treadle.files.legacy import MAGICS
from treadle.files.llama2c import HEADER, MAGIC, n_bytes_of
from treadle.files.mistaken import N_HEAD, describe_file
from treadle.files.splits import is_hf, missing

Open = Callable[[Path, Path | None], Source]


@dataclass(frozen=True)
class CheckpointKind:
    """A kind of checkpoint that ``treadle convert`` reads.

    name: description for error messages.
    fits: returns whether a path is of this kind, given its first bytes (b"" for a folder).
    open: opens it as a ``Source``, given the path and the path of a tokenizer file or None.
    own_tokenizer: the user may name a tokenizer file; all other kinds bring their tokenizer.
    """

    name: str
    fits: Callable[[Path, bytes], bool]
    open: Open
    own_tokenizer: bool = False


def open_source(path: Path, tokenizer: Path | None = None) -> Source:
    """Open a checkpoint of any kind in KINDS as a conversion source.

    Raises FileError if it cannot be read or is no checkpoint, or if ``tokenizer`` is given for a
    kind that brings its own; UnsupportedError for a model that treadle does not support.
    """
    kind = find_kind(path)
    if tokenizer is not None and not kind.own_tokenizer:
        raise FileError(f"{kind.name} has its own tokenizer", path=path)
    try:
        return kind.open(path, tokenizer)
    except OSError as e:  # a loop of links, a file that went away
        raise FileError(f"cannot be read: {why(e)}", path=e.filename or path) from e


def find_kind(path: Path) -> CheckpointKind:
    """Return the first row of KINDS that matches the content of ``path``. Raises FileError if none
    does.
    """
    try:
        head = b"" if path.is_dir() else _head(path)
        for kind in KINDS:
            if kind.fits(path, head):
                return kind
    except OSError as e:
        raise FileError(f"cannot be read: {why(e)}", path=path) from e
    names = "; ".join(kind.name for kind in KINDS)
    if path.is_dir():
        raise FileError("is a folder that contains no model", path=path, expected=names)
    if what := describe_file(head):
        raise FileError(f"not a checkpoint: {what}", path=path)
    found = f"starts with {head[:8]!r}: cut short, or not a checkpoint" if head else "an empty file"
    raise FileError(found, path=path, expected=names)


def _head(path: Path) -> bytes:
    """Return the file's first bytes, at least N_HEAD of them if it is that long.

    The common stem of GGUF shards (``model`` of ``model-00001-of-00003.gguf``) is no file: it gives
    b"GGUF". Raises FileError for a missing file and for anything that is not a regular file.
    """
    if not path.exists() and any(path.parent.glob(f"{path.name.removesuffix('.gguf')}-*.gguf")):
        return b"GGUF"
    if not os.path.exists(path):
        raise FileError(missing(path), path=path, expected="a checkpoint")
    if not path.is_file():
        raise FileError("not a regular file", path=path, expected="a checkpoint")
    with path.open("rb") as f:
        return f.read(max(HEADER, N_HEAD))


def _version_1(head: bytes) -> bool:
    return head[:4] == b"FUGG" or (head[:4] == b"GGUF" and head[4:8] == struct.pack("<I", 1))


def _is_meta(path: Path, head: bytes) -> bool:
    if not path.is_dir():
        return head[:4] == ZIP_MAGIC
    names = [p.name for p in path.iterdir()]
    return PARAMS in names or any(SHARD.fullmatch(name) for name in names)


def _is_old_llama2c(path: Path, head: bytes) -> bool:
    """Return whether ``path`` is a llama2.c checkpoint without a magic: a file exactly as long as
    its header, in the first bytes ``head``, implies.
    """
    try:
        return not path.is_dir() and n_bytes_of(head, path) == path.stat().st_size
    except (TreadleError, struct.error):
        return False


def _has_gguf(path: Path, head: bytes) -> bool:
    return head[:4] == b"GGUF" or (path.is_dir() and any(path.glob("*.gguf")))


def _open_hf(path: Path, tokenizer: Path | None) -> Source:
    from treadle.convert.hf.folder import open_hf_source

    return open_hf_source(path)


def _is_whisper(path: Path, head: bytes) -> bool:
    from treadle.convert.whisper.open import is_whisper

    return not _has_gguf(path, head) and is_whisper(path)


def _open_whisper(path: Path, tokenizer: Path | None) -> Source:
    from treadle.convert.whisper.source import open_whisper_source

    return open_whisper_source(path)


KINDS = (
    CheckpointKind(
        "a Whisper model: a Hugging Face folder, ggml-*.bin or CTranslate2's model.bin",
        _is_whisper,
        _open_whisper,
    ),
    CheckpointKind(
        "a Hugging Face folder with config.json and safetensors", lambda p, h: is_hf(p), _open_hf
    ),
    CheckpointKind("a GGUF version 1 file", lambda p, h: _version_1(h), open_gguf_v1),
    CheckpointKind("a GGUF file or its first shard", _has_gguf, open_gguf_source),
    CheckpointKind("a GGML, GGMF or GGJT file", lambda p, h: h[:4] in MAGICS, open_legacy),
    CheckpointKind(
        "Meta's folder with params.json and consolidated.00.pth", _is_meta, open_meta, True
    ),
    CheckpointKind("a llama2.c checkpoint", lambda p, h: h[:4] == MAGIC, open_llama2c, True),
    CheckpointKind("a version 0 llama2.c checkpoint", _is_old_llama2c, open_llama2c, True),
)
