"""Bit and byte permutations of vectors in kernels, by operations of the instruction set.

Vectors are of bytes (u8). Lists of positions refer to groups of 8 bytes, and repeat if they are
shorter than the vector.
"""

from __future__ import annotations

from collections.abc import Sequence

from treadle.formats.format import Builder, Field, Val
from treadle.jit.types import u16


def bit_extract(k: Builder, v: Val, shift: Sequence[int] | int, width: int, to: int = 0) -> Val:
    """Emit the ``width`` bits from bit ``shift`` on of every byte of ``v``, moved to bit ``to`` of
    the byte; other bits are 0. A list has one shift for each 8 bytes.
    """
    shifts = [shift] if isinstance(shift, int) else list(shift)
    return k.isa.bit_extract(k, v, shifts, width, to)


def multishift(k: Builder, v: Val, at: Sequence[int]) -> Val:
    """Emit bytes: byte i is the 8 bits from bit ``at[i]`` on of its group of 8 bytes, cyclic."""
    return k.isa.multishift(k, v, at)


def bit_spread(k: Builder, v: Val, at: Sequence[int], to: int) -> Val:
    """Emit bytes: byte i is ``2 ** to`` if bit ``at[i]`` of its group of 8 bytes is set, else 0."""
    return k.isa.bit_spread(k, v, at, to)


def count_ones(k: Builder, v: Val) -> Val:
    """Emit the number of set bits of each lane."""
    return k.call(f"llvm.ctpop.{v.ty.mangled}", v.ty, [v.ir])


def words_of(k: Builder, field: Field, name: str, n_bytes: int) -> list[Val]:
    """Emit the ``n_bytes`` of the field ``name``, each byte widened to u16, in vectors of 32."""
    return [field(name, 32, at).to(u16) for at in range(0, n_bytes, 32)]


def paired_words(k: Builder, field: Field) -> list[Val]:
    """Implement ``Codes.words`` of nibbles: emit for every 16 bytes of ``qs`` a vector of 32 u16,
    low nibbles, then high ones. Bits above the lowest four are undefined.
    """
    shift = k.const([0] * 16 + [4] * 16, u16 * 32)
    return [k.concat(v, v).to(u16) >> shift for v in k.split(field("qs"), 16)]


def nibbles(k: Builder, field: Field) -> list[Val]:
    """Emit codes 0..15: a vector of the low nibbles of ``qs``, and one of the high nibbles."""
    qs = field("qs")
    return [qs & 15, qs >> 4]


def lookup_nibbles(k: Builder, field: Field, table: Sequence[int]) -> list[Val]:
    """Emit the look-up of the nibbles of ``qs`` in a table of 16 bytes: a vector for the low
    nibbles, and one for the high nibbles.
    """
    qs = field("qs")
    return [k.lookup(table, v) for v in (qs, qs >> 4)]


def load_halves(k: Builder, field: Field, name: str, at: int, apart: int) -> Val:
    """Emit one vector of 32 bytes of the field ``name``: 16 from byte ``at`` on, and 16 from byte
    ``at + apart`` on.
    """
    return k.concat(field(name, 16, at), field(name, 16, at + apart))
