"""From a path to a model that the engine can run: GGUF, or a Hugging Face directory in place."""

from __future__ import annotations

import os
from pathlib import Path

from treadle.files.gguf import GGUF, open_gguf

CONFIG = "config.json"


def is_hf(path: str | os.PathLike[str]) -> bool:
    """Whether ``path`` is a Hugging Face directory, or one of its weight files."""
    given = Path(os.path.expanduser(path))
    folder = given if given.is_dir() else given.parent
    if not os.path.lexists(folder / CONFIG):
        return False
    if not given.is_dir():
        return given.name.endswith((".safetensors", ".safetensors.index.json"))
    return any(folder.glob("*.safetensors")) or any(folder.glob("*.safetensors.index.json"))


def open_model(path: str | os.PathLike[str]) -> GGUF:
    """Open a model as ``open_gguf`` or ``open_hf`` does, whichever it is for; errors as theirs."""
    if not is_hf(path):
        return open_gguf(path)
    from treadle.convert.hf import open_hf  # a GGUF file loads without it

    return open_hf(path)
