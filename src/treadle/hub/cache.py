"""Files of a repository on this machine: huggingface_hub's cache, read without the network.

::

    models--OWNER--REPO/refs/REVISION           the commit that a branch or tag was at
    models--OWNER--REPO/snapshots/COMMIT/...    its files that were downloaded
"""

from __future__ import annotations

import json
import os
from collections.abc import Mapping
from pathlib import Path

from treadle.files.splits import CONFIG, INDEX
from treadle.hub.name import HubName

PREFIX = "models--"
DEFAULT_REVISION = "main"


def cache_folder() -> Path:
    """Return huggingface_hub's cache folder, by its rules (HF_HUB_CACHE, HF_HOME, XDG_CACHE_HOME).
    huggingface_hub is not imported: that takes longer than to look up a model.
    """
    given = os.environ.get("HF_HUB_CACHE") or os.environ.get("HUGGINGFACE_HUB_CACHE")
    if not given:
        caches = os.environ.get("XDG_CACHE_HOME") or os.path.join("~", ".cache")
        home = os.environ.get("HF_HOME") or os.path.join(caches, "huggingface")
        given = os.path.join(home, "hub")
    return Path(os.path.expanduser(os.path.expandvars(given)))


def repository(repo: str) -> Path:
    """Return the folder of the repository ``repo`` (OWNER/REPO) in the cache, whether it exists or
    not.
    """
    return cache_folder() / (PREFIX + repo.replace("/", "--"))


def snapshot(name: HubName) -> Path | None:
    """Return the folder ``snapshots/COMMIT`` with the downloaded files of the name's revision, None
    if there is none.
    """
    folder = repository(name.repo)
    revision = name.revision or DEFAULT_REVISION
    try:
        commit = (folder / "refs" / revision).read_text().strip()
    except (OSError, ValueError):
        commit = revision
    found = folder / "snapshots" / commit
    return found if found.is_dir() else None


def files(name: HubName) -> dict[str, int]:
    """Return the files of the name's revision that were downloaded whole: path within the
    repository to bytes.
    """
    folder = snapshot(name)
    if folder is None:
        return {}
    found = (path for path in folder.rglob("*") if path.is_file())
    return {path.relative_to(folder).as_posix(): path.stat().st_size for path in found}


def is_whole(name: HubName, found: Mapping[str, int]) -> bool:
    """Return whether ``found`` (path to bytes) has a Hugging Face folder with all its weights, at
    the folder of ``name``.

    An interrupted download leaves only some of its shards.
    """
    prefix = f"{name.path}/" if name.path else ""
    if prefix + CONFIG not in found:
        return False
    folder = snapshot(name)
    if prefix + INDEX not in found or folder is None:
        return any(path.endswith(".safetensors") for path in found)
    shards = indexed_shards(folder / prefix / INDEX)
    return shards is not None and all(prefix + shard in found for shard in shards)


def indexed_shards(index: Path) -> set[str] | None:
    """Return the names of the weight files that the safetensors index ``index`` lists; None if it
    cannot be read.
    """
    try:
        return set(map(str, json.loads(index.read_bytes())["weight_map"].values()))
    except (OSError, ValueError, KeyError, TypeError, AttributeError):
        return None
