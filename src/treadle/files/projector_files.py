"""Projector files (the vision or audio encoder of a GGUF model): names, places, and the choice
among several for one model.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator
from pathlib import Path, PurePosixPath

# By preference: a tower is small, so its precision costs little.
TYPES = ("f16", "bf16", "q8_0", "f32")
_NAME = re.compile(r"(?:^|[-._])mmproj(?=$|[-._])", re.IGNORECASE)
_TYPE = re.compile(r"(?:^|[-._])(f16|fp16|bf16|q8_0|f32|fp32)(?=$|[-._])", re.IGNORECASE)
_SPELLINGS = {"fp16": "f16", "fp32": "f32"}
_OTHERS = 2  # rank of a projector that is named for another model


def is_projector_name(path: str) -> bool:
    """Return whether the last part of ``path`` is a projector's name: a ``.gguf`` with the word
    ``mmproj``.
    """
    name = PurePosixPath(path).name
    return name.lower().endswith(".gguf") and _NAME.search(name[: -len(".gguf")]) is not None


def ranked_projectors(paths: Iterable[str], model: str) -> list[str]:
    """Return the projector files among ``paths``, the most likely one for the model file ``model``
    first.

    Names that contain the model's come first, then those that name no model, then the others.
    Within these the order is that of their types in TYPES.
    """
    names = [path for path in paths if is_projector_name(path)]
    return sorted(names, key=lambda path: (_name_mismatch(path, model), _type_rank(path), path))


def named_for_another(path: str, model: str) -> bool:
    """Return whether a projector's file name states another model than the file ``model``."""
    return _name_mismatch(path, model) == _OTHERS


def projectors_beside(path: Path) -> list[Path]:
    """Return the projector files that may belong to the model file ``path``, the most likely one
    first: those in its folder, and within the hub's cache also those in the folders above, up to
    the repository's root.
    """
    found = []
    for folder in _folders(path):
        names = {str(each): each for each in folder.glob("*.gguf") if each.is_file()}
        ranked = ranked_projectors(names, path.name)
        found += [names[name] for name in ranked if names[name] != path]
    return found


def _folders(path: Path) -> Iterator[Path]:
    """Yield the folder of ``path``; within the hub's cache,
    ``models--OWNER--REPO/snapshots/COMMIT``, also those above it up to COMMIT.
    """
    yield path.parent
    above = list(path.absolute().parents)
    ends = [i for i, folder in enumerate(above[:-2]) if _is_snapshot(folder)]
    if ends:
        yield from above[1 : ends[0] + 1]


def _is_snapshot(folder: Path) -> bool:
    return folder.parent.name == "snapshots" and folder.parent.parent.name.startswith("models--")


def _name_mismatch(path: str, model: str) -> int:
    """Return 0 if a projector's name contains the model's, 1 if it names no model, 2 for another
    model.
    """
    bare = PurePosixPath(path).name[: -len(".gguf")]
    named = _words(_TYPE.sub("", _NAME.sub("", bare))).removeprefix("ggml").removeprefix("model")
    if not named:
        return 1
    return 0 if named in _words(PurePosixPath(model).name) else _OTHERS


def _words(name: str) -> str:
    return re.sub(r"[-._\s]+", "", name.lower())


def _type_rank(path: str) -> int:
    found = [kind.lower() for kind in _TYPE.findall(PurePosixPath(path).name[: -len(".gguf")])]
    kind = _SPELLINGS.get(found[-1], found[-1]) if found else ""
    return TYPES.index(kind) if kind in TYPES else len(TYPES)
