"""Opens a model for the engine: a GGUF file, or a Hugging Face directory in place."""

from __future__ import annotations

import os
from pathlib import Path

from treadle.errors import FileError, TreadleError, UnsupportedError
from treadle.files.gguf import GGUF, open_gguf
from treadle.files.splits import is_hf
from treadle.files.tensor import Progress


def packaged_model() -> Path:
    """Return the path of the small model that ships inside the package."""
    return Path(__file__).resolve().parent.parent / "data" / "demo.gguf"


def open_model(path: str | os.PathLike[str], progress: Progress | None = None) -> GGUF:
    """Open a model with ``open_gguf``, ``open_hf`` or ``open_whisper``, whichever applies, with the
    errors of that function.

    Tensors that no file stores in the form used are assembled on first read. With ``progress`` they
    are assembled at once, with calls of ``progress("unpack", done, total)``.
    """
    if not is_hf(path):
        try:
            return open_gguf(path)
        except (FileError, UnsupportedError):
            if (speech := _open_speech(path)) is None:
                raise
            return speech
    from treadle.convert.hf.folder import open_hf  # a GGUF file loads without it

    try:
        model = open_hf(path)
    except UnsupportedError:
        if (speech := _open_speech(path)) is None:
            raise
        return speech
    if progress is not None:
        model.make(progress)
    return model


def open_drafter(path: str | os.PathLike[str]) -> GGUF:
    """Open a drafter as ``open_model`` does; of a folder that holds a model and its DSpark, the
    DSpark.
    """
    if not is_hf(path):
        return open_model(path)
    from treadle.convert.hf.folder import open_hf

    return open_hf(path, drafter=True)


def _open_speech(path: str | os.PathLike[str]) -> GGUF | None:
    """Open a speech model in a format of its own; None if it is none."""
    from treadle.convert.whisper.open import is_whisper, open_whisper

    try:
        is_speech = is_whisper(path)
    except (TreadleError, OSError):  # the other opener has told it
        return None
    return open_whisper(path) if is_speech else None
