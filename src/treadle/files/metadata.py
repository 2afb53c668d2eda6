"""A model's metadata: value types of GGUF, lazy arrays that stay in the mapped file until accessed,
and typed, range-checked access to keys, with errors that name the key.
"""

from __future__ import annotations

import enum
import itertools
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, NoReturn, overload

import numpy as np

from treadle.errors import FileError, UnsupportedError

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


SIZE_MAX = 1 << 24  # bound on any width: far above real models, far below overflow
POSITION_MAX = 1 << 31  # tokens


class MetadataReader:
    """Typed access to ``values``, the metadata of the GGUF or JSON file ``path``. Errors name the
    file and the full key.

    A key that is absent or None (JSON's null) takes its value from ``defaults``, else from the
    call's ``default``. If there is none either, or the value has another type or is out of range,
    FileError is raised. ``missing``: the error's text for a key without a value. ``prefix`` is
    prepended to keys in errors only.
    """

    def __init__(
        self,
        values: Mapping[str, Any],
        path: Path,
        defaults: Mapping[str, Any] | None = None,
        prefix: str = "",
        missing: str = "is missing",
    ) -> None:
        self.values = values
        self.path = path
        self.defaults = defaults or {}
        self.prefix = prefix
        self.missing = missing

    def error(self, key: str, found: str, expected: str | None = None) -> FileError:
        """Return a FileError about ``key``; ``found`` and ``expected`` are clauses for the
        message.
        """
        return FileError(found, path=self.path, where=self.prefix + key, expected=expected)

    def fail(self, key: str, found: str, expected: str | None = None) -> NoReturn:
        """Raise the FileError that ``error`` returns for these arguments."""
        raise self.error(key, found, expected)

    def refuse(self, key: str, why: str) -> NoReturn:
        """Raise UnsupportedError about ``key``: its value is valid, but not supported, because of
        ``why``.
        """
        raise UnsupportedError(f"{self.path}: {self.prefix}{key}: {why}")

    def has(self, key: str) -> bool:
        """Return whether the file itself has the key, even as null; defaults do not count."""
        return key in self.values

    def get(self, key: str) -> Any:
        """Return the value or its default, of any type; None if there is neither."""
        value = self.values.get(key)
        return self.defaults.get(key) if value is None else value

    def integer(
        self, key: str, default: int | None = None, *, lo: int = 1, hi: int = SIZE_MAX
    ) -> int:
        """Return the integer ``key``. Raises FileError unless it is from ``lo`` to ``hi``."""
        value: int = self._read(key, default, int, f"an integer from {lo} to {hi}", lo, hi)
        return value

    def number(
        self, key: str, default: float | None = None, *, lo: float, hi: float = 1e12
    ) -> float:
        """Return the number ``key`` as a float. Raises FileError unless it is from ``lo`` to
        ``hi``.
        """
        expected = f"a number from {lo:g} to {hi:g}"
        return float(self._read(key, default, (int, float), expected, lo, hi))

    def flag(self, key: str, default: bool) -> bool:
        """Return the boolean ``key``. Raises FileError for a value of another type."""
        value: bool = self._read(key, default, bool, "true or false")
        return value

    def text(self, key: str, default: str | None = None) -> str:
        """Return the string ``key``. Raises FileError for a value of another type."""
        value: str = self._read(key, default, str, "a string")
        return value

    def within(self, key: str) -> MetadataReader | None:
        """Return a reader of the nested object ``key``, without defaults; None if it is absent or
        null.
        """
        if self.get(key) is None:
            return None
        value = self._read(key, None, dict, "an object")
        return MetadataReader(value, self.path, prefix=f"{self.prefix}{key}.")

    def _read(
        self,
        key: str,
        default: Any,
        kinds: type | tuple[type, ...],
        expected: str,
        lo: float = 0,
        hi: float | None = None,  # None: no range
    ) -> Any:
        value = self.get(key)
        value = default if value is None else value
        sound = isinstance(value, kinds) and (kinds is bool or not isinstance(value, bool))
        if not sound or (hi is not None and not lo <= value <= hi):  # NaN fails this as well
            self.fail(key, self.missing if value is None else f"is {value!r:.60}", expected)
        return value
