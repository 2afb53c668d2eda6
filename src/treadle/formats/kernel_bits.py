"""Bit and byte permutations of vectors in kernels, by operations of the instruction set.

Vectors are of bytes (u8). Lists of positions refer to groups of 8 bytes, and repeat if they are
shorter than the vector.
"""

from __future__ import annotations

from collections.abc import Sequence

from treadle.formats.format import Builder, Field, Val
from treadle.jit.types import u16


def bit_extract(k: Builder, v: Val, shift: Sequence[int] | int, width: int, to: int = 0) -> Val:
    """Extract ``width`` bits from bit ``shift`` of every byte, moved to bit ``to``; a list has a
    shift for each 8 bytes.
    """
    shifts = [shift] if isinstance(shift, int) else list(shift)
    return k.isa.bit_extract(k, v, shifts, width, to)


def multishift(k: Builder, v: Val, at: Sequence[int]) -> Val:
    """Return bytes: byte i is the 8 bits from bit ``at[i]`` of its group of 8 bytes, cyclic."""
    return k.isa.multishift(k, v, at)


def bit_spread(k: Builder, v: Val, at: Sequence[int], to: int) -> Val:
    """Return bytes where byte i is ``2 ** to`` if bit ``at[i]`` of its group of 8 bytes is set."""
    return k.isa.bit_spread(k, v, at, to)


def count_ones(k: Builder, v: Val) -> Val:
    """Return the number of set bits of each lane."""
    return k.call(f"llvm.ctpop.{v.ty.mangled}", v.ty, [v.ir])


def words_of(k: Builder, field: Field, name: str, n_bytes: int) -> list[Val]:
    """Return every 32 bytes of a field widened to u16."""
    return [field(name, 32, at).to(u16) for at in range(0, n_bytes, 32)]


def paired_words(k: Builder, field: Field) -> list[Val]:
    """Return the codes of 32 weights for every 16 bytes of ``qs``: low nibbles, then high ones."""
    shift = k.const([0] * 16 + [4] * 16, u16 * 32)
    return [k.concat(v, v).to(u16) >> shift for v in k.split(field("qs"), 16)]


def nibbles(k: Builder, field: Field) -> list[Val]:
    """Return codes 0..15: the low nibbles of ``qs``, then the high ones."""
    qs = field("qs")
    return [qs & 15, qs >> 4]


def looked_up(k: Builder, field: Field, table: Sequence[int]) -> list[Val]:
    """Look up the nibbles of ``qs`` in a table of 16 numbers: the low ones, then the high ones."""
    qs = field("qs")
    return [k.lookup(table, v) for v in (qs, qs >> 4)]


def beside(k: Builder, field: Field, name: str, at: int, apart: int) -> Val:
    """Return 16 bytes of a field from ``at``, and 16 from ``at + apart``, in one vector."""
    return k.concat(field(name, 16, at), field(name, 16, at + apart))
