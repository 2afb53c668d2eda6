"""The header of one GGUF file: parsed from the mapping, every field checked before it is used.

::

    "GGUF" version:u32 n_tensors:u64 n_kv:u64
    n_kv      x  key:string type:u32 value
    n_tensors x  name:string n_dims:u32 dims:u64[n_dims] type:u32 offset:u64
    padding to the alignment, then the tensors' bytes at their offsets

Every count, length and offset is held against what is left of the file before anything is
looped over or allocated by it.
"""

from __future__ import annotations

import math
import struct
from pathlib import Path
from typing import NamedTuple

import numpy as np

from treadle.errors import FileError, TreadleError, UnsupportedError
from treadle.files.gguf_array import DTYPES, GGUFArray, Value, ValueType, decode
from treadle.files.gguf_strings import Bytes, Offsets, StringTooLong, string_heads
from treadle.files.mapping import map_file
from treadle.files.mistaken import N_HEAD, what_is
from treadle.files.tensor import Tensor
from treadle.formats import FORMATS, REMOVED, GGMLType, type_of

MAX_ENTRIES = 1 << 16  # keys, or tensors: far beyond any model's, and Python objects each
MAX_KEY = (1 << 16) - 1  # bytes, by the specification
MAX_NAME = 64  # bytes of a tensor's name, by the specification
MAX_ELEMENTS = (1 << 63) - 1  # ggml counts in int64
LEGACY = {  # what else a model file may begin with
    b"FUGG": "a GGUF of before its release in August 2023; `treadle convert` makes a GGUF of it",
    b"tjgg": "a GGJT file, which GGUF replaced in 2023; `treadle convert` makes a GGUF of it",
    b"fmgg": "a GGMF file, which GGUF replaced in 2023; `treadle convert` makes a GGUF of it",
    b"lmgg": "a GGML file, which GGUF replaced in 2023; `treadle convert` makes a GGUF of it",
    b"PK\x03\x04": "a PyTorch checkpoint (or zip archive), not a GGUF file; convert it first",
}
GGMF_VERSION = b"\x01\0\0\0"  # llama.cpp's only one; others took the same letters
MIN_KV, MIN_INFO = 13, 24  # bytes of the smallest metadata entry and tensor description

_NO_HEADS: Offsets = np.empty(0, np.int64)


class _Info(NamedTuple):
    """A tensor's description, with ``at``, the byte where it begins."""

    at: int
    name: str
    shape: tuple[int, ...]
    ggml_type: int
    n_bytes: int
    offset: int  # from the start of the tensor data


class Header:
    """One file, mapped read-only: its metadata and tensors. FileError or UnsupportedError."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self.map = map_file(path, "a GGUF file")
        self.file: Bytes = np.frombuffer(self.map, np.uint8)
        self.metadata: dict[str, Value] = {}
        self.types: dict[str, ValueType] = {}  # of an array: its elements'
        self.header_only = False
        self._pos = 0
        n_tensors, n_kv = self._read_head()
        for _ in range(n_kv):
            self._read_kv()
        self.alignment = self._alignment()
        infos: dict[str, _Info] = {}
        for _ in range(n_tensors):
            info = self._read_info()
            if info.name in infos:
                raise self._error("appears twice", offset=info.at, where=info.name)
            infos[info.name] = info
        self.tensors = self._place(list(infos.values()))

    def integer(self, key: str, default: int) -> int:
        """A small non-negative integer of the metadata."""
        value = self.metadata.get(key, default)
        if type(value) is not int or not 0 <= value < 1 << 31:
            raise FileError(
                f"is {value!r}", path=self.path, where=key, expected="an integer below 2**31"
            )
        return value

    # -- the parts, in file order -------------------------------------------------------

    def _read_head(self) -> tuple[int, int]:
        what = what_is(self.map[:N_HEAD])
        magic = self._take(4, "magic") if what is None or len(self.file) >= 4 else b""
        if magic in LEGACY:
            if magic == b"fmgg" and bytes(self.file[4:8]) != GGMF_VERSION:
                raise UnsupportedError(
                    f"{self.path}: a GGMF file, but not llama.cpp's (rwkv.cpp's?)"
                )
            raise UnsupportedError(f"{self.path}: {LEGACY[magic]}")
        if magic != b"GGUF":
            if _is_llama2c(self.path, bytes(self.file[:256])):
                made = "`treadle convert` makes a GGUF of it"
                raise UnsupportedError(f"{self.path}: a llama2.c checkpoint; {made}")
            raise self._error(f"not a GGUF file: {what or f'it starts with {magic!r}'}", offset=0)
        self.version = self._u32("version")
        if self.version & 0xFFFF == 0:
            raise UnsupportedError(f"{self.path}: a big-endian GGUF, which treadle does not read")
        if self.version == 1:
            raise UnsupportedError(
                f"{self.path}: GGUF version 1, with 32-bit lengths, was given up in August 2023; "
                "`treadle convert` makes a GGUF of it"
            )
        if self.version not in (2, 3):
            raise UnsupportedError(f"{self.path}: GGUF version {self.version} (treadle reads 2, 3)")
        n_tensors = self._count("tensor count", MIN_INFO)
        n_kv = self._count("metadata count", MIN_KV)
        for n, what in ((n_tensors, "tensors"), (n_kv, "metadata keys")):
            if n > MAX_ENTRIES:
                raise UnsupportedError(f"{self.path}: {n} {what} (treadle takes {MAX_ENTRIES})")
        return n_tensors, n_kv

    def _read_kv(self) -> None:
        at = self._pos
        key = self._name("metadata key", MAX_KEY)
        if key in self.metadata:
            raise self._error("appears twice", offset=at, where=key)
        kind = self._value_type(key)
        if kind is ValueType.ARRAY:
            kind, self.metadata[key] = self._array(key)
        elif kind is ValueType.STRING:
            self.metadata[key] = decode(self._take(self._count(key, 1), key))
        elif kind is ValueType.BOOL:
            self.metadata[key] = self._take(1, key) != b"\0"
        else:
            raw = self._take(DTYPES[kind].itemsize, key)
            self.metadata[key] = np.frombuffer(raw, DTYPES[kind])[0].item()
        self.types[key] = kind

    def _array(self, key: str) -> tuple[ValueType, GGUFArray]:
        kind = self._value_type(key)
        if kind is ValueType.ARRAY:
            raise UnsupportedError(f"{self.path}: {key}: an array of arrays")
        n = self._count(key, 8 if kind is ValueType.STRING else DTYPES[kind].itemsize)
        start = self._pos
        if kind is not ValueType.STRING:
            self._pos += n * DTYPES[kind].itemsize
            return kind, GGUFArray(kind, self.file, start, n, _NO_HEADS)
        try:
            heads = string_heads(self.file, start, n)
        except StringTooLong as e:
            raise self._error(
                f"string {e.index} of {n} does not end within the file",
                offset=e.offset,
                where=key,
                expected=f"at most {len(self.file) - e.offset} bytes with its length",
            ) from None
        self._pos = int(heads[-1])
        return kind, GGUFArray(kind, self.file, start, n, heads)

    def _alignment(self) -> int:
        value = self.metadata.get("general.alignment", 32)
        if type(value) is not int or not 0 < value < 1 << 32 or value & (value - 1):
            raise FileError(
                f"is {value!r}",
                path=self.path,
                where="general.alignment",
                expected="a power of two below 2**32",
            )
        return value

    def _read_info(self) -> _Info:
        at = self._pos
        name = self._name("tensor name", MAX_NAME)
        n_dims = self._u32(name)
        if n_dims > 4:
            raise self._error(f"has {n_dims} dimensions", where=name, expected="4 or fewer")
        shape = tuple(self._u64(name) for _ in range(n_dims))[::-1]
        n = math.prod(shape)
        if max(n, *shape, 0) > MAX_ELEMENTS:
            raise self._error(f"shape {shape}", where=name, expected="under 2**63 elements")
        ggml_type = self._u32(name)
        layout = self._layout(name, ggml_type)
        k = shape[-1] if shape else 1
        if k % layout.block:
            raise self._error(
                f"rows of {k} weights in {layout.name}",
                where=name,
                expected=f"a multiple of its block, {layout.block}",
            )
        n_bytes = n // layout.block * layout.n_bytes
        return _Info(at, name, shape, ggml_type, n_bytes, offset=self._u64(name))

    def _layout(self, name: str, ggml_type: int) -> GGMLType:
        layout = type_of(ggml_type)
        if layout is not None:
            return layout
        if ggml_type in REMOVED:
            old, why = REMOVED[ggml_type]
            raise UnsupportedError(f"{self.path}: {name}: type {ggml_type} is {old}: {why}")
        raise self._error(f"ggml type {ggml_type}", where=name, expected="a type that ggml has")

    def _place(self, infos: list[_Info]) -> dict[str, Tensor]:
        """Check where the tensors lie: aligned, inside the file, apart from each other."""
        size, data_at = len(self.file), _align(self._pos, self.alignment)
        self.header_only = size <= data_at and any(info.n_bytes for info in infos)
        end, before = 0, ""
        for info in sorted(infos, key=lambda info: (info.offset, info.n_bytes)):
            if info.offset % self.alignment:
                raise self._error(
                    f"offset {info.offset}",
                    offset=info.at,
                    where=info.name,
                    expected=f"a multiple of {self.alignment}",
                )
            if info.n_bytes and info.offset < end:
                raise self._error(
                    f"offset {info.offset} lies inside {before}",
                    offset=info.at,
                    where=info.name,
                    expected=f"at least {end}",
                )
            if info.n_bytes:
                end, before = info.offset + info.n_bytes, info.name
            if not self.header_only and data_at + info.offset + info.n_bytes > size:
                raise self._error(
                    f"cut short: the file has {size} bytes",
                    offset=data_at + info.offset,
                    where=info.name,
                    expected=f"{data_at + info.offset + info.n_bytes}",
                )
        # Some writers do not pad the last tensor; a padding in part is a file cut short.
        padded = data_at + _align(end, self.alignment)
        if not self.header_only and end and data_at + end < size < padded:
            raise self._error(
                "cut short in the last padding", offset=size, expected=f"{padded} bytes"
            )
        return {
            info.name: Tensor(
                info.name,
                info.shape,
                info.ggml_type,
                FORMATS.get(info.ggml_type),
                info.n_bytes,
                self.path,
                data_at + info.offset,
                self.file,
            )
            for info in infos
        }

    # -- fields -------------------------------------------------------------------------

    def _take(self, n: int, where: str) -> bytes:
        left = len(self.file) - self._pos
        if n > left:
            raise self._error(f"cut short: {left} bytes left", where=where, expected=f"{n} bytes")
        self._pos += n
        return self.map[self._pos - n : self._pos]

    def _u32(self, where: str) -> int:
        return int.from_bytes(self._take(4, where), "little")

    def _u64(self, where: str) -> int:
        return int.from_bytes(self._take(8, where), "little")

    def _count(self, where: str, item_bytes: int) -> int:
        """A count of things of at least ``item_bytes`` each, which must fit into the file."""
        at = self._pos
        n = self._u64(where)
        most = (len(self.file) - self._pos) // item_bytes
        if n > most:
            raise self._error(f"a count of {n}", offset=at, where=where, expected=f"at most {most}")
        return n

    def _name(self, what: str, most: int) -> str:
        at = self._pos
        n = self._u64(what)
        if n > most:
            raise self._error(f"{n} bytes long", offset=at, where=what, expected=f"at most {most}")
        raw = self._take(n, what)
        try:
            return raw.decode()
        except UnicodeDecodeError:
            raise self._error(f"{raw[:80]!r}", offset=at, where=what, expected="UTF-8") from None

    def _value_type(self, key: str) -> ValueType:
        at = self._pos
        number = self._u32(key)
        try:
            return ValueType(number)
        except ValueError:
            raise self._error(
                f"value type {number}", offset=at, where=key, expected="0 to 12"
            ) from None

    def _error(
        self,
        message: str,
        *,
        offset: int | None = None,
        where: str | None = None,
        expected: str | None = None,
    ) -> FileError:
        at = self._pos if offset is None else offset
        return FileError(message, path=self.path, offset=at, where=where, expected=expected)


def _align(n: int, alignment: int) -> int:
    return -(-n // alignment) * alignment


def _is_llama2c(path: Path, head: bytes) -> bool:
    """Marked as one, or exactly as long as its header asks for."""
    from treadle.files.llama2c import MAGIC, n_bytes_of

    try:
        return head[:4] == MAGIC or n_bytes_of(head, path) == path.stat().st_size
    except (TreadleError, struct.error, OSError):
        return False
