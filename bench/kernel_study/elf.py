"""Objects of a foreign machine put at an address: the small part of a linker that kernels need.

What runs in an emulator is linked here: the studied kernels, and those that tests call.

A kernel calls nothing and has no data but constants, so its object has a handful of relocations
for each machine. Anything else is refused by name. (ELF for the Arm 64-bit architecture, and the
RISC-V ELF psABI, say what each computes.)
"""

from __future__ import annotations

import struct
from collections.abc import Callable, Mapping

from treadle.base.fast_classes import dataclass

# System calls have the same numbers on both machines: those of Linux's generic table.
READ = 63
WRITE = 64
EXIT = 94
MMAP = 222
MPROTECT = 226
# The call itself, which LLVM cannot emit without an assembler for the machine: the number and the
# arguments move down by one register each, then svc or ecall, and ret.
SYSCALL = {
    "aarch64": ("e80300aa e00301aa e10302aa e20303aa e30304aa e40305aa e50306aa 010000d4 c0035fd6"),
    "riscv64": ("93080500 13850500 93050600 13860600 93060700 13870700 93070800 73000000 67800000"),
}

ALLOC = 2  # a section's flag: it is part of the program
# kinds of sections
NOBITS = 8
SYMTAB = 2
RELA = 4
# e_machine
AARCH64 = 183
RISCV64 = 243


@dataclass(frozen=True)
class Section:
    """One header: offsets and sizes in bytes, ``info`` of a RELA section is what it patches."""

    name: str
    kind: int
    flags: int
    offset: int
    size: int
    link: int
    info: int
    align: int

    @property
    def is_loaded(self) -> bool:
        """Whether the code needs it: what unwinds a stack it does not."""
        return bool(self.flags & ALLOC) and self.name != ".eh_frame"


@dataclass(frozen=True)
class Symbol:
    """``section`` 0: defined elsewhere. ``size`` in bytes."""

    name: str
    section: int
    value: int
    size: int


@dataclass(frozen=True)
class Relocation:
    """At byte ``offset`` of section ``where``: the address of ``symbol`` plus ``addend``."""

    where: int
    offset: int
    kind: int
    symbol: int
    addend: int


class Object:
    """Contents of a relocatable little-endian ELF64 file."""

    def __init__(self, code: bytes) -> None:
        assert code[:6] == b"\x7fELF\x02\x01", "no little-endian ELF64 file"
        self.code = code
        kind, self.machine = struct.unpack_from("<HH", code, 16)
        assert kind == 1, "not relocatable"
        (table,) = struct.unpack_from("<Q", code, 40)
        size, n, names = struct.unpack_from("<HHH", code, 58)
        headers = [struct.unpack_from("<IIQQQQIIQQ", code, table + i * size) for i in range(n)]
        strings = headers[names][4]
        self.sections = [
            Section(self._text(strings + h[0]), h[1], h[2], h[4], h[5], h[6], h[7], max(h[8], 1))
            for h in headers
        ]
        self.symbols = [s for section in self.sections for s in self._symbols(section)]
        self.relocations = [r for section in self.sections for r in self._relocations(section)]

    def _text(self, at: int) -> str:
        return self.code[at : self.code.index(b"\0", at)].decode()

    def _symbols(self, section: Section) -> list[Symbol]:
        if section.kind != SYMTAB:
            return []
        strings = self.sections[section.link].offset
        found = []
        for at in range(section.offset, section.offset + section.size, 24):
            name, _, _, where, value, size = struct.unpack_from("<IBBHQQ", self.code, at)
            found.append(Symbol(self._text(strings + name), where, value, size))
        return found

    def _relocations(self, section: Section) -> list[Relocation]:
        if section.kind != RELA or not self.sections[section.info].is_loaded:
            return []
        found = []
        for at in range(section.offset, section.offset + section.size, 24):
            offset, info, addend = struct.unpack_from("<QQq", self.code, at)
            found.append(Relocation(section.info, offset, info & 0xFFFFFFFF, info >> 32, addend))
        return found


def place(
    code: bytes, base: int, known: Mapping[str, int] | None = None
) -> tuple[bytearray, dict[str, int]]:
    """The object's bytes as they are at address ``base``, and the addresses of its symbols.

    ``known``: addresses of symbols defined elsewhere. Raises NotImplementedError for a relocation
    that no kernel had so far, KeyError for an unknown symbol.
    """
    made = Object(code)
    image = bytearray()
    starts = dict[int, int]()
    for i, section in enumerate(made.sections):
        if not section.is_loaded:
            continue
        image += bytes(-(base + len(image)) % section.align)
        starts[i] = base + len(image)
        bits = code[section.offset : section.offset + section.size]
        image += bytes(section.size) if section.kind == NOBITS else bits
    addresses = [
        starts[s.section] + s.value if s.section in starts else (known or {}).get(s.name)
        for s in made.symbols
    ]
    high: dict[int, int] = {}  # RISC-V: by address of an auipc, the distance that it begins
    late = []  # and the instructions that take the rest of one
    for r in made.relocations:
        address = addresses[r.symbol]
        at = starts[r.where] + r.offset
        if address is None:
            raise KeyError(f"{made.symbols[r.symbol].name} is defined nowhere")
        if made.machine == RISCV64 and r.kind in RISCV_LOW:
            late.append((r, address, at))
            continue
        if made.machine == RISCV64 and r.kind == 23:
            high[at] = address + r.addend - at
        _patch(image, made.machine, r.kind, at - base, address + r.addend, at)
    for r, address, at in late:
        _put32(image, at - base, RISCV_LOW[r.kind](high[address] & 0xFFF))
    return image, {
        s.name: a for s, a in zip(made.symbols, addresses, strict=True) if s.name and a is not None
    }


def _put32(image: bytearray, at: int, bits: int) -> None:
    (word,) = struct.unpack_from("<I", image, at)
    struct.pack_into("<I", image, at, word | bits)


def _field(value: int, bits: int) -> int:
    """A signed number in so many bits."""
    assert -(1 << bits - 1) <= value < 1 << bits - 1, f"{value} is too far for {bits} bits"
    return value & (1 << bits) - 1


def _adrp(target: int, at: int) -> int:
    pages = _field((target >> 12) - (at >> 12), 21)
    return (pages & 3) << 29 | pages >> 2 << 5


def _low12(shift: int) -> Callable[[int, int], int]:
    return lambda target, at: (target & 0xFFF) >> shift << 10


def _auipc(distance: int) -> int:
    """The upper 20 bits, so that the lower 12 may be negative."""
    return _field(distance + 0x800 >> 12, 20) << 12


# Bits to put into an instruction, by kind: of the symbol's address and the instruction's own.
AARCH64_BITS: dict[int, Callable[[int, int], int]] = {
    275: _adrp,  # ADR_PREL_PG_HI21
    277: _low12(0),  # ADD_ABS_LO12_NC
    278: _low12(0),  # LDST8, 16, 32, 64, 128_ABS_LO12_NC
    284: _low12(1),
    285: _low12(2),
    286: _low12(3),
    299: _low12(4),
    282: lambda target, at: _field(target - at >> 2, 26),  # JUMP26
    283: lambda target, at: _field(target - at >> 2, 26),  # CALL26
}
RISCV_BITS: dict[int, Callable[[int, int], int]] = {
    23: lambda target, at: _auipc(target - at)  # PCREL_HI20
}
# PCREL_LO12_I: what a PCREL_HI20 left over, in a load or an addition.
RISCV_LOW: dict[int, Callable[[int], int]] = {24: lambda low: low << 20}
NOTHING = {RISCV64: {43, 51}, AARCH64: set[int]()}  # ALIGN, RELAX: leave to shorten code
ADDRESS = {AARCH64: 257, RISCV64: 2}  # 64 bits of data


def _patch(image: bytearray, machine: int, kind: int, offset: int, target: int, at: int) -> None:
    bits = AARCH64_BITS if machine == AARCH64 else RISCV_BITS
    if kind in bits:
        _put32(image, offset, bits[kind](target, at))
    elif kind == ADDRESS[machine]:
        struct.pack_into("<Q", image, offset, target)
    elif kind not in NOTHING[machine]:
        raise NotImplementedError(f"relocation {kind} of machine {machine}")


def program(
    code: bytes, base: int, known: Mapping[str, int], extra: Mapping[str, bytes]
) -> tuple[bytes, dict[str, int]]:
    """A static program that starts at ``_start`` of an object, and the addresses of its symbols;
    ``extra``: machine code of symbols that the object calls.
    """
    at = base + 0x1000
    symbols = dict(known)
    front = bytearray()
    for name, body in extra.items():
        symbols[name] = at + len(front)
        front += body + bytes(-len(body) % 16)
    image, defined = place(code, at + len(front), symbols)
    body = bytes(front + image)
    header = struct.pack(
        "<16sHHIQQQIHHHHHH",
        b"\x7fELF\x02\x01\x01",
        2,
        Object(code).machine,
        1,
        defined["_start"],
        64,
        0,
        4 if Object(code).machine == RISCV64 else 0,  # EF_RISCV_FLOAT_ABI_DOUBLE
        64,
        56,
        1,
        0,
        0,
        0,
    )
    segment = struct.pack("<IIQQQQQQ", 1, 5, 0x1000, at, at, len(body), len(body), 0x1000)
    return (header + segment).ljust(0x1000, b"\0") + body, defined
