"""Headers on disk: the metadata and tensors that a file's header has, without reading it again.

Metadata arrays stay in the model's file. Of an array of strings the lengths are stored, from which
their offsets follow.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import numpy as np

from treadle.base.fast_classes import dataclass
from treadle.files.mapping import MappedFile, map_file
from treadle.files.metadata import GGUFArray, Value, ValueType
from treadle.files.stored_entries import (
    all_sources,
    are_stored,
    identity,
    key_of,
    read_object,
    write_object,
)
from treadle.files.tensor import LateTensor, Tensor

if TYPE_CHECKING:
    from pathlib import Path

    from treadle.files.gguf_header import Header
    from treadle.files.tensor import Bytes

SUFFIX = ".header"
MOST_STRINGS = 1 << 21  # in all arrays of a header that is stored


@dataclass(frozen=True)
class StoredHeader:
    """A header without its file: see ``gguf_header.Header``.

    metadata: key, type, and the value, or an array's place (``_ArrayPlace``).
    tensors: name, shape, type, bytes and offset of each.
    coded: the types whose weights are integer codes (``Tensor.has_codes``).
    """

    version: int
    alignment: int
    metadata: list[tuple[str, int, Any]]
    tensors: list[tuple[str, tuple[int, ...], int, int, int]]
    coded: frozenset[int]


@dataclass(frozen=True)
class _ArrayPlace:
    """Place of an array in its file: byte offset ``start``, ``n`` elements.

    lengths: for strings, the numpy type and the bytes of an array [n] with the size of each string
    in the file, in bytes, length field included; None for numbers.
    """

    start: int
    n: int
    lengths: tuple[str, bytes] | None


class KnownHeader:
    """A header that an earlier process has read from the file; attributes as of ``Header``."""

    header_only = False  # others are not stored

    def __init__(self, path: Path, mapped: MappedFile, stored: StoredHeader) -> None:
        self.path = path
        self.map = mapped
        self.file: Bytes = np.frombuffer(mapped, np.uint8)
        self.version = stored.version
        self.alignment = stored.alignment
        self.metadata, self.types = metadata_of(stored, self.file)
        self.tensors = tensors_of(stored, path, self.file)


def open_header(path: Path) -> Header | KnownHeader:
    """Map a GGUF file and return its header: stored by an earlier process, or read and then
    stored. Raises the errors of ``Header``.
    """
    mapped = map_file(path, "a GGUF file")
    key = header_key(mapped)
    found = None if key is None else read_header(key)
    if found is not None:
        return KnownHeader(path, mapped, found)
    from treadle.files.gguf_header import Header

    header = Header(path, mapped)
    if key is not None and not header.header_only:
        write_header(key, header)
    return header


def header_key(file: MappedFile) -> str | None:
    """Return the key of a file's header; None if headers are not stored, or the file changed."""
    if not are_stored() or (found := identity(file)) is None:
        return None
    return key_of(all_sources(), found)


def read_header(key: str) -> StoredHeader | None:
    """Return the header stored under ``key``; None if there is none, or it is damaged."""
    found: StoredHeader | None = read_object(key, SUFFIX)
    return found


def metadata_of(stored: StoredHeader, file: Bytes) -> tuple[dict[str, Value], dict[str, ValueType]]:
    """Return the metadata of a stored header, whose arrays are views of ``file``, and the value
    types, both by key.
    """
    metadata: dict[str, Value] = {}
    types: dict[str, ValueType] = {}
    for key, number, value in stored.metadata:
        types[key] = kind = ValueType(number)
        metadata[key] = _array(kind, file, value) if type(value) is _ArrayPlace else value
    return metadata, types


def _array(kind: ValueType, file: Bytes, place: _ArrayPlace) -> GGUFArray:
    heads = np.empty(0, np.int64)
    if place.lengths is not None:
        heads = np.empty(place.n + 1, np.int64)
        heads[0] = place.start
        np.cumsum(np.frombuffer(place.lengths[1], place.lengths[0]), out=heads[1:])
        heads[1:] += place.start
    return GGUFArray(kind, file, place.start, place.n, heads)


def tensors_of(stored: StoredHeader, path: Any, file: Bytes) -> dict[str, Tensor]:
    """Return a header's tensors by name, as views of ``file``, the mapped bytes of ``path``."""
    return {
        name: LateTensor.of(
            name=name,
            shape=shape,
            ggml_type=ggml_type,
            n_bytes=n_bytes,
            path=path,
            offset=offset,
            file=file,
            codes_known=ggml_type in stored.coded,
        )
        for name, shape, ggml_type, n_bytes, offset in stored.tensors
    }


def write_header(key: str, header: Header) -> None:
    """Store a header under ``key``, unless its arrays have more than ``MOST_STRINGS`` strings
    together.
    """
    metadata = header.metadata
    arrays = [value for value in metadata.values() if isinstance(value, GGUFArray)]
    if sum(len(each) for each in arrays if each.type is ValueType.STRING) > MOST_STRINGS:
        return
    kept = [
        (name, int(header.types[name]), _place(value) if isinstance(value, GGUFArray) else value)
        for name, value in metadata.items()
    ]
    tensors = header.tensors.values()
    described = [(t.name, t.shape, t.ggml_type, t.n_bytes, t.offset) for t in tensors]
    coded = frozenset(t.ggml_type for t in tensors if t.has_codes)
    stored = StoredHeader(header.version, header.alignment, kept, described, coded)
    write_object(key, SUFFIX, stored)


def _place(array: GGUFArray) -> _ArrayPlace:
    if array.type is not ValueType.STRING:
        return _ArrayPlace(array.start, len(array), None)
    lengths = np.diff(array.heads)
    kind = np.min_scalar_type(int(lengths.max(initial=0)))
    return _ArrayPlace(array.start, len(array), (kind.str, lengths.astype(kind).tobytes()))
