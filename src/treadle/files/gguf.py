"""Reader of GGUF models: one file, or all shards of a split model."""

from __future__ import annotations

import os
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from treadle.errors import FileError, TreadleError
from treadle.files.mapping import MappedFile, Mappings
from treadle.files.metadata import GGUFArray, Value, ValueType
from treadle.files.tensor import Tensor

if TYPE_CHECKING:
    from treadle.files.gguf_header import Header
    from treadle.files.gguf_writer import GGUFWriter as GGUFWriter
    from treadle.files.stored_header import KnownHeader

__all__ = ["GGUF", "GGUFArray", "GGUFWriter", "Tensor", "Value", "ValueType", "open_gguf"]


def __getattr__(name: str) -> Any:
    if name == "GGUFWriter":  # only programs that write files import it
        from treadle.files.gguf_writer import GGUFWriter

        return GGUFWriter
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")


class GGUF:
    """An open GGUF model: metadata of the first shard, tensors of all shards, mapped read-only.

    ``header_only`` is true if a file ends after its header; ``Tensor.data`` then raises FileError.
    """

    closed = False

    def __init__(self, headers: Sequence[Header | KnownHeader]) -> None:
        first = headers[0]
        self.path: Path = first.path
        self.paths: list[Path] = [header.path for header in headers]
        self.version: int = first.version
        self.alignment: int = first.alignment
        self.n_bytes: int = sum(len(header.file) for header in headers)  # of all files
        self.header_only: bool = any(header.header_only for header in headers)
        self.metadata: Mapping[str, Value] = first.metadata
        self.types: Mapping[str, ValueType] = first.types  # for an array, its element type
        self.tensors: dict[str, Tensor] = {}
        for header in headers:
            for name, tensor in header.tensors.items():
                if name in self.tensors:
                    what = f"is in {self.tensors[name].path.name} as well"
                    raise tensor.error(what, "each tensor in one shard")
                self.tensors[name] = tensor
        self._files = [header.file for header in headers]
        self._maps = Mappings(header.map for header in headers)

    @property
    def is_in_place(self) -> bool:
        """Whether every tensor lies in the files; false if some were replaced in memory."""
        files = {id(file) for file in self._files}
        return all(id(tensor.file) in files for tensor in self.tensors.values())

    @property
    def mapped_files(self) -> Sequence[MappedFile]:
        """The files' mappings; none once the model is closed."""
        return self._maps.files

    def check(self, *, now: bool = False) -> None:
        """Raise FileError if a file shrank or was written to since it was opened; TreadleError if
        the model is closed.

        Call it after reading: reads of a changed file return zeros or foreign bytes. Writes are
        detected by ``os.stat``, at most once a second unless ``now``.
        """
        if self.closed:
            raise TreadleError("the model is closed")
        self._maps.check(now=now)

    def close(self) -> None:
        """Close the files. A file stays mapped until the last view of it is dropped."""
        self.metadata = {}
        self.tensors = {}
        self.closed = True
        self._files = []
        self._maps.close()

    def __enter__(self) -> GGUF:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def __repr__(self) -> str:
        return f"GGUF({str(self.path)!r}, {len(self.tensors)} tensors, {self.n_bytes} bytes)"


def open_gguf(path: str | os.PathLike[str], *, stored: bool = False) -> GGUF:
    """Open a GGUF model of version 2 or 3, with all its shards if it is split.

    ``path`` is a file, a first shard, the common stem of the shards, or a folder with one model.
    ``stored``: take headers that an earlier process has stored (``stored_header.py``) in place of
    reading them; store those that are not there. Raises FileError (damaged, or not GGUF) and
    UnsupportedError (version 1, big-endian, a type that ggml removed).
    """
    first = _open_header(_model_file(path), stored)
    count = _integer(first, "split.count", 1)
    if count <= 1:
        return GGUF([first])
    no = _integer(first, "split.no", 0)
    if no != 0:
        from treadle.files.splits import shard_path

        start = shard_path(first.path, 0, count)
        hint = str(start) if start else "the shard whose split.no is 0"
        raise FileError(f"is shard {no + 1} of {count}", path=first.path, expected=hint)
    headers = [first, *(_open_shard(first.path, i, count, stored) for i in range(1, count))]
    found = sum(len(header.tensors) for header in headers)
    expected = _integer(first, "split.tensors.count", found)
    if found != expected:
        raise FileError(
            f"the {count} shards hold {found} tensors",
            path=first.path,
            where="split.tensors.count",
            expected=str(expected),
        )
    return GGUF(headers)


def _open_shard(first: Path, no: int, count: int, stored: bool) -> Header | KnownHeader:
    from treadle.files.splits import shard_path

    path = shard_path(first, no, count)
    if path is None:
        raise FileError(
            f"is the first of {count} shards, but the others cannot be found from its name",
            path=first,
            expected=f"a name ending in -00001-of-{count:05d}.gguf",
        )
    header = _open_header(path, stored)
    says = _integer(header, "split.no", 0), _integer(header, "split.count", 1)
    if says != (no, count):
        raise FileError(
            f"says it is shard {says[0] + 1} of {says[1]}",
            path=path,
            where="split.no",
            expected=f"shard {no + 1} of {count}",
        )
    return header


def _model_file(path: str | os.PathLike[str]) -> Path:
    """Return the file to open for ``path``: itself, or what ``splits.model_inside`` finds, with its
    errors.
    """
    given = Path(os.path.expanduser(path))
    if given.is_file() and os.fspath(path):
        return given
    from treadle.files.splits import model_inside

    return model_inside(path)


def _open_header(path: Path, stored: bool) -> Header | KnownHeader:
    """Return a file's header; ``stored``: as of ``open_gguf``. A stored header needs no parser."""
    if stored:
        from treadle.files.stored_header import open_header

        return open_header(path)
    from treadle.files.gguf_header import Header

    return Header(path)


def _integer(header: Header | KnownHeader, key: str, default: int) -> int:
    """Return the metadata value ``key``, or ``default``. Raises FileError unless it is an
    integer from 0 to 2**31 - 1.
    """
    value = header.metadata.get(key, default)
    if type(value) is not int or not 0 <= value < 1 << 31:
        expected = "an integer below 2**31"
        raise FileError(f"is {value!r}", path=header.path, where=key, expected=expected)
    return value
