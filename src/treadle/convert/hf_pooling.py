"""How a Hugging Face model makes one vector of a text's states: sentence-transformers' files."""

from __future__ import annotations

import os
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from treadle.convert.hf_config import Hyper
from treadle.errors import FileError, UnsupportedError
from treadle.files.safetensors import read_json
from treadle.models.dense import DENSE

MEAN, FIRST, LAST, RANK = 1, 2, 3, 4  # GGUF's numbers
_MODES = {"mean": MEAN, "cls": FIRST, "lasttoken": LAST}
_FLAGS = {
    "pooling_mode_mean_tokens": MEAN,
    "pooling_mode_cls_token": FIRST,
    "pooling_mode_lasttoken": LAST,
}
_KNOWN = ("Transformer", "Pooling", "Dense", "Normalize")


def read_pooling(folder: Path, config: Mapping[str, Any], hyper: Hyper) -> dict[str, Any]:
    """GGUF's keys of the pooling; none where no file says. FileError, UnsupportedError."""
    arch = hyper.family.arch
    if hyper.scores:
        made = {f"{arch}.pooling_type": RANK}
        if "cls.norm" in hyper.family.score_names.values():  # the others have one way
            how = config.get("classifier_pooling", "cls")
            if how not in ("cls", "mean"):
                raise UnsupportedError(f"{folder}: classifier_pooling is {how!r:.60}")
            made[f"{arch}.classifier.pooling_type"] = _MODES[how]
        return made
    dense_modules(folder)  # which refuses others
    path = folder / "1_Pooling" / "config.json"
    if not os.path.lexists(path):
        return {}
    said = read_json(path)
    modes = {key for key, value in said.items() if key in _FLAGS and value is True}
    others = {k for k, v in said.items() if k.startswith("pooling_mode_") and v is True} - modes
    mode = said.get("pooling_mode")
    if isinstance(mode, str) and mode in _MODES and not modes | others:
        return {f"{arch}.pooling_type": _MODES[mode]}
    if len(modes) != 1 or others:
        found = ", ".join(sorted(modes | others)) or repr(mode)
        raise UnsupportedError(f"{path}: {found:.120}: treadle has the mean, the first or the last")
    return {f"{arch}.pooling_type": _FLAGS[modes.pop()]}


def dense_modules(folder: Path) -> list[str]:
    """The folders of matrices behind the pooling, in their order. Raises FileError for what is no
    list of modules, UnsupportedError for others that change a vector.
    """
    import json

    path = folder / "modules.json"
    if not os.path.lexists(path):
        return []
    try:
        found = json.loads(path.read_bytes())
        kinds = [str(module["type"]).rpartition(".")[2] for module in found]
        places = [str(module.get("path", "")) for module in found]
    except (OSError, ValueError, TypeError, KeyError, AttributeError, RecursionError) as e:
        raise FileError(f"cannot be read: {e}", path=path, expected="a list of modules") from e
    for kind in kinds:
        if kind not in _KNOWN:
            raise UnsupportedError(f"{path}: {kind:.60}: treadle has nothing such")
    dense = [place for kind, place in zip(kinds, places, strict=True) if kind == "Dense"]
    if kinds != sorted(kinds, key=_KNOWN.index) or len(dense) > len(DENSE):
        what = f"treadle has {', '.join(_KNOWN)} in this order, at most {len(DENSE)} Dense"
        raise UnsupportedError(f"{path}: {', '.join(kinds):.120}: {what}")
    for place in dense:
        if not place or Path(place).name != place:
            raise FileError(f"is {place!r:.60}", path=path, where="path", expected="a folder here")
    return dense
