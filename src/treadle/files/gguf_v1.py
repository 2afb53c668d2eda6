"""Reading GGUF version 1 and the ``FUGG`` files of the days before its release.

As versions 2 and 3, but every count, length and dimension has 32 bits (of a tensor's offset, 64).
"""

from __future__ import annotations

import contextlib
import math
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from treadle.errors import FileError, UnsupportedError
from treadle.files.gguf_array import DTYPES, ValueType
from treadle.files.legacy import LegacyTensor
from treadle.files.mapping import map_file
from treadle.formats import REMOVED, type_of

Bytes = npt.NDArray[np.uint8]

MAGICS = (b"GGUF", b"FUGG")
MAX_ENTRIES = 1 << 16


class GGUFv1:
    """One file: ``metadata`` (numpy scalars and arrays, str, lists of bytes) and ``tensors``."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self._map = map_file(path, "a GGUF file")
        self.file: Bytes = np.frombuffer(self._map, np.uint8)
        self._at = 0
        if self._take(4, "magic") not in MAGICS or self._u32("version") != 1:
            raise self._error("is not GGUF version 1", 0)
        n_tensors, n_kv = self._count("tensor count", 24), self._count("metadata count", 9)
        self.metadata: dict[str, Any] = {}
        for _ in range(n_kv):
            key = self._text("metadata key")
            if key in self.metadata:
                raise self._error("appears twice", where=key)
            self.metadata[key] = self._value(key, self._type(key))
        if not self.metadata:
            raise self._error("has no keys", expected="general.architecture at least")
        alignment = self.metadata.get("general.alignment", 32)
        if not isinstance(alignment, (int, np.integer)) or not 0 < alignment < 1 << 31:
            raise self._error(f"is {alignment!r:.60}", where="general.alignment")
        infos = [self._info() for _ in range(n_tensors)]
        start = -(-self._at // int(alignment)) * int(alignment)
        self.tensors: dict[str, LegacyTensor] = {}
        for name, shape, ggml_type, offset in infos:
            if name in self.tensors:
                raise self._error("appears twice", where=name)
            self.tensors[name] = self._place(name, shape, ggml_type, start + offset)

    def close(self) -> None:
        """Let go of the file; views still in use keep it mapped."""
        self.tensors, self.file = {}, np.empty(0, np.uint8)
        with contextlib.suppress(BufferError):
            self._map.close()

    def _info(self) -> tuple[str, tuple[int, ...], int, int]:
        name = self._text("tensor name")
        n_dims = self._u32(name)
        if n_dims > 4:
            raise self._error(f"has {n_dims} dimensions", where=name, expected="4 or fewer")
        shape = tuple(self._u32(name) for _ in range(n_dims))[::-1]
        ggml_type = self._u32(name)
        return name, shape, ggml_type, int.from_bytes(self._take(8, name), "little")

    def _place(self, name: str, shape: tuple[int, ...], ggml_type: int, at: int) -> LegacyTensor:
        if ggml_type in REMOVED:
            old, why = REMOVED[ggml_type]
            raise UnsupportedError(f"{self.path}: {name}: {old}: {why}")
        kind = type_of(ggml_type)
        if kind is None or (shape and shape[-1] % kind.block):
            what = f"shape {list(shape)} in ggml type {ggml_type}"
            raise self._error(what, at, name, "blocks that fill its rows")
        n_bytes = math.prod(shape) // kind.block * kind.n_bytes
        if at + n_bytes > len(self.file):
            what = f"cut short: the file has {len(self.file)} bytes"
            raise self._error(what, at, name, str(at + n_bytes))
        return LegacyTensor(name, shape, ggml_type, n_bytes, self.path, at, self.file)

    # -- fields -------------------------------------------------------------------------

    def _value(self, key: str, kind: ValueType) -> Any:
        if kind is ValueType.STRING:
            return self._raw(key).decode("utf-8", "surrogateescape")
        if kind is not ValueType.ARRAY:
            raw = self._take(DTYPES[kind].itemsize, key)
            return np.frombuffer(raw, DTYPES[kind])[0] if kind is not ValueType.BOOL else any(raw)
        kind = self._type(key)
        if kind is ValueType.ARRAY:
            raise UnsupportedError(f"{self.path}: {key}: an array of arrays")
        if kind is ValueType.STRING:
            return [self._raw(key) for _ in range(self._count(key, 4))]
        n = self._count(key, DTYPES[kind].itemsize)
        raw = self._take(n * DTYPES[kind].itemsize, key)
        if kind is ValueType.BOOL:
            return np.frombuffer(raw, np.uint8) != 0
        return np.frombuffer(raw, DTYPES[kind])

    def _type(self, key: str) -> ValueType:
        number = self._u32(key)
        if number > ValueType.ARRAY:
            raise self._error(f"value type {number}", where=key, expected="0 to 9")
        return ValueType(number)

    def _text(self, what: str) -> str:
        raw = self._raw(what)
        try:
            return raw.decode()
        except UnicodeDecodeError:
            raise self._error(f"{raw[:80]!r}", where=what, expected="UTF-8") from None

    def _raw(self, where: str) -> bytes:
        return self._take(self._u32(where), where)

    def _count(self, where: str, item_bytes: int) -> int:
        n, most = self._u32(where), (len(self.file) - self._at) // item_bytes
        if n > most or (item_bytes > 8 and n > MAX_ENTRIES):
            raise self._error(f"a count of {n}", where=where, expected=f"at most {most}")
        return n

    def _take(self, n: int, where: str) -> bytes:
        left = len(self.file) - self._at
        if n > left:
            what = f"cut short: {left} bytes left"
            raise self._error(what, where=where, expected=f"{n} bytes")
        self._at += n
        return self._map[self._at - n : self._at]

    def _u32(self, where: str) -> int:
        return int.from_bytes(self._take(4, where), "little")

    def _error(
        self,
        what: str,
        offset: int | None = None,
        where: str | None = None,
        expected: str | None = None,
    ) -> FileError:
        at = self._at if offset is None else offset
        return FileError(what, path=self.path, offset=at, where=where, expected=expected)
