"""Writer of GGUF version 3, tensor by tensor, so that a converter holds one tensor at a time."""

from __future__ import annotations

import math
import os
import struct
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, NamedTuple, TypeAlias

import numpy as np
import numpy.typing as npt

from treadle.errors import FileError
from treadle.files.metadata import CODES, DTYPES, GGUFArray, ValueType
from treadle.files.target import check_room, check_target, new_file
from treadle.formats import FORMATS, Format, number_of, type_of

FLOAT32_MAX = float(np.finfo(np.float32).max)
MAX_NAME = 63  # bytes: ggml's limit, one less than the specification's

Buffer: TypeAlias = bytes | bytearray | memoryview | npt.NDArray[Any]
Data: TypeAlias = Buffer | Callable[[], Buffer]


class _Entry(NamedTuple):
    name: str
    shape: tuple[int, ...]
    ggml_type: int
    n_bytes: int
    data: Data


class GgufLayout(NamedTuple):
    """Layout of a file: ``header``, the bytes before the tensors, and each tensor's byte offset by
    name.
    """

    header: bytes
    offsets: dict[str, int]  # absolute
    n_bytes: int  # size of the file, with the padding of the last tensor
    alignment: int


class GGUFWriter:
    """Collects metadata and tensors, then writes them in the order in which they were added.

    ::

        writer = GGUFWriter("model.gguf")
        writer.add("general.architecture", "llama")
        writer.add_tensor("output.weight", (32000, 2048), "Q8_0", lambda: convert("output"))
        writer.write()

    Raises FileError if the file would be invalid, or if writing fails.
    """

    def __init__(self, path: str | os.PathLike[str], alignment: int = 32) -> None:
        self.path = Path(path)
        self._alignment = 32
        self._metadata: dict[str, bytes] = {}  # key -> type and value, as written
        self._tensors: dict[str, _Entry] = {}
        if alignment != 32:
            self.add("general.alignment", alignment)

    def add(self, key: str, value: Any, type: ValueType | None = None) -> None:
        """Add a metadata entry, or replace the entry of the same key. Raises FileError for a value
        that GGUF cannot hold.

        ``value``: bool, int, float, str, bytes (a string), a numpy scalar or 1-D array, a sequence,
        or a GGUFArray, which is copied unchanged. ``type`` is the value's type (for a sequence, its
        element type). By default a numpy value keeps its type; a Python float is FLOAT32 unless too
        large; an int is UINT32 (in a sequence INT32, as llama.cpp expects) unless it does not fit.
        """
        if key == "general.alignment":
            if not isinstance(value, int) or not 0 < value < 1 << 32 or value & (value - 1):
                raise self._error(f"is {value!r}", key, "a power of two")
            self._alignment = value
            type = ValueType.UINT32
        try:
            self._metadata[key] = _encode(value, type)
        except (TypeError, ValueError, OverflowError, struct.error) as e:
            raise self._error(f"cannot write {value!r:.80}: {e}", key) from e

    def add_tensor(
        self, name: str, shape: Sequence[int], fmt: Format | str | int, data: Data
    ) -> None:
        """Add a tensor: ``shape`` slowest dimension first, ``data`` in the format's byte layout.
        Raises FileError for a shape that is not whole blocks.

        ``fmt`` is a Format, its name, or a ggml type number (for types that treadle can copy but
        not read). ``data`` is an array or bytes, or a callable that returns these and is called
        once, while writing.
        """
        ggml_type = _ggml_type(fmt)
        kind = type_of(ggml_type)
        dims = tuple(int(dim) for dim in shape)
        k = dims[-1] if dims else 1
        if kind is None:
            raise self._error(f"ggml type {ggml_type}", name, "a ggml type")
        if name in self._tensors:
            raise self._error("added twice", name)
        if len(name.encode()) > MAX_NAME:
            raise self._error("too long a name", name, f"at most {MAX_NAME} bytes")
        if len(dims) > 4 or any(dim < 0 for dim in dims) or k % kind.block:
            raise self._error(f"shape {dims} in {kind.name}", name, f"blocks of {kind.block}")
        n_bytes = kind.tensor_bytes(dims)
        self._tensors[name] = _Entry(name, dims, ggml_type, n_bytes, data)

    def write(self) -> None:
        """Write the file to a temporary path, then rename it: a reader never sees a part of it. An
        existing file is replaced.
        """
        check_target(self.path, force=True)
        layout = self.layout()
        check_room(self.path, layout.n_bytes)
        with new_file(self.path, layout.n_bytes) as f:
            f.write(layout.header)
            for entry in self._tensors.values():
                f.write(self._bytes_of(entry))
                f.write(bytes(-f.tell() % self._alignment))

    def layout(self) -> GgufLayout:
        """Return the layout that ``write`` uses, for callers that write the tensors themselves."""
        header = self._header()
        if self._tensors:
            header += bytes(-len(header) % self._alignment)
        offsets = {}
        end = len(header)
        for entry in self._tensors.values():
            offsets[entry.name] = end
            end += -(-entry.n_bytes // self._alignment) * self._alignment
        return GgufLayout(header, offsets, end, self._alignment)

    def _header(self) -> bytes:
        out = bytearray(b"GGUF")
        out += struct.pack("<IQQ", 3, len(self._tensors), len(self._metadata))
        for key, value in self._metadata.items():
            out += _string(key) + value
        offset = 0
        for entry in self._tensors.values():
            out += _string(entry.name) + struct.pack("<I", len(entry.shape))
            out += struct.pack(f"<{len(entry.shape)}Q", *reversed(entry.shape))
            out += struct.pack("<IQ", entry.ggml_type, offset)
            offset += -(-entry.n_bytes // self._alignment) * self._alignment
        return bytes(out)

    def _bytes_of(self, entry: _Entry) -> bytes | bytearray | memoryview:
        data = entry.data() if callable(entry.data) else entry.data
        if isinstance(data, np.ndarray):
            own = FORMATS[entry.ggml_type].dtype if entry.ggml_type in FORMATS else np.uint8
            if data.dtype not in (np.uint8, own):  # such as weights that are not yet quantised
                raise self._error(f"data of {data.dtype}", entry.name, f"{own} or uint8")
            data = np.ascontiguousarray(data).reshape(-1).view(np.uint8).data
        if len(data) != entry.n_bytes:
            raise self._error(f"{len(data)} bytes of data", entry.name, f"{entry.n_bytes} bytes")
        return data

    def _error(self, message: str, where: str, expected: str | None = None) -> FileError:
        return FileError(message, path=self.path, where=where, expected=expected)


def _ggml_type(fmt: Format | str | int) -> int:
    """Return the ggml type number of a format, a name or a number (unchanged); -1 for an unknown
    name.
    """
    if isinstance(fmt, Format):
        return fmt.ggml_id
    if isinstance(fmt, int):
        return fmt
    return number_of(fmt)


# -- values ---------------------------------------------------------------------------------

_BY_DTYPE = {(dtype.kind, dtype.itemsize): type for type, dtype in DTYPES.items()}


def _string(text: Any) -> bytes:
    if not isinstance(text, (str, bytes)):
        raise TypeError(f"{text!r:.40} is not a string")
    raw = text.encode("utf-8", "surrogateescape") if isinstance(text, str) else text
    return struct.pack("<Q", len(raw)) + raw


def _encode(value: Any, type: ValueType | None) -> bytes:
    """Return a value as stored in a file: its type number, then its bytes. ``type`` is the value's
    type, or the element type of a sequence; None: inferred from the value.
    """
    if isinstance(value, GGUFArray):
        return _array(value.type, len(value), value.payload.tobytes())
    one = isinstance(value, (str, bytes, int, float, np.generic))
    if not one and not isinstance(value, (Sequence, np.ndarray)):
        raise TypeError("neither a scalar nor a sequence")
    items: Sequence[Any] | npt.NDArray[Any] = [value] if one else value
    if type is ValueType.ARRAY:
        raise ValueError("pass the element type as the type of an array")
    if type is None:
        type = _infer(items, one)
    if isinstance(items, np.ndarray):
        if items.ndim != 1:
            raise ValueError("an array of more than one dimension")
        if items.dtype == DTYPES.get(type):
            return _array(type, len(items), items.astype(DTYPES[type]).tobytes())
        items = items.tolist()
    if type is ValueType.STRING:
        raw = b"".join(_string(item) for item in items)
    else:
        raw = struct.pack(f"<{len(items)}{CODES[type]}", *items)
    return struct.pack("<I", type) + raw if one else _array(type, len(items), raw)


def _array(type: ValueType, n: int, raw: bytes) -> bytes:
    return struct.pack("<IIQ", ValueType.ARRAY, type, n) + raw


def _infer(items: Sequence[Any] | npt.NDArray[Any], one: bool) -> ValueType:
    """Return the GGUF type that holds all ``items``: the elements of a sequence or, if ``one``, a
    single value. Raises ValueError or TypeError if there is none.
    """
    dtype = getattr(items[0] if one else items, "dtype", None)
    if dtype is not None and (dtype.kind, dtype.itemsize) in _BY_DTYPE:
        return _BY_DTYPE[dtype.kind, dtype.itemsize]
    if len(items) == 0:
        raise ValueError("an empty array needs a type")
    items = [item.item() if isinstance(item, np.generic) else item for item in items]
    if all(isinstance(item, (str, bytes)) for item in items):
        return ValueType.STRING
    if all(isinstance(item, bool) for item in items):
        return ValueType.BOOL
    if all(isinstance(item, int) for item in items):
        lo = min(items)
        hi = max(items)
        order = [ValueType.INT32, ValueType.UINT32, ValueType.INT64, ValueType.UINT64]
        if one and lo >= 0:
            order = [ValueType.UINT32, ValueType.UINT64]
        for type in order:
            limits = np.iinfo(DTYPES[type])
            if limits.min <= lo and hi <= limits.max:
                return type
        raise ValueError("exceeds 64 bits")
    if not all(isinstance(item, (int, float)) for item in items):
        raise TypeError("no single type fits")
    large = any(FLOAT32_MAX < abs(item) < math.inf for item in items)
    return ValueType.FLOAT64 if large else ValueType.FLOAT32
