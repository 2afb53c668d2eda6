"""Opens a model for the engine: a GGUF file, or a Hugging Face directory in place."""

from __future__ import annotations

import os
from pathlib import Path

from treadle.files.gguf import GGUF, open_gguf
from treadle.files.splits import is_hf
from treadle.files.tensor import Progress


def packaged_model() -> Path:
    """Return the path of the small model that ships inside the package."""
    return Path(__file__).resolve().parent.parent / "data" / "demo.gguf"


def open_model(path: str | os.PathLike[str], progress: Progress | None = None) -> GGUF:
    """Open a model with ``open_gguf`` or ``open_hf``, whichever applies, with the errors of that
    function.

    Tensors that no file stores in the form used are assembled on first read. With ``progress`` they
    are assembled at once, with calls of ``progress("unpack", done, total)``.
    """
    if not is_hf(path):
        return open_gguf(path)
    from treadle.convert.hf.folder import open_hf  # a GGUF file loads without it

    model = open_hf(path)
    if progress is not None:
        model.make(progress)
    return model
