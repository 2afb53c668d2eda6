"""Scales in kernels: building blocks of the formats' ``scales`` functions."""

from __future__ import annotations

from collections.abc import Callable

from treadle.formats.format import Builder, Emit, Field, Isa, Val
from treadle.formats.kernel_bits import bit_extract
from treadle.jit.types import f16, f32, i16, i32, u8, u32


def halves(k: Builder, isa: Isa, *fields: Val) -> Val:
    """Emit f16 numbers widened to f32: all those of the first field, then those of the next. Each
    of ``fields`` has the numbers' bytes, and all have equally many.
    """
    both = k.concat(*fields)
    return isa.widen_f16(k, both.bits(f16 * (both.ty.lanes // 2)))


def repeat(k: Builder, v: Val, n: int) -> Val:
    """Emit each lane of ``v`` repeated ``n`` times in a row."""
    return k.shuffle(v, v, [i for i in range(v.ty.lanes) for _ in range(n)])


def shared(n: int) -> Callable[[Builder, Isa, Field], tuple[Val, None]]:
    """Return a ``Codes.scales`` for one f16 scale ``d`` per ``n`` times ``Codes.sub`` weights."""

    def scales(k: Builder, isa: Isa, field: Field) -> tuple[Val, None]:
        return repeat(k, halves(k, isa, field("d")), n), None

    return scales


# The order of two_bits' codes of 256 weights, in runs of 8. Each vector has two of a byte's codes,
# of both halves of the block: first the even runs, then the odd ones. Both eights of 16 weights
# that share a scale use the same lanes, so their dot products are scaled together.
TWO_BITS = tuple(
    tuple(
        half * 16 + code * 4 + i for code in (c, c + 1) for half in (0, 1) for i in (odd, odd + 2)
    )
    for c in (0, 2)
    for odd in (0, 1)
)


def two_bits(k: Builder, qs: Val) -> list[Val]:
    """Emit codes 0..3 in the order TWO_BITS; ``qs``: bytes of four codes, the first in the lowest
    bits.
    """
    twice = [k.each(v, 32, 2) for v in k.evens(qs, 8)]
    return [bit_extract(k, v, [at] * 4 + [at + 2] * 4, 2) for at in (0, 4) for v in twice]


def times(k: Builder, codes: list[Val], factors: Val, zero: int, offset: int) -> list[Val]:
    """Emit bytes ``(code - zero) * factor + offset`` of codes in the order TWO_BITS; ``factors``
    has one for every 16 codes.

    Two neighbours are multiplied as one 16-bit number, in which the second counts 256 times; since
    both results fit a byte, no carry passes between them.
    """
    n = factors.ty.lanes // 16
    out = []
    for part, runs in zip(codes, TWO_BITS, strict=True):
        at = [i * 16 + run // 2 for i in range(n) for run in runs for _ in range(4)]
        each = k.shuffle(factors, factors, at)
        pairs = part.bits(each.ty) - zero * 0x101
        out.append((pairs * each + offset * 0x101).bits(part.ty))
    return out


def in_pairs(k: Builder, isa: Isa, pairs: Val) -> tuple[Val, Val]:
    """Emit f32 ``d`` and ``dmin``, a lane per block; ``pairs``: four bytes per block, both as
    f16.
    """
    factors = halves(k, isa, pairs)
    n = factors.ty.lanes
    return k.shuffle(factors, factors, range(0, n, 2)), k.shuffle(factors, factors, range(1, n, 2))


def two_factors(k: Builder, isa: Isa, pairs: Val, times: int) -> tuple[Val, Val]:
    """Emit f32 ``d`` and ``-dmin`` of each block, each repeated ``times`` times; ``pairs``: four
    bytes per block, both as f16.
    """
    d, dmin = in_pairs(k, isa, pairs)
    return repeat(k, d, times), repeat(k, -dmin, times)


def in_floats(steps: Emit) -> Callable[[Builder, Isa, Field], tuple[Val, Val | None]]:
    """Return a ``Codes.scales`` made of ``steps``, a ``Codes.steps``: f32 ``d * sc``, and ``-dmin *
    m`` or None.
    """

    def scales(k: Builder, isa: Isa, field: Field) -> tuple[Val, Val | None]:
        sc, d, m, dmin = steps(k, isa, field)
        n = sc.ty.lanes // d.ty.lanes
        result = sc.to(i32).to(f32) * repeat(k, d, n)
        return result, None if m is None else m.to(i32).to(f32) * repeat(k, -dmin, n)

    return scales


def six_bits(k: Builder, isa: Isa, field: Field) -> tuple[Val, Val]:
    """Implement ``Codes.scales`` of Q4_K's packing (k_quants.py): emit ``d * sc`` and ``-dmin * m``
    of eight sub-blocks.
    """
    words = field("d", 16)
    n = words.ty.lanes // 16
    codes = _six_bits(k, words, [(b, what) for what in (0, 1) for b in range(n)])
    sc, less = k.split(codes, 8 * n)
    d, m = two_factors(k, isa, _heads(k, words), 8)
    return sc.to(i32).to(f32) * d, less.to(i32).to(f32) * m


def six_bit_steps(k: Builder, isa: Isa, field: Field) -> tuple[Val, Val, Val, Val]:
    """Implement ``Codes.steps`` of Q4_K's packing: emit ``sc``, ``d``, ``m`` and ``dmin`` of eight
    sub-blocks.
    """
    words = field("d", 16)
    n = words.ty.lanes // 16
    codes = _six_bits(k, words, [(b, what) for b in range(n) for what in (0, 1)])

    def widened(first: int) -> Val:
        """Emit eight bytes of each block widened to i16, within 128 bits, where one instruction
        suffices.
        """
        order = [at for b in range(n) for i in range(8) for at in (16 * b + first + i, 16 * n)]
        return k.shuffle(codes, k.zero(codes.ty), order).bits(i16 * (8 * n))

    d, dmin = in_pairs(k, isa, _heads(k, words))
    return widened(0), d, widened(8), dmin


def _heads(k: Builder, head: Val) -> Val:
    """Emit the four bytes of each block's d and dmin; ``head``: the 16 bytes before the codes."""
    words = head.bits(u32 * (head.ty.lanes // 4))
    return k.shuffle(words, words, range(0, words.ty.lanes, 4)).bits(u8 * (head.ty.lanes // 4))


def _six_bits(k: Builder, head: Val, order: list[tuple[int, int]]) -> Val:
    """Emit eight numbers of six bits, as bytes, for each pair of ``order``: the number of a block,
    and 0 for its scales or 1 for its minimums. ``head``: 16 bytes per block.

    A block has four 32-bit words: d and dmin, then A, B and C. The upper four numbers consist of
    C's nibbles and the bits of A or B above the lower six.
    """
    ty = u32 * (head.ty.lanes // 4)
    words = head.bits(ty)
    first = k.shuffle(words, words, [4 * b + 1 + what for b, what in order for _ in range(2)])
    nibbles = k.shuffle(words, words, [4 * b + 3 for b, _ in order for _ in range(2)])
    first = first >> k.const([0, 2] * len(order), ty)
    nibbles = nibbles >> k.const([at for _, what in order for at in (0, 4 * what)], ty)
    codes = (first & k.const([0x3F3F3F3F, 0x30303030] * len(order), ty)) | (
        nibbles & k.const([0, 0x0F0F0F0F] * len(order), ty)
    )
    return codes.bits(head.ty)
