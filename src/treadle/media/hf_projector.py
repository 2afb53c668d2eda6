"""The picture and sound parts of a Hugging Face folder, with the interface of a projector file.

Each family has one table of names (``HfNames``). Matrices stay in the mapped files; small tensors
that GGUF files have in another form are computed in memory.
"""

from __future__ import annotations

import math
import os
import re
from collections.abc import Callable, Mapping
from dataclasses import field
from pathlib import Path
from typing import Any

import numpy as np

from treadle.base.fast_classes import dataclass
from treadle.errors import FileError, UnsupportedError
from treadle.files.gguf import GGUF
from treadle.files.hf_config import without_thinker
from treadle.files.metadata import MetadataReader
from treadle.files.safetensors import SafeTensor, SafeTensors, open_safetensors, read_json
from treadle.files.splits import CONFIG
from treadle.files.tensor import Tensor
from treadle.formats import FORMATS, by_name

PREPROCESSOR = "preprocessor_config.json"
PROCESSOR = "processor_config.json"  # newer folders have the former inside, as image_processor
DTYPES = {"F32": 0, "F16": 1, "BF16": 30}  # dtypes that towers are read in: ggml's type numbers
_LAYER = re.compile(r"(?<=\.)\d+(?=\.)")
_SUFFIX = re.compile(r"\.(weight|bias)$")

Arrays = Mapping[str, np.ndarray]
ReadKeys = Callable[[MetadataReader, MetadataReader], dict[str, Any]]


@dataclass(frozen=True, eq=False)
class HfNames:
    """Table from the names in a family's Hugging Face folders to those in its projector files.

    read: returns the projector file's keys, without ``clip.``, from ``config.json`` and the
        preprocessor's file.
    names: the projector file's name of each tensor; ``{}`` stands for a layer's number. Names
        without ``.weight`` or ``.bias`` hold for both.
    prefixes: prefixes of the names of all tensors of these parts, without ``model.``.
    made: functions, by the projector file's name, that convert a tensor's f32 values to the form in
        projector files (one tensor, or several by name).
    added: returns, from the keys, the tensors of projector files that no folder has.
    unread: names of tensors that are ignored.
    left_out: parts that treadle does not support, by modality: the prefix of their tensors' names,
        and their projector type.
    numbered: for names whose ``{}`` has another number in projector files, such as deepstack's
        layers: the key that lists these numbers, by the name up to ``{}``.
    splits_qkv: whether projector files have the folder's fused queries, keys and values as three
        tensors.
    """

    read: ReadKeys
    names: Mapping[str, str]
    prefixes: tuple[str, ...]
    made: Mapping[str, Callable[[np.ndarray], Arrays | np.ndarray]] = field(default_factory=dict)
    added: Callable[[Mapping[str, Any]], Arrays] | None = None
    unread: tuple[str, ...] = ()
    left_out: Mapping[str, tuple[str, str]] = field(default_factory=dict)
    numbered: Mapping[str, str] = field(default_factory=dict)
    splits_qkv: bool = False

    def name_of(self, name: str, keys: Mapping[str, Any]) -> str:
        """Return the projector file's name of a folder's tensor ``name``; "" if the table lacks it.
        ``keys``: the projector file's keys, as ``read`` returns them.
        """
        suffix = _SUFFIX.search(name)
        tail = suffix[0] if suffix else ""
        for stem, end in ((name, ""), (name.removesuffix(tail), tail)):
            if stem in self.names:
                return self.names[stem] + end
            number = _LAYER.search(f"{stem}.")
            if number is None:
                continue
            head = stem[: number.start()]
            spelled = head + "{}" + stem[number.end() :]
            if spelled in self.names:
                i = int(number[0])
                if head in self.numbered:
                    listed = keys[self.numbered[head]]
                    i = listed[i] if i < len(listed) else -1
                return self.names[spelled].format(i) + end
        return ""


def read_preprocessor(folder: Path) -> MetadataReader:
    """Return a reader of a folder's settings of picture preparation (``preprocessor_config.json``
    or a part of the processor's file); it has no keys if the folder has none.
    """
    if (folder / PREPROCESSOR).exists():
        return MetadataReader(read_json(folder / PREPROCESSOR), folder / PREPROCESSOR)
    path = folder / PROCESSOR
    found = read_json(path).get("image_processor") if path.exists() else None
    return MetadataReader(found if isinstance(found, dict) else {}, path)


class HfProjector(GGUF):
    """A folder's picture and sound parts as a projector file.

    Queries and keys that projector files have split or in another order of rows are as in the
    folder; ``projector_source`` converts them.

    left_out: the projector types, by modality, of the folder's parts that treadle does not support.
    """

    left_out: Mapping[str, str]

    def __init__(self, folder: Path, table: HfNames, weights: SafeTensors) -> None:
        """Read the keys and tensor names of ``folder`` by ``table``; take over the open files of
        ``weights``. Raises FileError for a tensor or key that is missing or unknown, and
        UnsupportedError for quantised towers.
        """
        config = MetadataReader(without_thinker(read_json(folder / CONFIG)), folder / CONFIG)
        keys = table.read(config, read_preprocessor(folder))
        self.path = folder
        self.table = table
        self.paths = weights.paths
        self.version = 3
        self.alignment = 1
        self.header_only = False
        self.n_bytes = weights.n_bytes
        self.metadata = {f"clip.{key}": value for key, value in keys.items() if value is not None}
        self.metadata["general.architecture"] = "clip"
        self.types = {}
        self.tensors = {}
        self.left_out = {}
        self._maps = weights.maps
        for theirs, tensor in weights.tensors.items():
            name = theirs.removeprefix("model.").removeprefix("thinker.")
            for modality, (prefix, kind) in table.left_out.items():
                if name.startswith(prefix):
                    self.left_out = {**self.left_out, modality: kind}
            if not name.startswith(table.prefixes) or name in table.unread:
                continue
            found = table.name_of(name, keys)
            if not found:
                what = "the table of names of its family does not have this tensor"
                raise FileError(what, path=tensor.path, where=theirs, offset=tensor.offset)
            self.tensors |= _tensors(found, tensor, table)
        if table.added is not None and self.tensors:
            like = next(iter(self.tensors.values()))
            self.tensors |= _made(like, table.added(keys))


def _tensors(name: str, tensor: SafeTensor, table: HfNames) -> dict[str, Tensor]:
    if tensor.dtype not in DTYPES:
        what = f"{tensor.name} is {tensor.dtype}"
        have = ", ".join(DTYPES)
        raise UnsupportedError(f"{tensor.path}: {what}: towers are supported in {have} only")
    kind = DTYPES[tensor.dtype]
    place = tensor.path, tensor.offset, tensor.file
    shape = tensor.shape or (1,)  # projector files have no scalars
    mapped = Tensor(name, shape, kind, FORMATS[kind], tensor.n_bytes, *place)
    make = table.made.get(name)
    if make is None:
        return {name: mapped}
    try:
        found = make(mapped.dequantize())
    except ValueError:
        raise tensor.error(f"shape {list(tensor.shape)}", "that of its family") from None
    return _made(mapped, found if isinstance(found, Mapping) else {name: found})


def _made(like: Tensor, arrays: Arrays) -> dict[str, Tensor]:
    """Return f32 arrays as tensors in memory, by name; errors about them name the file and place of
    the tensor ``like``.
    """
    made = {}
    for name, values in arrays.items():
        data = np.ascontiguousarray(values, np.float32).reshape(-1).view(np.uint8)
        made[name] = like.in_memory(name, values.shape, by_name("F32"), data)
    return made


def two_frames(weight: np.ndarray) -> Arrays:
    """Split the weights of a convolution over two frames, ``[n, colours, 2, side, side]``, into one
    array for each frame, by the projector file's names. Raises ValueError for another shape.
    """
    if weight.ndim != 5 or weight.shape[2] != 2:
        raise ValueError(weight.shape)
    names = "v.patch_embd.weight", "v.patch_embd.weight.1"
    return {name: weight[:, :, i] for i, name in enumerate(names)}


def colours_first(matrix: np.ndarray) -> np.ndarray:
    """Return a matrix that multiplies patches, ``[n, 3 * side**2]``, with its columns reordered
    from (row, column, colour) to (colour, row, column); a vector likewise.
    """
    side = math.isqrt(matrix.shape[-1] // 3)
    cut = matrix.reshape(*matrix.shape[:-1], side, side, 3)
    return np.moveaxis(cut, -1, -3).reshape(matrix.shape)


def patch_convolution(matrix: np.ndarray) -> np.ndarray:
    """Return a matrix that multiplies patches, ``[n, row * column * colour]``, as the convolution
    that projector files have, ``[n, colour, row, column]``.
    """
    n, width = matrix.shape
    side = math.isqrt(width // 3)
    return colours_first(matrix).reshape(n, 3, side, side)


def part_of(config: MetadataReader, key: str) -> MetadataReader:
    """Return a reader of the object nested under ``key`` in ``config``. Raises FileError if it is
    missing.
    """
    found = config.within(key)
    if found is None:
        config.fail(key, "is missing", "an object")
    return found


def colours(preprocessor: MetadataReader, mean: float, std: float) -> dict[str, Any]:
    """Return the projector file's keys ``vision.image_mean`` and ``vision.image_std``, from the
    preprocessor's settings, or with ``mean`` and ``std`` for each colour.
    """
    return {
        "vision.image_mean": preprocessor.get("image_mean") or [mean] * 3,
        "vision.image_std": preprocessor.get("image_std") or [std] * 3,
    }


def is_media_folder(path: str | os.PathLike[str]) -> bool:
    """Return whether a folder's ``config.json`` has a picture or sound part."""
    return bool(_parts_of(path))


def folder_modalities(path: str | os.PathLike[str]) -> tuple[str, ...]:
    """Return the kinds of media, "image" and "audio", of a folder's parts that treadle reads."""
    from treadle.media.families import HF_NAMES  # it imports this module

    given = Path(path)
    folder = given if given.is_dir() else given.parent
    kind = read_json(folder / CONFIG).get("model_type")
    if kind not in HF_NAMES.names():
        return ()
    left_out = HF_NAMES[kind].left_out
    kinds = {"vision_config": ("vision", "image"), "audio_config": ("audio", "audio")}
    found = (kinds[key] for key in _parts_of(folder))
    return tuple(kind for modality, kind in found if modality not in left_out)


def _parts_of(folder: str | os.PathLike[str]) -> list[str]:
    config = without_thinker(read_json(Path(folder) / CONFIG))
    return [key for key in ("vision_config", "audio_config") if isinstance(config.get(key), dict)]


def open_hf_projector(path: str | os.PathLike[str], table: HfNames) -> HfProjector:
    """Open a folder's picture and sound parts by the names in ``table``. ``path``: the folder, or a
    file in it. Raises FileError and UnsupportedError as ``HfProjector`` does.
    """
    given = Path(os.path.expanduser(path))
    folder = given if given.is_dir() else given.parent
    weights = open_safetensors(given)
    try:
        return HfProjector(folder, table, weights)
    except BaseException:
        weights.close()
        raise
