"""Opens a model for the engine: a GGUF file, or a Hugging Face directory or Whisper model
in place.
"""

from __future__ import annotations

import os

from treadle.errors import FileError, TreadleError, UnsupportedError
from treadle.files.gguf import GGUF, open_gguf
from treadle.files.splits import is_hf
from treadle.files.tensor import Progress


def open_model(
    path: str | os.PathLike[str], progress: Progress | None = None, *, drafter: bool = False
) -> GGUF:
    """Open a model for the engine with ``open_gguf``, ``open_hf`` or ``open_whisper``, by its
    content. Raises the errors of that function.

    Tensors of a Hugging Face folder that are stored in another form (such as single experts) are
    assembled in memory when the first of them is read. With ``progress`` they are assembled before
    this returns, with calls of ``progress("unpack", done, total)``, counted in tensors.

    ``drafter``: if a folder holds both a DeepSeek V4 model and its DSpark drafter (the small model
    of speculative decoding), open the drafter.
    """
    if not is_hf(path):
        try:
            return open_gguf(path, stored=True)
        except (FileError, UnsupportedError):
            if (speech := _open_speech(path)) is None:
                raise
            return speech
    from treadle.convert.hf.folder import open_hf  # a GGUF file loads without it

    try:
        model = open_hf(path, drafter=drafter)
    except UnsupportedError:
        if (speech := _open_speech(path)) is None:
            raise
        return speech
    if progress is not None:
        model.make(progress)
    return model


def _open_speech(path: str | os.PathLike[str]) -> GGUF | None:
    """Open a Whisper model that is not a GGUF file; return None if ``path`` is no such model."""
    from treadle.convert.whisper.open import is_whisper, open_whisper

    try:
        is_speech = is_whisper(path)
    except (TreadleError, OSError):  # the caller raises its own error
        return None
    return open_whisper(path) if is_speech else None
