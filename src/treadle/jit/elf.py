"""Loader of compiled kernels on x86-64 Linux, in place of LLVM's linker, which takes as long to
import as all else that a start needs of LLVM.

A kernel's object has code and constants, and refers to nothing outside itself. Other objects are
left to LLVM's linker. Facts: the System V ABI's AMD64 supplement, chapter 4.
"""

from __future__ import annotations

import mmap
import struct

from treadle.base.fast_classes import NamedTuple
from treadle.system import HERE, SYSTEM, machine

_HEADER = struct.Struct("<16sHHIQQQIHHHHHH")
_SECTION = struct.Struct("<IIQQQQIIQQ")
_SYMBOL = struct.Struct("<IBBHQQ")
_RELOCATION = struct.Struct("<QQq")
_IDENTITY = b"\x7fELF\x02\x01"  # 64 bits, lowest byte first
_RELOCATABLE = 1
_X86_64 = 62
# Kinds of sections.
_SYMBOLS = 2
_RELOCATIONS = 4
_EMPTY = 8
# Flags of sections: the code writes them; they are in memory.
_WRITTEN = 1
_ALLOCATED = 2
_TABLE = b"_GLOBAL_OFFSET_TABLE_"  # the base of offsets; here the begin of the code
# Kinds of relocations: R_X86_64_PC32, PLT32, GOTOFF64 and GOTPC64.
_RELATIVE = 2
_CALL = 4
_FROM_TABLE = 25
_TO_TABLE = 29


class _Section(NamedTuple):
    kind: int
    flags: int
    offset: int  # in the object
    n_bytes: int
    link: int
    info: int
    align: int


class _UnknownError(Exception):
    """The object has a part that only LLVM's linker handles."""


def load(symbol: str, code: bytes) -> int | None:
    """Load the object ``code`` and return the address of ``symbol`` in it; None on other systems,
    or if only LLVM's linker handles the object. The code stays loaded as long as the process lives.
    """
    if HERE != "linux" or machine() != "x86_64" or code[:6] != _IDENTITY:
        return None
    try:
        loaded = _Object(code)
        start = loaded.places[loaded.names.index(symbol.encode())]
        image = loaded.image()
    except (_UnknownError, struct.error, IndexError, ValueError):
        return None
    begin = SYSTEM.load_code(image, loaded.n_fixed)
    return None if begin is None or start is None else begin + start


class _Object:
    """A parsed object file, and the places (byte offsets) of its sections in memory: first those
    that are only read, then those that are written.

    names, places: of the object's symbols; place None for a symbol that it does not define.
    n_fixed: bytes that are only read.
    """

    def __init__(self, code: bytes) -> None:
        self._code = code
        head = _HEADER.unpack_from(code)
        if head[1:3] != (_RELOCATABLE, _X86_64):
            raise _UnknownError
        self._sections = []
        for i in range(head[12]):
            _, kind, flags, _, offset, n_bytes, link, info, align, _ = _SECTION.unpack_from(
                code, head[6] + i * _SECTION.size
            )
            self._sections.append(_Section(kind, flags, offset, n_bytes, link, info, align))
        self._place_of: dict[int, int] = {}  # of sections in memory, by index
        self.n_fixed = self._place(0, written=False)
        after = -(-self.n_fixed // mmap.PAGESIZE) * mmap.PAGESIZE
        self._n_bytes = max(self._place(after, written=True), self.n_fixed)
        self.names: list[bytes] = []
        self.places: list[int | None] = []
        self._read_symbols()

    def _place(self, begin: int, *, written: bool) -> int:
        """Assign places from byte ``begin`` on to the sections that the program writes
        (``written``), or else to those that it only reads; return the end.
        """
        end = begin
        for i, section in enumerate(self._sections):
            if section.flags & _ALLOCATED and bool(section.flags & _WRITTEN) == written:
                place = -(-end // max(section.align, 1)) * max(section.align, 1)
                self._place_of[i] = place
                end = place + section.n_bytes
        return begin if end == begin else end

    def _read_symbols(self) -> None:
        code = self._code
        (table,) = (section for section in self._sections if section.kind == _SYMBOLS)
        names = self._sections[table.link]
        for at in range(table.offset, table.offset + table.n_bytes, _SYMBOL.size):
            name_at, _, _, index, value, _ = _SYMBOL.unpack_from(code, at)
            start = names.offset + name_at
            name = code[start : code.index(b"\0", start)]
            inside = index in self._place_of
            place = self._place_of[index] + value if inside else None
            self.names.append(name)
            self.places.append(0 if name == _TABLE else place)

    def image(self) -> bytes:
        """Return the bytes to load into memory, relocated. Raises _UnknownError for relocations
        that only LLVM's linker handles.
        """
        image = bytearray(self._n_bytes)
        for i, place in self._place_of.items():
            section = self._sections[i]
            if section.kind != _EMPTY:
                data = self._code[section.offset : section.offset + section.n_bytes]
                if len(data) < section.n_bytes:
                    raise _UnknownError
                image[place : place + section.n_bytes] = data
        for section in self._sections:
            if section.kind == _RELOCATIONS and section.info in self._place_of:
                self._relocate(section, image)
        return bytes(image)

    def _relocate(self, section: _Section, image: bytearray) -> None:
        begin = self._place_of[section.info]
        end = section.offset + section.n_bytes
        for at in range(section.offset, end, _RELOCATION.size):
            offset, info, addend = _RELOCATION.unpack_from(self._code, at)
            here = begin + offset
            to = self.places[info >> 32]
            kind = info & 0xFFFFFFFF
            if to is None:
                raise _UnknownError
            if kind == _FROM_TABLE:
                struct.pack_into("<q", image, here, to + addend)
            elif kind == _TO_TABLE:
                struct.pack_into("<q", image, here, addend - here)
            elif kind in (_RELATIVE, _CALL):
                struct.pack_into("<i", image, here, to + addend - here)
            else:
                raise _UnknownError
