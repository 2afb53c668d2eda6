"""Opens a Whisper model of any file format."""

from __future__ import annotations

import os
from pathlib import Path

from treadle.convert.whisper.names import ARCH
from treadle.convert.whisper.safetensors_folder import is_whisper_folder, open_whisper_folder
from treadle.errors import UnsupportedError
from treadle.files.gguf import GGUF, open_gguf
from treadle.files.splits import is_hf


def open_whisper(path: str | os.PathLike[str]) -> GGUF:
    """Open a model in place. Raises FileError for damaged files, UnsupportedError for a model that
    is not Whisper.
    """
    given = Path(os.path.expanduser(path))
    if is_hf(given):
        if not is_whisper_folder(given):
            raise UnsupportedError(f"{given}: is not a Whisper model")
        return open_whisper_folder(given)
    gguf = open_gguf(given)
    found = gguf.metadata.get("general.architecture")
    if found != ARCH:
        gguf.close()
        raise UnsupportedError(f"{given}: architecture {found!r:.80}: expected {ARCH!r}")
    return gguf
