"""Task adapters inside a model's folder (jina-embeddings-v3). The path of a task's adapter is
``FOLDER/retrieval.query``, as if it were a file there.

A matrix ``NAME.parametrizations.weight.original`` comes with ``0.lora_A [n_tasks, rank, k]`` and
``0.lora_B [n_tasks, m, rank]``; for an embedding table, A and B are swapped.
"""

from __future__ import annotations

import hashlib
import re
from collections.abc import Sequence
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np

from treadle.convert.lora.peft_modules import Modules
from treadle.errors import FileError, UnsupportedError
from treadle.files.metadata import MetadataReader
from treadle.files.safetensors import open_safetensors, read_json
from treadle.formats import by_name
from treadle.models.lora import EMBEDDINGS, TYPES, Adapter, LowRank

if TYPE_CHECKING:
    from treadle.files.gguf import GGUF
    from treadle.files.safetensors import SafeTensor
    from treadle.models.config import Config
    from treadle.models.lora import Floats

TASKS = "lora_adaptations"
KEY = re.compile(r"(?P<module>.+)\.parametrizations\.weight\.0\.lora_(?P<side>[AB])")


def tasks_of(folder: Path) -> list[str]:
    """Return the names of the tasks for which a model's folder has adapters; [] for other
    folders.
    """
    config = folder / "config.json"
    if not config.is_file():
        return []
    names = read_json(config).get(TASKS)
    return [str(name) for name in names] if isinstance(names, Sequence) else []


def is_task(path: Path) -> bool:
    """Return whether ``path`` can name a task: nothing exists there, and the config of its folder
    lists tasks.
    """
    return not path.exists() and bool(tasks_of(path.parent))


def open_task(path: Path, gguf: GGUF, config: Config) -> Adapter:
    """Read one task's adapter for the model ``gguf``. Raises FileError for a task that the folder
    lacks, and for damaged files.
    """
    folder = path.parent
    tasks = tasks_of(path.parent)
    if path.name not in tasks:
        what = f"has no adapter for a task {path.name!r:.60}"
        raise FileError(what, path=folder, expected=", ".join(tasks))
    i = tasks.index(path.name)
    modules = Modules(gguf, config.arch.name)
    keys = MetadataReader(read_json(folder / "config.json"), folder / "config.json")
    alpha = keys.number("lora_alpha", 1.0, lo=0.0)
    state = hashlib.sha256(path.name.encode())
    pairs: dict[str, dict[str, SafeTensor]] = {}
    for name, tensor in open_safetensors(folder).tensors.items():
        if match := KEY.fullmatch(name):
            pairs.setdefault(match["module"], {})[match["side"]] = tensor
    ranks = {}
    for module, pair in pairs.items():
        if modules.is_unread(module):
            continue
        for tensor in pair.values():
            if len(pair) < 2:
                raise tensor.error("is one half of a pair", "lora_A and lora_B")
            if len(tensor.shape) != 3 or tensor.shape[0] != len(tasks):
                expected = f"one matrix for each of {len(tasks)} tasks"
                raise tensor.error(f"shape {list(tensor.shape)}", expected)
            state.update(tensor.data.reshape(len(tasks), -1)[i].tobytes())
        a = pair["A"]
        b = pair["B"]
        try:
            (part,) = modules.find(module)
        except UnsupportedError as error:
            raise UnsupportedError(f"{a.path}: {a.name}: an adapter of {error}") from None
        if part.name in (EMBEDDINGS, TYPES):
            a, b = b, a
        rank, k = a.shape[1:]
        read = partial(_floats, a, i), partial(_floats, b, i)
        ranks[part.name] = LowRank(rank, alpha / max(rank, 1), *read, (rank, k), b.shape[1:])
    if not ranks:
        raise FileError("has no task adapters", path=folder, expected=", ".join(tasks))
    return Adapter(path.name, path, ranks, state.digest())


def _floats(tensor: SafeTensor, i: int) -> Floats:
    """Return the f32 values of task ``i`` in a tensor [n_tasks, ..]."""
    own = tensor.data.reshape(tensor.shape[0], -1)[i]
    values: Floats = by_name(tensor.dtype).dequantize_rows(own)
    if not np.isfinite(values).all():
        raise tensor.error("holds a value that is not a finite number")
    return values.reshape(tensor.shape[1:])
