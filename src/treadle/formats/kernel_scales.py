"""Scales in a kernel: what several formats' ``scales`` functions are made of."""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING

from treadle.jit.types import f16, f32, i32, u8

if TYPE_CHECKING:
    from treadle.isa.isa import Isa
    from treadle.jit.builder import Builder
    from treadle.jit.values import Val

Field = Callable[[str], "Val"]


def halves(k: Builder, isa: Isa, *fields: Val) -> Val:
    """The bytes of f16 numbers (as many in each field) as f32, end to end."""
    both = k.concat(*fields)
    wide: Val = isa.widen_f16(k, both.bits(f16 * (both.ty.lanes // 2)))
    return wide


def repeat(k: Builder, v: Val, n: int) -> Val:
    """Each lane ``n`` times in a row."""
    return k.shuffle(v, v, [i for i in range(v.ty.lanes) for _ in range(n)])


def shared(n: int) -> Callable[[Builder, Isa, Field], tuple[Val, None]]:
    """``scales`` of formats with one scale ``d`` for ``n`` times ``sub`` weights."""

    def scales(k: Builder, isa: Isa, field: Field) -> tuple[Val, None]:
        return repeat(k, halves(k, isa, field("d")), n), None

    return scales


def spread_bits(k: Builder, packed: Val, value: int) -> Val:
    """A byte for every bit of ``packed``, the lowest first: ``value`` where it is set, else 0."""
    apart = repeat(k, packed, 8)
    bits = k.const([1 << i for i in range(8)] * packed.ty.lanes, apart.ty)
    none = k.zero(apart.ty)
    return k.select((apart & bits).eq(none), none, k.const(value, apart.ty))


TWO_BITS = ((0, 4), (1, 5), (2, 6), (3, 7))  # what two_bits gives of 256 weights


def two_bits(qs: Val) -> list[Val]:
    """Four codes of each byte, the lowest first: of both halves of a block, 32 at a time."""
    return [qs & 3, (qs >> 2) & 3, (qs >> 4) & 3, qs >> 6]


def six_bits(k: Builder, isa: Isa, field: Field) -> tuple[Val, Val]:
    """``d * sc`` and ``-dmin * m`` of eight sub-blocks, packed as scales6.py says."""
    packed = field("scales")
    some, none = [255] * 4, [0] * 4
    first = k.shuffle(packed, packed, [0, 1, 2, 3, 0, 1, 2, 3, 4, 5, 6, 7, 4, 5, 6, 7])
    nibbles = k.shuffle(packed, packed, [8, 9, 10, 11] * 4)
    of_four, of_eight = [63] * 4 + none, none + [0x30] * 4
    codes = (
        (first & k.const(of_four * 2, u8 * 16))
        | ((first >> 2) & k.const(of_eight * 2, u8 * 16))
        | ((nibbles & 15) & k.const(none + some + none + none, u8 * 16))
        | ((nibbles >> 4) & k.const(none + none + none + some, u8 * 16))
    )
    factors = halves(k, isa, field("d"), field("dmin"))
    factors = repeat(k, factors * k.const([1.0, -1.0], f32 * 2), 8)
    scaled = codes.to(i32).to(f32) * factors
    d, m = k.split(scaled, 8)
    return d, m
