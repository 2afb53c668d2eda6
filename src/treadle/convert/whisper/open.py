"""Opens a Whisper model of any file format."""

from __future__ import annotations

import os
from pathlib import Path

from treadle.convert.whisper.ctranslate2 import MODEL, is_ctranslate2, open_ctranslate2
from treadle.convert.whisper.ggml import is_whisper_ggml, open_ggml_whisper
from treadle.convert.whisper.names import ARCH
from treadle.convert.whisper.safetensors_folder import is_whisper_folder, open_whisper_folder
from treadle.errors import FileError, UnsupportedError
from treadle.files.gguf import GGUF, open_gguf
from treadle.files.reader import read_head
from treadle.files.splits import is_hf, missing

EXPECTED = "a Whisper model: a Hugging Face folder, GGUF, ggml-*.bin or CTranslate2's model.bin"
N_HEAD = 4096  # bytes that tell a file's kind: GGUF files name their architecture first


def _text(value: str) -> bytes:
    """Return a string as stored in GGUF files: its length, u64, then its bytes."""
    return len(value).to_bytes(8, "little") + value.encode()


_STRING = 8  # GGUF's number of the type
_ARCHITECTURE = _text("general.architecture") + _STRING.to_bytes(4, "little") + _text(ARCH)


def is_whisper(path: str | os.PathLike[str]) -> bool:
    """Return whether ``path`` is a Whisper model, by the first bytes of its file or by
    config.json.
    """
    given = Path(os.path.expanduser(path))
    if is_hf(given):
        return is_whisper_folder(given)
    file = given / MODEL if (given / MODEL).is_file() else given
    if not file.is_file():
        return False
    head = read_head(file, N_HEAD, "a model")
    if head.startswith(b"GGUF"):
        return _ARCHITECTURE in head
    return is_whisper_ggml(head) or is_ctranslate2(head)


def open_whisper(path: str | os.PathLike[str]) -> GGUF:
    """Open a Whisper model of any format, GGUF included, in place. Raises FileError for damaged
    files, UnsupportedError for a model that is not Whisper.
    """
    given = Path(os.path.expanduser(path))
    if is_hf(given):
        if not is_whisper_folder(given):
            raise UnsupportedError(f"{given}: is not a Whisper model: expected {EXPECTED}")
        return open_whisper_folder(given)
    file = given / MODEL if (given / MODEL).is_file() else given
    if given.is_dir() and is_whisper_folder(given):
        what = "a folder without safetensors: save the model in that format"
        raise UnsupportedError(f"{given}: {what}, or download it so")
    if not file.exists():
        raise FileError(missing(file), path=file, expected=EXPECTED)
    if file.is_file():
        head = read_head(file, N_HEAD, EXPECTED)
        if is_whisper_ggml(head):
            return open_ggml_whisper(file)
        if is_ctranslate2(head):
            return open_ctranslate2(file)
    gguf = open_gguf(given)
    found = gguf.metadata.get("general.architecture")
    if found != ARCH:
        gguf.close()
        raise UnsupportedError(f"{given}: architecture {found!r:.80}: expected {EXPECTED}")
    return gguf
