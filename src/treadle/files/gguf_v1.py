"""Reader of GGUF version 1 and of the ``FUGG`` files that preceded its release.

The layout is that of versions 2 and 3, but counts, lengths and dimensions have 32 bits (a
tensor's offset has 64).
"""

from __future__ import annotations

from pathlib import Path

from treadle.files.gguf_header import Header
from treadle.files.metadata import GGUFArray, ValueType, string_array

MAGICS = (b"GGUF", b"FUGG")


class HeaderV1(Header):
    """The header of a GGUF version 1 file."""

    word = 4
    last_type = ValueType.ARRAY
    min_kv = 9
    min_info = 24

    def __init__(self, path: Path) -> None:
        super().__init__(path)
        if not self.metadata:
            raise self.error("has no keys", expected="at least general.architecture")
        if self.header_only:
            raise self.error("cut short: there is no tensor data", len(self.file))

    def _read_magic(self) -> None:
        if self.take(4, "magic") not in MAGICS or self.uint("version") != 1:
            raise self.error("is not GGUF version 1", 0)
        self.version = 1

    def _strings(self, key: str, n: int) -> GGUFArray:
        return string_array([self.take(self.uint(key), key) for _ in range(n)])
