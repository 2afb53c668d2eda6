"""Reader of safetensors: one file, or the shards that an index names; mapped, never copied.

::

    n:u64  header: JSON [n bytes]  data
    header: {"name": {"dtype": "BF16", "shape": [..], "data_offsets": [begin, end]}, ..}

Offsets count from the end of the header. As the format requires, files with gaps or overlaps in
the data are refused. Tensors need not be aligned.
"""

from __future__ import annotations

import json
import math
import os
from dataclasses import field
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from treadle.base.fast_classes import dataclass
from treadle.errors import FileError
from treadle.files.mapping import Mappings
from treadle.files.mistaken import N_HEAD, describe_file
from treadle.files.reader import MappedReader, read_head
from treadle.files.splits import INDEX, SINGLE
from treadle.files.tensor import TensorData

Bytes = npt.NDArray[np.uint8]

MAX_HEADER = 100_000_000  # bytes; the reference implementation's limit
MAX_JSON = 256 << 20  # bytes of any other JSON file of a model
MAX_ELEMENTS = (1 << 63) - 1
MAX_DIMS = 64  # far above any real tensor: bounds the work that a shape can cause

DTYPES = {  # bits per element
    **dict.fromkeys(("BOOL", "U8", "I8", "F8_E5M2", "F8_E4M3", "F8_E8M0"), 8),
    **dict.fromkeys(("I16", "U16", "F16", "BF16"), 16),
    **dict.fromkeys(("I32", "U32", "F32"), 32),
    **dict.fromkeys(("I64", "U64", "F64", "C64"), 64),
    **{"F4": 4, "F6_E2M3": 6, "F6_E3M2": 6},
}


@dataclass(frozen=True, eq=False)
class SafeTensor(TensorData):
    """One tensor of a file; its pages are read on first access to ``data``."""

    name: str
    dtype: str  # a key of DTYPES
    shape: tuple[int, ...]  # slowest dimension first
    n_bytes: int
    path: Path
    offset: int
    file: Bytes = field(repr=False)


class SafeTensors:
    """The tensors of one model, from a single file or from all shards of an index.

    ``metadata`` is ``__metadata__`` of the first file; ``n_bytes`` counts whole files.
    """

    def __init__(self, path: Path, files: list[_File]) -> None:
        self.path = path
        self.paths = [file.path for file in files]
        self.n_bytes = sum(len(file.file) for file in files)
        self.metadata = files[0].metadata if files else {}
        self.tensors: dict[str, SafeTensor] = {}
        for file in files:
            for name, tensor in file.tensors.items():
                if name in self.tensors:
                    what = f"is in {self.tensors[name].path.name} as well"
                    raise tensor.error(what, "each tensor in one file")
                self.tensors[name] = tensor
        self.maps = Mappings(file.map for file in files)

    def join(self, other: SafeTensors) -> None:
        """Take over the files of ``other``: closing this object closes them too. The tensors of
        ``other`` are not added.
        """
        self.paths += other.paths
        self.n_bytes += other.n_bytes
        self.maps.files += other.maps.files

    def close(self) -> None:
        """Close the files. A file stays mapped until the last view of it is dropped."""
        self.tensors = {}
        self.maps.close()

    def __enter__(self) -> SafeTensors:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()


def open_safetensors(path: str | os.PathLike[str]) -> SafeTensors:
    """Open a .safetensors file, an index of shards, or a folder with either.

    Raises FileError if a file is damaged, missing or invalid, or a tensor is in two files.
    """
    given = Path(path)
    found = find_weights(given) if given.is_dir() else given
    if found is None:
        raise FileError("is a folder without weights", path=given, expected=f"{SINGLE} or {INDEX}")
    if found.suffix != ".json":
        return open_file(found)
    return _open_shards(found)


def open_file(path: Path) -> SafeTensors:
    """Open one safetensors file of any name. Raises FileError."""
    return SafeTensors(path, [_File(path)])


def find_weights(folder: Path) -> Path | None:
    """Return ``model.safetensors``, else the index, else the only .safetensors file, else None.
    Raises FileError for several files without an index.
    """
    for name in (SINGLE, INDEX):
        if os.path.lexists(folder / name):  # a dangling link is reported later, not skipped
            return folder / name
    others = sorted(folder.glob("*.safetensors"))
    if len(others) <= 1:
        return others[0] if others else None
    names = ", ".join(other.name for other in others[:4]) + (", ..." if len(others) > 4 else "")
    what = f"has {len(others)} weight files ({names}) but no index file"
    raise FileError(what, path=folder, expected=INDEX)


def _open_shards(index: Path) -> SafeTensors:
    weight_map = read_json(index).get("weight_map")
    if not isinstance(weight_map, dict) or not weight_map:
        raise FileError("is missing or empty", path=index, where="weight_map", expected="an object")
    shards: dict[str, None] = {}  # in order
    for name, shard in weight_map.items():
        shards[_shard_name(index, name, shard)] = None
    model = SafeTensors(index, [_File(index.parent / shard) for shard in shards])
    for name, shard in weight_map.items():
        if name not in model.tensors:
            what = f"is missing, but {index.name} lists it here"
            raise FileError(what, path=index.parent / shard, where=name)
        if model.tensors[name].path.name != shard:
            what = f"is in {model.tensors[name].path.name}"
            raise FileError(what, path=index, where=name, expected=f"{shard}, as listed")
    for name, tensor in model.tensors.items():
        if name not in weight_map:
            what = f"is not in {index.name}"
            raise tensor.error(what, "an entry for each tensor")
    return model


def _shard_name(index: Path, name: str, shard: Any) -> str:
    """Return ``shard``, the file that ``index`` gives for the tensor ``name``. Raises FileError
    unless it is a file name in the index's folder.
    """
    if (
        not isinstance(shard, str)
        or shard in ("", ".", "..")
        or any(c in shard for c in "/\\:\0")
        or not shard.endswith(".safetensors")
    ):
        raise FileError(
            f"is listed in {shard!r:.200}",
            path=index,
            where=name,
            expected="the name of a .safetensors file in the same folder",
        )
    return shard


def read_json(path: Path) -> dict[str, Any]:
    """Return the object in a JSON file. Raises FileError if it is invalid or above MAX_JSON
    bytes.
    """
    if os.path.exists(path) and not os.path.isfile(path):
        raise FileError("not a regular file", path=path, expected="a JSON file")
    raw = read_head(path, MAX_JSON + 1, "a JSON file")
    if len(raw) > MAX_JSON:
        raise FileError("too large", path=path, expected=f"at most {MAX_JSON} bytes of JSON")
    return parse_json(raw, path)


def parse_json(raw: bytes, path: Path, offset: int = 0) -> dict[str, Any]:
    """Return the JSON object ``raw``, which is at byte ``offset`` of ``path``. Raises FileError if
    it is no JSON object.
    """

    def unique(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
        result = dict(pairs)
        if len(result) != len(pairs):
            seen: set[str] = set()
            for key, _ in pairs:
                if key in seen:
                    raise FileError(f"{key!r:.200} appears twice", path=path, offset=offset)
                seen.add(key)
        return result

    try:
        value = json.loads(raw.decode("utf-8"), object_pairs_hook=unique)
    except (ValueError, RecursionError) as e:  # not JSON, not UTF-8, or nested without end
        at = offset + getattr(e, "pos", getattr(e, "start", 0))
        begun = raw[:N_HEAD].lstrip()[:1] in (b"{", b"[")  # it is JSON, with an error further on
        mistaken = None if offset or begun else describe_file(raw[:N_HEAD])
        what = f"is not JSON: {mistaken or e}"
        raise FileError(what, path=path, offset=at, expected="a JSON object") from None
    if not isinstance(value, dict):
        what = f"is a JSON {type(value).__name__}"
        raise FileError(what, path=path, offset=offset, expected="a JSON object")
    return value


class _File(MappedReader):
    """One mapped safetensors file; each tensor's description is checked against its size."""

    def __init__(self, path: Path) -> None:
        super().__init__(path, "a safetensors file")
        size = len(self.file)
        if size < 8:
            raise self.error(f"cut short: {size} bytes", 0, expected="8 bytes of length")
        n = int.from_bytes(self.map[:8], "little")
        if self.map[8:9] != b"{" and (what := describe_file(self.map[:N_HEAD])):
            raise self.error(f"not a safetensors file: {what}", 0)
        if n > MAX_HEADER:
            raise self.error(f"a header of {n} bytes", 0, expected=f"at most {MAX_HEADER}")
        if n > size - 8:
            raise self.error(f"cut short: the header has {n} bytes, but {size - 8} are left", 0)
        raw = self.map[8 : 8 + n]
        if raw[:1] != b"{":
            raise self.error(f"a header that begins with {raw[:1]!r}", 8, expected="'{'")
        header = parse_json(raw, path, 8)
        self.metadata = self._read_metadata(header.pop("__metadata__", {}))
        self._start = 8 + n
        self.tensors = {name: self._read(name, entry) for name, entry in header.items()}
        self._check_layout()

    def _read_metadata(self, value: Any) -> dict[str, str]:
        if not isinstance(value, dict) or not all(isinstance(v, str) for v in value.values()):
            raise self.error("is something else", 8, "__metadata__", "strings by name")
        return value

    def _read(self, name: str, entry: Any) -> SafeTensor:
        if not name.isprintable():  # lone surrogates included, which terminals cannot print
            raise self.error(f"a tensor called {name!r:.200}", 8, expected="a printable name")
        if not isinstance(entry, dict) or entry.keys() != {"dtype", "shape", "data_offsets"}:
            found = sorted(entry) if isinstance(entry, dict) else entry
            what = f"is described by {found!r:.100}"
            raise self.error(what, 8, name, "dtype, shape and data_offsets")
        dtype = entry["dtype"]
        shape = entry["shape"]
        offsets = entry["data_offsets"]
        if not isinstance(dtype, str) or dtype not in DTYPES:
            raise self.error(f"dtype {dtype!r:.60}", 8, name, f"one of {', '.join(DTYPES)}")
        if not _are_sizes(shape) or len(shape) > MAX_DIMS:
            raise self.error(f"shape {shape!r:.100}", 8, name, "a list of sizes")
        if not _are_sizes(offsets) or len(offsets) != 2:
            raise self.error(f"data_offsets {offsets!r:.100}", 8, name, "[begin, end]")
        begin, end = offsets
        bits = math.prod(shape) * DTYPES[dtype]
        if bits % 8 or bits // 8 != end - begin:
            what = f"data_offsets {offsets!r:.100} for shape {shape!r:.100} of {dtype}"
            raise self.error(what, 8, name, f"{bits // 8} bytes" if bits % 8 == 0 else "bytes")
        room = len(self.file) - self._start
        if end > room:
            what = f"cut short: the data end at {self._start + room}"
            raise self.error(what, self._start + min(begin, room), name, str(self._start + end))
        at = self._start + begin
        return SafeTensor(name, dtype, tuple(shape), end - begin, self.path, at, self.file)

    def _check_layout(self) -> None:
        """Raise FileError if tensors overlap or leave gaps."""
        end = self._start
        before = "the header"
        for tensor in sorted(self.tensors.values(), key=lambda t: (t.offset, t.n_bytes)):
            if tensor.offset != end:
                how = "lies inside" if tensor.offset < end else "leaves a gap after"
                what = f"data_offsets begin at {tensor.offset - self._start}, which {how} {before}"
                raise self.error(what, tensor.offset, tensor.name, str(end - self._start))
            end = tensor.offset + tensor.n_bytes
            before = tensor.name
        if end != len(self.file):
            what = f"{len(self.file) - end} bytes after the last tensor"
            raise self.error(what, end, expected="the end of the file")


def _are_sizes(value: Any) -> bool:
    return isinstance(value, list) and all(
        type(item) is int and 0 <= item <= MAX_ELEMENTS for item in value
    )
