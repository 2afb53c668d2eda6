"""Codebooks in kernels: points gathered from a table, and their signs.

A table's bytes already include the offset of codes, which is added when a kernel is built.
Functions process 64 weights at a time, which are 8 or 16 points.
"""

from __future__ import annotations

from collections.abc import Callable

import numpy as np

from treadle.formats.format import Builder, Field, Isa, Val
from treadle.formats.grids import IQ1, Codebook
from treadle.formats.kernel_bits import bit_spread, count_ones, multishift
from treadle.formats.kernel_scales import halves, repeat
from treadle.jit.types import f32, i8, i32, u8, u16, u32, u64

BYTES = 64
# Runs of 8 codes in vectors of 64: the first of every four, then the second ones and so on. Eights
# of one sub-block then use the same lanes, so that their dot products are scaled together, and
# every four of their indices or sign bytes lie in one 64-bit lane.
ORDER = tuple(tuple(range(i, 32, 4)) for i in range(4))


def gather_points(k: Builder, grid: Codebook, index: Val, offset: int, times: int = 1) -> Val:
    """Emit ``offset + times * point`` of the points of ``grid`` with the numbers ``index``, as many
    as fill 64 bytes: u8 * 64.
    """
    codes = (offset + times * grid.points.astype(np.int16)).astype(np.uint8)
    ty = {4: u32, 8: u64}[grid.dim] * (BYTES // grid.dim)
    return k.gather(k.table(codes), index, ty).bits(u8 * BYTES)


def codes_per_8(k: Builder, codes: Val) -> list[Val]:
    """Emit four vectors u64 * 8 of codes, one code per eight weights, in ORDER. ``codes``: u8, of
    which the first four of each 8 bytes are used.
    """
    n = codes.ty.lanes // 8
    none = [codes.ty.lanes] * (codes.ty.lanes // 8 - 1)
    out = []
    for i in range(4):
        alone = [at for word in range(8) for at in (word * n + i, *none)]
        out.append(k.shuffle(codes, k.zero(codes.ty), alone).bits(u64 * 8))
    return out


def codes_per_4(k: Builder, codes: Val) -> list[Val]:
    """Emit four vectors u32 * 16 of codes, one code per four weights, in ORDER. ``codes``: 64
    codes, u8.
    """
    none = [codes.ty.lanes] * 3
    out = []
    for places in ORDER:
        wide = [at for e in places for j in (0, 1) for at in (2 * e + j, *none)]
        out.append(k.shuffle(codes, k.zero(codes.ty), wide).bits(u32 * 16))
    return out


def high_bits(k: Builder, packed: Val, width: int) -> Val:
    """Emit the ``width``-bit numbers in each byte of ``packed``, the lowest first, as u16 times
    256: the high bits of indices.
    """
    each = 8 // width
    n = each * packed.ty.lanes
    zero_and_byte = [at for i in range(n) for at in (packed.ty.lanes, i // each)]
    words = k.shuffle(packed, k.zero(packed.ty), zero_and_byte).bits(u16 * n)
    shifts = k.const([*range(0, 8, width)] * packed.ty.lanes, words.ty)
    return (words >> shifts) & (((1 << width) - 1) << 8)


def sign_bytes(k: Builder, signs: Val) -> Val:
    """Emit each four bytes of ``signs`` twice, as ``apply_signs`` expects them."""
    return k.each(signs, 4, 2)


def signs_of_7_bits(k: Builder, words: Val, at: int) -> Val:
    """Emit the sign bytes of four 7-bit codes, which begin at bit ``at`` of each 8 bytes, as
    ``apply_signs`` expects them.
    """
    return even_signs(k, multishift(k, words, [*range(at, at + 28, 7)] * 2) & 127)


def even_signs(k: Builder, codes: Val) -> Val:
    """Emit the sign bytes of 7-bit codes: the top bit makes the number of ones even."""
    return codes | (count_ones(k, codes) << 7)


def apply_signs(k: Builder, codes: list[Val], signs: Val, offset: int, step: int = 1) -> list[Val]:
    """Emit ``codes``, which are in ORDER and have ``offset`` added, negated (``2 * offset - code``)
    where their bit in ``signs`` is set. Eight codes use one sign byte: every ``step``-th of each 8
    sign bytes.
    """
    out = []
    for i, v in enumerate(codes):
        sign = bit_spread(k, signs, [8 * step * i + bit for bit in range(8)], 7)
        out.append(k.select(sign.bits(i8 * BYTES) < 0, 2 * offset - v, v))
    return out


def odd_steps(k: Builder, isa: Isa, steps: Val, d: Val, factor: float) -> Val:
    """Emit f32 ``d * (2 * step + 1) * factor`` of each of ``steps``; ``d``: the bytes of one f16
    per block; ``factor``: a power of two.
    """
    odd = (steps.to(i32) * 2 + 1).to(f32)
    unit = halves(k, isa, d) * factor
    return odd * repeat(k, unit, odd.ty.lanes // unit.ty.lanes)


def nibble_steps(k: Builder, packed: Val) -> Val:
    """Emit the nibbles of ``packed`` in order, the low one of each byte first."""
    n = packed.ty.lanes
    zipped = [i + n * j for i in range(n) for j in range(2)]
    return k.shuffle(packed & 15, packed >> 4, zipped)


def nibble_scales(factor: float) -> Callable[[Builder, Isa, Field], tuple[Val, None]]:
    """Return a ``Codes.scales`` for nibbles in the field ``scales``: ``d * (2 * scale + 1) *
    factor``.
    """

    def scales(k: Builder, isa: Isa, field: Field) -> tuple[Val, None]:
        return odd_steps(k, isa, nibble_steps(k, field("scales")), field("d"), factor), None

    return scales


def shifted(k: Builder, index: Val, down: Val) -> Val:
    """Emit IQ1's shifted points (iq1.py) of the numbers ``index``, times 8, plus 16: u8 * 64.
    ``down``: mask of those that are shifted down.
    """
    up = gather_points(k, IQ1, index, 17, 8).bits(u64 * 8)
    return k.select(down, up - 0x0202020202020202, up).bits(u8 * BYTES)  # no byte is less than 9
