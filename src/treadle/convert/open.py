"""From a path to a model that the engine can run: GGUF, or a Hugging Face directory in place."""

from __future__ import annotations

import os
from pathlib import Path

from treadle.files.gguf import GGUF, open_gguf
from treadle.files.splits import is_hf


def packaged_model() -> Path:
    """The small model that ships inside the package."""
    return Path(__file__).resolve().parent.parent / "data" / "demo.gguf"


def open_model(path: str | os.PathLike[str]) -> GGUF:
    """Open a model as ``open_gguf`` or ``open_hf`` does, whichever it is for; errors as theirs."""
    if not is_hf(path):
        return open_gguf(path)
    from treadle.convert.hf import open_hf  # a GGUF file loads without it

    return open_hf(path)
