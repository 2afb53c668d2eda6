"""Keys that a drafter's file takes from its target model, the one that it drafts for."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

from treadle.errors import UnsupportedError
from treadle.models.archs import ARCHS
from treadle.models.drafters.eagle3 import N_TARGET
from treadle.models.drafters.target import TARGET_LAYERS, usual_layers
from treadle.models.load import SECTIONS, load_config

if TYPE_CHECKING:
    from treadle.convert.sources.source import Source
    from treadle.files.gguf import GGUF

# Graphs of drafters whose files have the model's vocabulary, and whether their folders may leave
# out the layers whose states they read.
READERS = {"eagle3": True, "dflash": False}


def add_model(source: Source, model: GGUF) -> None:
    """Add keys of the target ``model`` to the drafter ``source``: the vocabulary, the layers whose
    hidden states the drafter reads, their width, and M-RoPE's sections. Existing keys stay.

    Raises UnsupportedError if the source is no drafter that reads hidden states, FileError for a
    damaged model.
    """
    keys = source.metadata
    arch = str(keys.get("general.architecture", ""))
    if arch not in ARCHS or ARCHS[arch].graph not in READERS:
        what = f"{arch or 'its architecture'} is no drafter that has another model's vocabulary"
        raise UnsupportedError(f"{source.path}: {what}")
    config = load_config(model, warn=False)
    for key, value in model.metadata.items():
        if key.startswith("tokenizer."):
            keys.setdefault(key, value)
    if READERS[ARCHS[arch].graph]:
        keys.setdefault(f"{arch}.{TARGET_LAYERS}", [*usual_layers(config.n_layer)])
        keys.setdefault(f"{arch}.{N_TARGET}", config.n_embd)
    if _has_sections(model.metadata, config.arch.name):
        n_rot = keys[f"{arch}.rope.dimension_count"]
        keys.setdefault(f"{arch}.{SECTIONS}", [n_rot // 2, 0, 0, 0])


def _has_sections(metadata: Mapping[str, Any], arch: str) -> bool:
    """Return whether a model's ``metadata`` says that a position has several numbers (M-RoPE)."""
    found = metadata.get(f"{arch}.{SECTIONS}")
    return found is not None and sum(bool(n) for n in found) > 1
