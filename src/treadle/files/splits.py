"""Resolution of a path to the files of one model: a file, its shards, or a folder of either."""

from __future__ import annotations

import os
import re
from pathlib import Path

from treadle.errors import FileError, why

# Files of a Hugging Face directory: configuration, and weights as one file or by an index.
CONFIG = "config.json"
CTRANSLATE2 = "model.bin"  # the file of a folder of CTranslate2
SINGLE = "model.safetensors"
INDEX = "model.safetensors.index.json"
MODELOPT = "hf_quant_config.json"  # quantisation settings of ModelOpt's first versions
# sentence-transformers' settings file: the first of these that exists. Older versions named it
# after the model type.
SENTENCES = tuple(
    f"sentence_{kind}_config.json"
    for kind in ("bert", "roberta", "distilbert", "camembert", "albert", "xlm-roberta", "xlnet")
)
SHARD = re.compile(r"(?P<stem>.*)-(?P<no>\d{5})-of-(?P<count>\d{5})\.gguf", re.DOTALL)
SHOWN = 5  # names in a message


def shard_name(stem: str, no: int, count: int) -> str:
    """Return the file name of shard ``no`` (from 0) of ``count``: ``STEM-00001-of-00003.gguf`` for
    0.
    """
    return f"{stem}-{no + 1:05d}-of-{count:05d}.gguf"


def shard_path(path: Path, no: int, count: int) -> Path | None:
    """Return the path of shard ``no`` (from 0) of ``count``, next to the shard ``path``; None if
    ``path`` is not named as one of ``count`` shards.
    """
    match = SHARD.fullmatch(path.name)
    if match is None or int(match["count"]) != count:
        return None
    return path.with_name(shard_name(match["stem"], no, count))


def is_hf(path: str | os.PathLike[str]) -> bool:
    """Return whether ``path`` is a Hugging Face directory (config.json and safetensors) or one of
    its weight files.
    """
    given = Path(os.path.expanduser(path))
    folder = given if given.is_dir() else given.parent
    if not os.path.lexists(folder / CONFIG):
        return False
    if not given.is_dir():
        return given.name.endswith((".safetensors", ".safetensors.index.json"))
    return any(folder.glob("*.safetensors")) or any(folder.glob("*.safetensors.index.json"))


def model_inside(path: str | os.PathLike[str]) -> Path:
    """Return the file to open for ``path``: a file or first shard, a stem of shards, or a folder.

    ``model.gguf`` and ``model`` stand for ``model-00001-of-00003.gguf``; a folder stands for its
    only GGUF model, or for CTranslate2's model.bin. Raises FileError if no model, or more than one,
    matches.
    """
    if not os.fspath(path):
        raise FileError("an empty name", path="''", expected="a GGUF file")
    given = Path(os.path.expanduser(path))
    if os.path.isdir(given):
        firsts = [p for p in sorted(given.glob("*.gguf")) if _is_first(p)]
        if len(firsts) == 1:
            return firsts[0]
        if not firsts and (given / CTRANSLATE2).is_file():
            return given / CTRANSLATE2
        if not firsts and any(given.glob("*.safetensors")):
            what = (
                "is a folder of safetensors without config.json: fetch it, and the tokenizer, too"
            )
            raise FileError(what, path=given)
        if not firsts:
            raise FileError("is a folder that contains no GGUF file", path=given)
        from treadle.base.humanize import listed

        found = listed([p.name for p in firsts], SHOWN)
        raise FileError(f"is a folder with several models: choose one of {found}", path=given)
    if os.path.exists(given):
        return given
    first = first_shard(given)
    if first is not None:
        return first
    raise FileError(missing(given), path=given, expected="a GGUF file or its first shard")


def first_shard(stem: Path) -> Path | None:
    """Return the path of the first shard, ``model-00001-of-00003.gguf``, for the stem
    ``model.gguf`` or ``model``; None unless exactly one such file exists.
    """
    name = stem.name.removesuffix(".gguf")
    firsts = [
        p
        for p in stem.parent.glob("*-00001-of-*.gguf")
        if (match := SHARD.fullmatch(p.name)) and match["stem"] == name
    ]
    return firsts[0] if len(firsts) == 1 else None


def shown_name(path: Path) -> str:
    """Return the name of a model's file or folder for people. For a CTranslate2 model it is the
    folder's, because the file is always named model.bin.
    """
    folder = path.absolute().parent.name if path.name == CTRANSLATE2 else ""
    return folder or path.name


def missing(path: Path) -> str:
    """Return a message why there is no readable file at ``path``: a dangling link, a folder without
    permission, or nothing there.
    """
    try:
        path.stat()
    except FileNotFoundError:
        if path.is_symlink():
            return f"is a symbolic link to {os.readlink(path)}, which does not exist"
    except NotADirectoryError:
        pass
    except (OSError, ValueError) as error:
        return f"cannot be opened: {why(error)}"
    return "no such file"


def shards_beside(path: Path) -> list[Path]:
    """Return the paths of all shards of a split model. ``path``: one of them, or their common stem;
    [] for other paths.
    """
    match = SHARD.fullmatch(path.name)
    stem = match["stem"] if match else path.name.removesuffix(".gguf")
    if not match and path.exists():
        return []
    shards = path.parent.glob("*-of-*.gguf")
    return [p for p in shards if (m := SHARD.fullmatch(p.name)) and m["stem"] == stem]


def _is_first(path: Path) -> bool:
    match = SHARD.fullmatch(path.name)
    return match is None or int(match["no"]) == 1
