"""Codebooks in a kernel: points gathered from a table, and the signs that go with them.

A table's bytes are codes already: the offset is added while a kernel is built, not while it runs.
Everything is done for 64 weights at a time, which are 8 or 16 points.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING

import numpy as np

from treadle.formats.grids import IQ1
from treadle.formats.kernel_scales import Field, halves, repeat
from treadle.formats.shifted import DOWN
from treadle.jit.types import f32, i32, u8, u16, u32, u64

if TYPE_CHECKING:
    from treadle.formats.grids import Grid
    from treadle.isa.isa import Isa
    from treadle.jit.builder import Builder
    from treadle.jit.values import Val

ORDER = ((0, 1), (2, 3), (4, 5), (6, 7))  # runs of 32 codes in the vectors of 64
BYTES = 64


def gather_points(k: Builder, grid: Grid, index: Val, offset: int, times: int = 1) -> Val:
    """``offset + times * point`` of as many points as fill 64 bytes: u8 * 64."""
    codes = (offset + times * grid.points.astype(np.int16)).astype(np.uint8)
    ty = {4: u32, 8: u64}[grid.dim] * (BYTES // grid.dim)
    return k.gather(k.table(codes), index.to(i32), ty).bits(u8 * BYTES)


def part(k: Builder, v: Val, i: int) -> Val:
    """The ``i``-th of four parts of a vector."""
    n = v.ty.lanes // 4
    return k.shuffle(v, v, range(i * n, (i + 1) * n))


def high_bits(k: Builder, packed: Val, width: int) -> Val:
    """The numbers of ``width`` bits in each byte, times 256 (above a low byte of an index): u16."""
    each = 8 // width
    n = each * packed.ty.lanes
    zero_and_byte = [at for i in range(n) for at in (packed.ty.lanes, i // each)]
    words = k.shuffle(packed, k.zero(packed.ty), zero_and_byte).bits(u16 * n)
    shifts = k.const([*range(0, 8, width)] * packed.ty.lanes, words.ty)
    return (words >> shifts) & (((1 << width) - 1) << 8)


def sevens(k: Builder, words: Val) -> Val:
    """The four lowest groups of 7 bits of words of 32, a byte each."""
    apart = words & 127
    for i in (1, 2, 3):
        apart = apart | ((words << i) & (127 << (8 * i)))
    return apart.bits(u8 * (4 * words.ty.lanes))


def even_signs(codes: Val) -> Val:
    """The sign bytes behind 7-bit codes: the top bit makes the number of ones even."""
    ones = codes ^ (codes << 4)
    ones = ones ^ (ones << 2)
    ones = ones ^ (ones << 1)
    return codes | (ones & 128)


def put_on(k: Builder, codes: Val, signs: Val, offset: int) -> Val:
    """``codes`` mirrored at ``offset`` where the bits of ``signs``, a byte for eight, are set."""
    bits = k.const([1 << i for i in range(8)] * signs.ty.lanes, codes.ty)
    plus = (repeat(k, signs, 8) & bits).eq(0)
    return k.select(plus, codes, 2 * offset - codes)


def odd_steps(k: Builder, isa: Isa, steps: Val, d: Val, factor: float) -> Val:
    """``d * (2 * step + 1) * factor``: ``d`` the bytes of an f16 (once or more), ``factor`` a power
    of two.
    """
    odd = (steps.to(i32) * 2 + 1).to(f32)
    unit = halves(k, isa, d) * factor
    return odd * repeat(k, unit, odd.ty.lanes // unit.ty.lanes)


def nibble_steps(k: Builder, packed: Val) -> Val:
    """Nibbles in their order, the low one of each byte first."""
    n = packed.ty.lanes
    zipped = [i + n * j for i in range(n) for j in range(2)]
    return k.shuffle(packed & 15, packed >> 4, zipped)


def nibble_scales(factor: float) -> Callable[[Builder, Isa, Field], tuple[Val, None]]:
    """``scales`` of the formats whose ``scales`` are nibbles: ``d * (2 * scale + 1) * factor``."""

    def scales(k: Builder, isa: Isa, field: Field) -> tuple[Val, None]:
        return odd_steps(k, isa, nibble_steps(k, field("scales")), field("d"), factor), None

    return scales


def shifted(k: Builder, code: Val) -> Val:
    """16 + 8 times the shifted points of IQ1 that u16 codes stand for, as in shifted.py."""
    up = gather_points(k, IQ1, code & (DOWN - 1), 17, 8).bits(u64 * code.ty.lanes)
    down = up - 0x0202020202020202  # no byte is less than 9
    return k.select((code & DOWN) > 0, down, up).bits(u8 * BYTES)
