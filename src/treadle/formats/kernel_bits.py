"""Bits and bytes of a vector put elsewhere: operations of the instruction set's row.

All take and give bytes (u8). What is said for each 8 bytes, or of them, begins again where a list
ends.
"""

from __future__ import annotations

from collections.abc import Sequence

from treadle.formats.format import Builder, Field, Val
from treadle.jit.types import u16


def bit_extract(k: Builder, v: Val, shift: Sequence[int] | int, width: int, to: int = 0) -> Val:
    """Of every byte ``width`` bits from ``shift`` on, moved to bit ``to``; the shift may be another
    for each 8 bytes.
    """
    shifts = [shift] if isinstance(shift, int) else list(shift)
    return k.isa.bit_extract(k, v, shifts, width, to)


def multishift(k: Builder, v: Val, at: Sequence[int]) -> Val:
    """Byte i is the 8 bits from bit ``at[i]`` on of the 8 bytes that it is one of, a ring."""
    return k.isa.multishift(k, v, at)


def bit_spread(k: Builder, v: Val, at: Sequence[int], to: int) -> Val:
    """Byte i is ``2 ** to`` where bit ``at[i]`` of the 8 bytes that it is one of is set, else 0."""
    return k.isa.bit_spread(k, v, at, to)


def count_ones(k: Builder, v: Val) -> Val:
    """How many bits of each lane are set."""
    return k.call(f"llvm.ctpop.{v.ty.mangled}", v.ty, [v.ir])


def words_of(k: Builder, field: Field, name: str, n_bytes: int) -> list[Val]:
    """Every 32 bytes of a field as words."""
    return [field(name, 32, at).to(u16) for at in range(0, n_bytes, 32)]


def paired_words(k: Builder, field: Field) -> list[Val]:
    """The codes of 32 weights for every 16 bytes of ``qs``: their nibbles, all low ones first."""
    shift = k.const([0] * 16 + [4] * 16, u16 * 32)
    return [k.concat(v, v).to(u16) >> shift for v in k.split(field("qs"), 16)]


def nibbles(k: Builder, field: Field) -> list[Val]:
    """Codes 0..15: the low nibbles of ``qs``, then the high ones."""
    qs = field("qs")
    return [qs & 15, qs >> 4]


def looked_up(k: Builder, field: Field, table: Sequence[int]) -> list[Val]:
    """The same, as places in a table of 16 numbers."""
    qs = field("qs")
    return [k.lookup(table, v) for v in (qs, qs >> 4)]


def beside(k: Builder, field: Field, name: str, at: int, apart: int) -> Val:
    """16 bytes of a field from ``at`` on, and 16 from ``apart`` bytes further on."""
    return k.concat(field(name, 16, at), field(name, 16, at + apart))
