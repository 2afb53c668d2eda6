"""Pooling of a text's hidden states to one vector, from sentence-transformers' files."""

from __future__ import annotations

import os
from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

from treadle.errors import FileError, UnsupportedError
from treadle.files.safetensors import read_json
from treadle.models.pooling_head import DENSE

if TYPE_CHECKING:
    from treadle.convert.hf.config import HfConfig


# GGUF's numbers
MEAN = 1
FIRST = 2
LAST = 3
RANK = 4
_MODES = {"mean": MEAN, "cls": FIRST, "lasttoken": LAST}
_FLAGS = {
    "pooling_mode_mean_tokens": MEAN,
    "pooling_mode_cls_token": FIRST,
    "pooling_mode_lasttoken": LAST,
}
_KNOWN = ("Transformer", "Pooling", "Dense", "Normalize")
_POOLING = "1_Pooling"  # its folder unless modules.json names another
_VECTOR = "sentence_embedding"


def read_pooling(folder: Path, config: Mapping[str, Any], hyper: HfConfig) -> dict[str, Any]:
    """Return GGUF's pooling keys; {} if no file states a pooling. ``config``: config.json. Raises
    FileError for damaged files, UnsupportedError for other poolings than mean, first and last
    token.
    """
    arch = hyper.family.arch
    if hyper.scores:
        result = {f"{arch}.pooling_type": RANK}
        if "cls.norm" in hyper.family.score_names.values():  # other heads have one method
            how = config.get("classifier_pooling", "cls")
            if how not in ("cls", "mean"):
                raise UnsupportedError(f"{folder}: classifier_pooling is {how!r:.60}")
            result[f"{arch}.classifier.pooling_type"] = _MODES[how]
        return result
    modules = read_modules(folder)
    path = pooling_file(folder)
    if not os.path.lexists(path) and not any(kind == "Pooling" for kind, _ in modules):
        return {}
    said = read_json(path)
    mode = said.get("pooling_mode")
    mode = mode[0] if isinstance(mode, list) and len(mode) == 1 else mode
    if isinstance(mode, str) and mode in _MODES:  # overrides the older keys
        return {f"{arch}.pooling_type": _MODES[mode]}
    modes = {key for key, value in said.items() if key in _FLAGS and value is True}
    others = {k for k, v in said.items() if k.startswith("pooling_mode_") and v is True} - modes
    if mode is not None or len(modes) != 1 or others:
        found = repr(mode) if mode is not None else ", ".join(sorted(modes | others)) or "no mode"
        raise UnsupportedError(f"{path}: {found:.120}: treadle supports mean, first and last token")
    return {f"{arch}.pooling_type": _FLAGS[modes.pop()]}


def pooling_file(folder: Path) -> Path:
    """Return the path of the Pooling module's config.json, which may not exist. Errors as
    ``read_modules``'s.
    """
    places = [place for kind, place in read_modules(folder) if kind == "Pooling"]
    return folder / (places[0] if places else _POOLING) / "config.json"


def read_modules(folder: Path) -> list[tuple[str, str]]:
    """Return (kind, subfolder) of each module, in the order of modules.json; [] without that file.

    Raises FileError for an invalid list, UnsupportedError for other kinds or another order than
    Transformer, Pooling, Dense, Normalize.
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
            raise UnsupportedError(
                f"{path}: {kind:.60}: unsupported module; supported: {', '.join(_KNOWN)}"
            )
    once = all(kinds.count(kind) < 2 for kind in _KNOWN if kind != "Dense")
    if not once or kinds != sorted(kinds, key=_KNOWN.index) or kinds.count("Dense") > len(DENSE):
        what = (
            f"treadle supports {', '.join(_KNOWN)} in this order, with at most {len(DENSE)} Dense"
        )
        raise UnsupportedError(f"{path}: {', '.join(kinds):.120}: {what}")
    for kind, place in zip(kinds, places, strict=True):
        if Path(place).name != place or (kind == "Dense" and not place):
            raise FileError(
                f"is {place!r:.60}", path=path, where="path", expected="a subfolder of this folder"
            )
        if kind == "Transformer" and place:
            raise UnsupportedError(
                f"{path}: the model is in {place!r:.60}: pass that folder instead"
            )
        if kind == "Normalize":
            own = folder / place / "config.json"
            check_in_and_out(read_json(own) if os.path.lexists(own) else {}, own)
    return list(zip(kinds, places, strict=True))


def check_in_and_out(said: Mapping[str, Any], path: Path) -> None:
    """Raise UnsupportedError for a module that reads or writes anything but ``sentence_embedding``.
    ``said`` is the module's config.json, ``path`` its file.
    """
    for key in ("module_input_name", "module_output_name"):
        if said.get(key) not in (None, _VECTOR):
            what = f"is {said[key]!r:.60}: treadle supports only {_VECTOR!r}"
            raise UnsupportedError(f"{path}: {key}: {what}")
