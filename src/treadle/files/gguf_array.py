"""Value types of GGUF metadata, and lazy arrays that stay in the mapped file until accessed."""

from __future__ import annotations

import enum
import itertools
from collections.abc import Iterator, Sequence
from typing import TYPE_CHECKING, Any, overload

import numpy as np

if TYPE_CHECKING:
    import numpy.typing as npt

    from treadle.files.gguf_strings import Bytes, Offsets


class ValueType(enum.IntEnum):
    """GGUF's type numbers of metadata values."""

    UINT8 = 0
    INT8 = 1
    UINT16 = 2
    INT16 = 3
    UINT32 = 4
    INT32 = 5
    FLOAT32 = 6
    BOOL = 7
    STRING = 8
    ARRAY = 9
    UINT64 = 10
    INT64 = 11
    FLOAT64 = 12


# Format characters of ``struct``, which raises for values that do not fit.
CODES = {
    ValueType.UINT8: "B",
    ValueType.INT8: "b",
    ValueType.UINT16: "H",
    ValueType.INT16: "h",
    ValueType.UINT32: "I",
    ValueType.INT32: "i",
    ValueType.FLOAT32: "f",
    ValueType.BOOL: "?",
    ValueType.UINT64: "Q",
    ValueType.INT64: "q",
    ValueType.FLOAT64: "d",
}
# ``.str`` normalises to a type named by width: numpy has several types of 8 bytes.
DTYPES = {kind: np.dtype(np.dtype(f"<{code}").str) for kind, code in CODES.items()}

Scalar = bool | int | float | str


def decode(raw: bytes) -> str:
    """Decode UTF-8; invalid bytes become lone surrogates, so decoding is lossless."""
    return raw.decode("utf-8", "surrogateescape")


class GGUFArray(Sequence[Scalar]):
    """A metadata array: a view of the mapped file, converted to Python objects on access.

    ``type`` is the element type. For numbers use ``numpy()``; for strings use ``raw(i)`` to get
    bytes, or ``offsets()`` with ``buffer`` to process all strings at once.
    """

    def __init__(self, type: ValueType, buffer: Bytes, start: int, n: int, heads: Offsets) -> None:
        """Wrap ``n`` elements of ``type`` at byte ``start`` of ``buffer``.

        ``heads`` int64 [n + 1] has the offset of each string's length field and the end of the last
        string; it is empty for numeric arrays.
        """
        self.type = type
        self.buffer = buffer  # uint8 of the whole file, read-only; offsets() are relative to it
        self.start = start
        self._n = n
        self.heads = heads

    def __len__(self) -> int:
        return self._n

    @property
    def payload(self) -> Bytes:
        """The elements' bytes as stored in the file, uint8, zero copy."""
        if self.type is ValueType.STRING:
            return self.buffer[self.start : int(self.heads[-1])]
        return self.buffer[self.start : self.start + self._n * DTYPES[self.type].itemsize]

    def numpy(self) -> npt.NDArray[Any]:
        """Return the elements, [n] in their type, read-only and zero copy (except bools). Raises
        TypeError for strings.
        """
        if self.type is ValueType.STRING:
            raise TypeError("an array of strings has no numpy(): use offsets() and buffer")
        array: npt.NDArray[Any] = self.payload.view(DTYPES[self.type])
        if self.type is ValueType.BOOL:
            array = self.payload.astype(np.bool_)  # a byte of 2 is true, but not a valid numpy bool
        return array

    def offsets(self) -> tuple[Offsets, Offsets]:
        """Return each string's byte offset in ``buffer`` and its length in bytes, both
        int64 [n].
        """
        if self.type is not ValueType.STRING:
            raise TypeError("only an array of strings has offsets()")
        return self.heads[:-1] + 8, np.diff(self.heads) - 8

    def raw(self, i: int) -> bytes:
        """Return the bytes of string ``i``, which need not be UTF-8."""
        if self.type is not ValueType.STRING:
            raise TypeError("only an array of strings has raw()")
        i = range(self._n)[i]
        return bytes(self.buffer[int(self.heads[i]) + 8 : int(self.heads[i + 1])].data)

    def raws(self, indices: Sequence[int] | None = None) -> list[bytes]:
        """Return the bytes of all strings, or of those at ``indices``; they need not be UTF-8."""
        if self.type is not ValueType.STRING:
            raise TypeError("only an array of strings has raws()")
        if indices is None:
            payload = self.payload.tobytes()
            heads = (self.heads - self.start).tolist()
            return [payload[a + 8 : b] for a, b in itertools.pairwise(heads)]
        wanted = np.asarray(indices, np.int64)
        starts = (self.heads[wanted] + 8).tolist()
        ends = self.heads[wanted + 1].tolist()
        data = self.buffer.data
        return [data[a:b].tobytes() for a, b in zip(starts, ends, strict=True)]

    @overload
    def __getitem__(self, i: int) -> Scalar: ...
    @overload
    def __getitem__(self, i: slice) -> list[Scalar]: ...
    def __getitem__(self, i: int | slice) -> Scalar | list[Scalar]:
        if isinstance(i, slice):
            return [self[j] for j in range(*i.indices(self._n))]
        if self.type is ValueType.STRING:
            return decode(self.raw(i))
        value: Scalar = self.numpy()[i].item()
        return value

    def __iter__(self) -> Iterator[Scalar]:
        if self.type is not ValueType.STRING:
            return iter(self.numpy().tolist())
        # a list: a vocabulary of 262,144 takes 55 ms this way, three times that one by one
        return iter(list(map(decode, self.raws())))

    def __repr__(self) -> str:
        return f"GGUFArray({self.type.name}, {self._n})"


Value = Scalar | GGUFArray


def string_array(strings: Sequence[bytes]) -> GGUFArray:
    """Build an in-memory GGUFArray of strings."""
    heads = np.cumsum([0, *(len(s) + 8 for s in strings)], dtype=np.int64)
    payload = b"".join(len(s).to_bytes(8, "little") + s for s in strings)
    buffer = np.frombuffer(payload, np.uint8)
    return GGUFArray(ValueType.STRING, buffer, 0, len(strings), heads)


def number_array(type: ValueType, numbers: Sequence[float]) -> GGUFArray:
    """Build an in-memory GGUFArray of numbers in ``type``."""
    buffer = np.array(numbers, DTYPES[type]).view(np.uint8)
    return GGUFArray(type, buffer, 0, len(numbers), np.empty(0, np.int64))
