"""From a path to a model that the engine can run: GGUF, or a Hugging Face directory in place."""

from __future__ import annotations

import os
from pathlib import Path

from treadle.files.gguf import GGUF, open_gguf
from treadle.files.splits import is_hf
from treadle.files.tensor import Progress


def packaged_model() -> Path:
    """The small model that ships inside the package."""
    return Path(__file__).resolve().parent.parent / "data" / "demo.gguf"


def open_model(path: str | os.PathLike[str], progress: Progress | None = None) -> GGUF:
    """Open a model as ``open_gguf`` or ``open_hf`` does, whichever it is for; errors as theirs.

    What no file has as it is used is put together when it is first read; with ``progress`` it is at
    once, and ``progress("unpack", done, total)`` is told.
    """
    if not is_hf(path):
        return open_gguf(path)
    from treadle.convert.hf.folder import open_hf  # a GGUF file loads without it

    model = open_hf(path)
    if progress is not None:
        model.make(progress)
    return model
