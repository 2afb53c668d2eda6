"""Headers on disk: the metadata and tensors that a file's header has, without reading it again.

Metadata arrays stay in the model's file. Of an array of strings the lengths are stored, from which
their offsets follow.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import numpy as np

from treadle.base.fast_dataclass import dataclass
from treadle.files.gguf_array import GGUFArray, Value, ValueType
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
    from treadle.files.mapping import MappedFile
    from treadle.files.tensor import Bytes

SUFFIX = ".header"
MOST_STRINGS = 1 << 21  # in all arrays of a header that is stored


@dataclass(frozen=True)
class StoredHeader:
    """A header without its file: see ``gguf_header.Header``.

    metadata: key, type, and the value, or an array's place (``_ArrayPlace``).
    tensors: name, shape, type, bytes and offset of each.
    """

    version: int
    alignment: int
    metadata: list[tuple[str, int, Any]]
    tensors: list[tuple[str, tuple[int, ...], int, int, int]]


@dataclass(frozen=True)
class _ArrayPlace:
    """Place of an array in its file: byte offset ``start``, ``n`` elements.

    lengths: for strings, the numpy type and the bytes of an array [n] with the size of each string
    in the file, in bytes, length field included; None for numbers.
    """

    start: int
    n: int
    lengths: tuple[str, bytes] | None


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
        )
        for name, shape, ggml_type, n_bytes, offset in stored.tensors
    }


def write_header(
    key: str,
    version: int,
    alignment: int,
    metadata: dict[str, Value],
    types: dict[str, ValueType],
    tensors: dict[str, Tensor],
) -> None:
    """Store the given fields of a header under ``key``, unless its arrays have more than
    ``MOST_STRINGS`` strings together.
    """
    arrays = [value for value in metadata.values() if isinstance(value, GGUFArray)]
    if sum(len(each) for each in arrays if each.type is ValueType.STRING) > MOST_STRINGS:
        return
    kept = [
        (name, int(types[name]), _place(value) if isinstance(value, GGUFArray) else value)
        for name, value in metadata.items()
    ]
    described = [(t.name, t.shape, t.ggml_type, t.n_bytes, t.offset) for t in tensors.values()]
    write_object(key, SUFFIX, StoredHeader(version, alignment, kept, described))


def _place(array: GGUFArray) -> _ArrayPlace:
    if array.type is not ValueType.STRING:
        return _ArrayPlace(array.start, len(array), None)
    lengths = np.diff(array.heads)
    kind = np.min_scalar_type(int(lengths.max(initial=0)))
    return _ArrayPlace(array.start, len(array), (kind.str, lengths.astype(kind).tobytes()))
