"""Files of a repository on this machine: huggingface_hub's cache, read without the network.

::

    models--OWNER--REPO/refs/REVISION           the commit that a branch or tag was at
    models--OWNER--REPO/snapshots/COMMIT/...    its files that were downloaded
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path

from treadle.files.splits import CONFIG, INDEX
from treadle.hub.name import HubName


def snapshot(name: HubName) -> Path | None:
    """Return the folder of a revision's downloaded files, or None."""
    from huggingface_hub import constants

    folder = Path(constants.HF_HUB_CACHE) / f"models--{name.repo.replace('/', '--')}"
    revision = name.revision or constants.DEFAULT_REVISION
    try:
        commit = (folder / "refs" / revision).read_text().strip()
    except (OSError, ValueError):
        commit = revision
    found = folder / "snapshots" / commit
    return found if found.is_dir() else None


def files(name: HubName) -> dict[str, int]:
    """Return path (within the repository) and bytes of each file that was downloaded whole."""
    folder = snapshot(name)
    if folder is None:
        return {}
    found = (path for path in folder.rglob("*") if path.is_file())
    return {path.relative_to(folder).as_posix(): path.stat().st_size for path in found}


def is_whole(name: HubName, found: Mapping[str, int]) -> bool:
    """Whether ``found``, the files of one folder, are a Hugging Face folder with all its weights.

    An interrupted download leaves only some of its shards.
    """
    prefix = f"{name.path}/" if name.path else ""
    if prefix + CONFIG not in found:
        return False
    index = prefix + INDEX
    folder = snapshot(name)
    if index not in found or folder is None:
        return any(path.endswith(".safetensors") for path in found)
    try:
        shards = set(json.loads((folder / index).read_bytes())["weight_map"].values())
    except (OSError, ValueError, KeyError, TypeError, AttributeError):
        return False
    return all(prefix + str(shard) in found for shard in shards)
