"""Parser of one GGUF file's header; every field is checked before use.

::

    "GGUF" version:u32 n_tensors:u64 n_kv:u64
    n_kv      x  key:string type:u32 value
    n_tensors x  name:string n_dims:u32 dims:u64[n_dims] type:u32 offset:u64
    padding to the alignment, then the tensors' bytes at their offsets
"""

from __future__ import annotations

import math
import struct
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np

from treadle.base.fast_classes import NamedTuple
from treadle.errors import FileError, TreadleError, UnsupportedError
from treadle.files.metadata import DTYPES, GGUFArray, Value, ValueType, decode
from treadle.files.reader import FileReader
from treadle.files.tensor import LateTensor, Tensor
from treadle.formats import REMOVED, GGMLType, type_of

if TYPE_CHECKING:
    from treadle.files.mapping import MappedFile

EXPECTED = "a GGUF file"
MAGIC = b"GGUF"
MAX_ENTRIES = 1 << 16  # keys or tensors, each a Python object: far above any real model
MAX_KEY = (1 << 16) - 1  # bytes, by the specification
MAX_NAME = 64  # bytes of a tensor's name, by the specification
MAX_ELEMENTS = (1 << 63) - 1  # ggml counts in int64
LEGACY = {  # magics of other model files
    b"FUGG": "a pre-release GGUF file (before August 2023); `treadle convert` converts it to GGUF",
    b"tjgg": "a GGJT file, which GGUF replaced in 2023; `treadle convert` converts it to GGUF",
    b"fmgg": "a GGMF file, which GGUF replaced in 2023; `treadle convert` converts it to GGUF",
    b"lmgg": "a GGML file, which GGUF replaced in 2023; `treadle convert` converts it to GGUF",
    b"PK\x03\x04": "a PyTorch checkpoint (or zip archive), not a GGUF file; convert it first",
}
GGMF_VERSION = b"\x01\0\0\0"  # llama.cpp's only version; other programs use the same magic

_NO_HEADS = np.empty(0, np.int64)


class _Info(NamedTuple):
    """A tensor's description in the header; ``at`` is the byte offset of the description itself."""

    at: int
    name: str
    shape: tuple[int, ...]
    ggml_type: int
    n_bytes: int
    offset: int  # from the start of the tensor data


class Header(FileReader):
    """Metadata and tensors of one mapped GGUF file. Raises FileError for a damaged file,
    UnsupportedError for other versions and formats.
    """

    word = 8  # bytes of a count, a length or a dimension
    min_kv = 13  # bytes of the smallest metadata entry
    min_info = 24  # bytes of the smallest tensor description
    last_type = ValueType.FLOAT64

    def __init__(self, path: Path, mapped: MappedFile | None = None) -> None:
        """Read the header; map the file, unless it is ``mapped`` already."""
        super().__init__(path, EXPECTED, mapped)
        self.metadata: dict[str, Value] = {}
        self.types: dict[str, ValueType] = {}  # for an array, its element type
        self.tensors: dict[str, Tensor] = {}
        self.header_only = False
        self._read()

    def _read(self) -> None:
        self._read_magic()
        n_tensors, n_kv = self._read_counts()
        for _ in range(n_kv):
            self._read_kv()
        self.alignment = self._alignment()
        infos: dict[str, _Info] = {}
        for _ in range(n_tensors):
            info = self._read_info()
            if info.name in infos:
                raise self.error("appears twice", info.at, info.name)
            infos[info.name] = info
        self.tensors = self._place(list(infos.values()))

    # -- the parts, in file order -------------------------------------------------------

    def _read_magic(self) -> None:
        from treadle.files.mistaken import N_HEAD, describe_file

        what = describe_file(self.map[:N_HEAD])
        magic = self.take(4, "magic") if what is None or len(self.file) >= 4 else b""
        if magic in LEGACY:
            if magic == b"fmgg" and bytes(self.file[4:8]) != GGMF_VERSION:
                raise UnsupportedError(
                    f"{self.path}: a GGMF file, but not llama.cpp's (perhaps rwkv.cpp's)"
                )
            raise UnsupportedError(f"{self.path}: {LEGACY[magic]}")
        if magic != MAGIC:
            if _is_llama2c(self.path, bytes(self.file[:256])):
                made = "`treadle convert` converts it to GGUF"
                raise UnsupportedError(f"{self.path}: a llama2.c checkpoint; {made}")
            raise self.error(f"not a GGUF file: {what or f'it starts with {magic!r}'}", offset=0)
        self.version = self.uint("version")
        if self.version & 0xFFFF == 0:
            raise UnsupportedError(
                f"{self.path}: a big-endian GGUF file is not supported: "
                "gguf-convert-endian, of the package gguf, changes it"
            )
        if self.version == 1:
            raise UnsupportedError(
                f"{self.path}: GGUF version 1, with 32-bit lengths, was replaced in August 2023; "
                "`treadle convert` converts it to GGUF"
            )
        if self.version not in (2, 3):
            raise UnsupportedError(
                f"{self.path}: GGUF version {self.version} is not supported (expected 2 or 3): "
                "fetch the file in one of these, or a newer treadle"
            )

    def _read_counts(self) -> tuple[int, int]:
        n_tensors = self.count("tensor count", self.min_info, self.word)
        n_kv = self.count("metadata count", self.min_kv, self.word)
        for n, what in ((n_tensors, "tensors"), (n_kv, "metadata keys")):
            if n > MAX_ENTRIES:
                raise UnsupportedError(
                    f"{self.path}: {n} {what} (at most {MAX_ENTRIES} are supported)"
                )
        return n_tensors, n_kv

    def _read_kv(self) -> None:
        at = self.at
        key = self._name("metadata key", MAX_KEY)
        if key in self.metadata:
            raise self.error("appears twice", at, key)
        kind = self._value_type(key)
        if kind is ValueType.ARRAY:
            kind, self.metadata[key] = self._array(key)
        elif kind is ValueType.STRING:
            self.metadata[key] = decode(self.take(self.count(key, 1, self.word), key))
        elif kind is ValueType.BOOL:
            self.metadata[key] = self.take(1, key) != b"\0"
        else:
            raw = self.take(DTYPES[kind].itemsize, key)
            self.metadata[key] = np.frombuffer(raw, DTYPES[kind])[0].item()
        self.types[key] = kind

    def _array(self, key: str) -> tuple[ValueType, GGUFArray]:
        kind = self._value_type(key)
        if kind is ValueType.ARRAY:
            raise UnsupportedError(f"{self.path}: {key}: an array of arrays: not supported")
        if kind is ValueType.STRING:
            return kind, self._strings(key, self.count(key, self.word, self.word))
        n = self.count(key, DTYPES[kind].itemsize, self.word)
        start = self.at
        self.at += n * DTYPES[kind].itemsize
        return kind, GGUFArray(kind, self.file, start, n, _NO_HEADS)

    def _strings(self, key: str, n: int) -> GGUFArray:
        from treadle.files.gguf_strings import StringTooLong, string_heads

        try:
            heads = string_heads(self.file, self.at, n)
        except StringTooLong as e:
            what = f"string {e.index} of {n} does not end within the file"
            expected = f"at most {len(self.file) - e.offset} bytes with its length"
            raise self.error(what, e.offset, key, expected) from None
        start = self.at
        self.at = int(heads[-1])
        return GGUFArray(ValueType.STRING, self.file, start, n, heads)

    def _alignment(self) -> int:
        key = "general.alignment"
        expected = "a power of two below 2**32"
        value = self.metadata.get(key, 32)
        if type(value) is not int or not 0 < value < 1 << 32 or value & (value - 1):
            raise FileError(f"is {value!r}", path=self.path, where=key, expected=expected)
        return value

    def _read_info(self) -> _Info:
        at = self.at
        name = self._name("tensor name", MAX_NAME)
        n_dims = self.uint(name)
        if n_dims > 4:
            raise self.error(f"has {n_dims} dimensions", where=name, expected="4 or fewer")
        shape = tuple(self.uint(name, self.word) for _ in range(n_dims))[::-1]
        n = math.prod(shape)
        if max(n, *shape, 0) > MAX_ELEMENTS:
            raise self.error(f"shape {shape}", where=name, expected="under 2**63 elements")
        ggml_type = self.uint(name)
        layout = self._layout(name, ggml_type)
        k = shape[-1] if shape else 1
        if k % layout.block:
            what = f"rows of {k} weights in {layout.name}"
            expected = f"a multiple of its block, {layout.block}"
            raise self.error(what, where=name, expected=expected)
        n_bytes = layout.tensor_bytes(shape)
        return _Info(at, name, shape, ggml_type, n_bytes, offset=self.uint(name, 8))

    def _layout(self, name: str, ggml_type: int) -> GGMLType:
        layout = type_of(ggml_type)
        if layout is not None:
            return layout
        if ggml_type in REMOVED:
            old, why = REMOVED[ggml_type]
            raise UnsupportedError(f"{self.path}: {name}: type {ggml_type} is {old}: {why}")
        raise self.error(f"ggml type {ggml_type}", where=name, expected="a ggml type")

    def _place(self, infos: list[_Info]) -> dict[str, Tensor]:
        """Return the tensors that ``infos`` describe, by name. Raises FileError unless they are
        aligned, inside the file and do not overlap.
        """
        size = len(self.file)
        data_at = _align(self.at, self.alignment)
        self.header_only = size <= data_at and any(info.n_bytes for info in infos)
        end = 0
        before = ""
        for info in sorted(infos, key=lambda info: (info.offset, info.n_bytes)):
            if info.offset % self.alignment:
                expected = f"a multiple of {self.alignment}"
                raise self.error(f"offset {info.offset}", info.at, info.name, expected)
            if info.n_bytes and info.offset < end:
                what = f"offset {info.offset} lies inside {before}"
                raise self.error(what, info.at, info.name, f"at least {end}")
            if info.n_bytes:
                end = info.offset + info.n_bytes
                before = info.name
            if not self.header_only:
                self.check_inside(data_at + info.offset, info.n_bytes, info.name)
        # Some writers do not pad the last tensor; partial padding means a truncated file.
        padded = data_at + _align(end, self.alignment)
        if not self.header_only and end and data_at + end < size < padded:
            what = "cut short in the last padding"
            raise self.error(what, size, expected=f"{padded} bytes")
        return {
            info.name: LateTensor.of(
                name=info.name,
                shape=info.shape,
                ggml_type=info.ggml_type,
                n_bytes=info.n_bytes,
                path=self.path,
                offset=data_at + info.offset,
                file=self.file,
            )
            for info in infos
        }

    # -- fields -------------------------------------------------------------------------

    def _name(self, what: str, most: int) -> str:
        at = self.at
        n = self.uint(what, self.word)
        if n > most:
            raise self.error(f"{n} bytes long", at, what, f"at most {most}")
        return self.text(n, what, at)

    def _value_type(self, key: str) -> ValueType:
        at = self.at
        number = self.uint(key)
        if number > self.last_type:
            raise self.error(f"value type {number}", at, key, f"0 to {self.last_type}")
        return ValueType(number)


def _align(n: int, alignment: int) -> int:
    return -(-n // alignment) * alignment


def _is_llama2c(path: Path, head: bytes) -> bool:
    """Return whether a file has llama2.c's magic, or exactly the size of a llama2.c checkpoint
    without magic. ``head``: its first bytes.
    """
    from treadle.files.llama2c import MAGIC, n_bytes_of

    try:
        return head[:4] == MAGIC or n_bytes_of(head, path) == path.stat().st_size
    except (TreadleError, struct.error, OSError):
        return False
