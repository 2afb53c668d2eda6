"""Q2_K and Q3_K: super-blocks of 256 weights, in 16 sub-blocks of 16 with integer scales; the lower
two bits of codes are packed four to a byte.

``w = d * sc * q - dmin * m`` in Q2_K, and ``w = d * sc * q`` with signed ``sc`` and ``q`` in Q3_K.
"""

from __future__ import annotations

from typing import Any

import numpy as np

from treadle.formats.format import Blocks, Builder, Codes, Field, Isa, Val
from treadle.formats.k_offset import OffsetSearch, product
from treadle.formats.k_signed import SignedSearch
from treadle.formats.kernel_bits import bit_extract, load_halves, words_of
from treadle.formats.kernel_scales import (
    TWO_BITS,
    halves,
    in_floats,
    in_pairs,
    repeat,
    times,
    two_bits,
    two_factors,
)
from treadle.formats.numbers import super_blocks
from treadle.formats.packing import join_bits, split_bits
from treadle.jit.types import f32, i32, u8, u16, u32

# -- Q2_K: two bits, 16 sub-blocks of 16 -------------------------------------------------------
#
# Byte i of ``scales`` has a sub-block's scale in the low nibble and its minimum in the high one.
# 32 bytes of ``qs`` have 128 weights: byte j has weight j in the lowest two bits, then j + 32 and
# so on.

Q2_LAYOUT = np.dtype([("scales", "u1", (16,)), ("qs", "u1", (64,)), ("d", "<f2"), ("dmin", "<f2")])

Q2_SEARCH = OffsetSearch(
    n_sub=16,
    levels=3,
    top=15,
    grid=product(np.linspace(-0.3, 0.7, 5)),
    starts=tuple((float(i), float(j)) for i in range(4) for j in range(3)),
)


def read_2(blocks: Blocks) -> tuple[Any, ...]:
    """Unpack blocks [...] to uint8 ``sc`` [..., 16], codes 0..3 [..., 256] and ``m`` [..., 16];
    ``sc`` and ``m`` are integers of four bits, without the block's factors d and dmin.
    """
    both = blocks["scales"]
    return both & np.uint8(15), split_bits(blocks["qs"], 2, 32), both >> np.uint8(4)


def write_2(out: Blocks, found: Any) -> None:
    """Pack ``sc``, ``m`` and codes of ``found``, an ``Offset``, into blocks [n]."""
    out["scales"] = found.sc | found.m << np.uint8(4)
    out["qs"] = join_bits(found.q, 2, 32)


def words_2(k: Builder, field: Field) -> list[Val]:
    """Implement ``Codes.words``: emit codes in the lowest two bits of u16 words."""
    return [v >> 2 * i for v in words_of(k, field, "qs", 64) for i in range(4)]


def unpack_2(k: Builder, field: Field) -> list[Val]:
    """Implement ``Codes.unpack``: emit codes 0..3, in the order TWO_BITS."""
    return two_bits(k, field("qs"))


def in_halves_2(k: Builder, field: Field) -> list[Val]:
    """Implement ``Codes.in_halves``: emit codes 0..3."""
    both = [load_halves(k, field, "qs", at, 32) for at in (0, 16)]
    return [bit_extract(k, v, at, 2) for at in (0, 2, 4, 6) for v in both]


def steps_2(k: Builder, isa: Isa, field: Field) -> tuple[Val, Val, Val, Val]:
    """Implement ``Codes.steps``: emit ``sc`` and ``m`` of the 16 sub-blocks, ``d`` and ``dmin``."""
    both = field("scales")
    d, dmin = in_pairs(k, isa, field("d", 4))
    return both & 15, d, both >> 4, dmin


def unpack_folded_2(k: Builder, field: Field) -> list[Val]:
    """Implement ``unpack`` of ``Codes.folded``: emit ``sc * q``, 0..45."""
    return times(k, unpack_2(k, field), (field("scales") & 15).to(u16), 0, 0)


def scales_folded_2(k: Builder, isa: Isa, field: Field) -> tuple[Val, Val]:
    """Implement ``scales`` of ``Codes.folded``: emit ``d`` for each 32 codes, and ``-dmin * m`` for
    each 16.
    """
    d, m = two_factors(k, isa, field("d", 4), 16)
    first = k.shuffle(d, d, range(0, d.ty.lanes, 2))
    return first, (field("scales") >> 4).to(i32).to(f32) * m


Q2_FOLDED = Codes(
    unpack_folded_2, 0, 45, run=8, order=TWO_BITS, m_sub=16, scales=scales_folded_2, minimums=True
)
Q2_CODES = Codes(
    unpack_2,
    0,
    3,
    run=8,
    order=TWO_BITS,
    sub=16,
    scales=in_floats(steps_2),
    steps=steps_2,
    minimums=True,
    folded=Q2_FOLDED,
    levels=tuple(range(4)),
    words=words_2,
    in_halves=in_halves_2,
)
Q2_K = super_blocks("Q2_K", 10, Q2_LAYOUT, read_2, write_2, Q2_SEARCH, Q2_CODES)


# -- Q3_K: three bits around 4, 16 sub-blocks of 16; ``w = d * (sc - 32) * (q - 4)`` -----------
#
# The lower two bits are in ``qs`` as in Q2_K; the third bit of weight j + 32 i is bit i of byte j
# of ``hmask``. Scales have six bits: bytes 0 to 7 of ``scales`` have the lower nibbles of scales 0
# to 7 (low nibble) and 8 to 15 (high nibble); bytes 8 to 11 have the upper two bits, byte 8 + j
# those of scales j, j + 4, j + 8 and j + 12.

Q3_LAYOUT = np.dtype(
    [("hmask", "u1", (32,)), ("qs", "u1", (64,)), ("scales", "u1", (12,)), ("d", "<f2")]
)

Q3_SEARCH = SignedSearch(
    n_sub=16,
    half=4,
    top=32,
    grid=tuple(np.arange(3, 6.1, 0.25).tolist()),
    # The largest starts clip the largest sub-blocks, to favour all others.
    starts=tuple(np.arange(28.0, 44.0).tolist()),
)


def read_3(blocks: Blocks) -> tuple[Any, ...]:
    """Unpack blocks [...] to ``sc`` -32..31 [..., 16] and codes -4..3 [..., 256]."""
    packed = blocks["scales"]
    sc = split_bits(packed[..., :8], 4, 8) | split_bits(packed[..., 8:], 2, 4) << np.uint8(4)
    q = split_bits(blocks["qs"], 2, 32) | split_bits(blocks["hmask"], 1, 32) << np.uint8(2)
    return sc.view(np.int8) - np.int8(32), q.view(np.int8) - np.int8(4)


def write_3(out: Blocks, found: Any) -> None:
    """Pack ``sc`` and codes of ``found``, a ``Signed``, into blocks [n]."""
    scales = (found.sc + np.int8(32)).view(np.uint8)
    q = (found.q + np.int8(4)).view(np.uint8)
    out["scales"][:, :8] = join_bits(scales & np.uint8(15), 4, 8)
    out["scales"][:, 8:] = join_bits(scales >> np.uint8(4), 2, 4)
    out["qs"] = join_bits(q & np.uint8(3), 2, 32)
    out["hmask"] = join_bits(q >> np.uint8(2), 1, 32)


def unpack_3(k: Builder, field: Field, high: str = "hmask") -> list[Val]:
    """Implement ``Codes.unpack``: emit codes 0..7, in the order TWO_BITS; ``high`` names the field
    of their third bits.
    """
    thirds = [k.each(v, 16, 4) for v in k.evens(field(high), 8)]
    out = []
    for i, lower in enumerate(two_bits(k, field("qs"))):
        bits = [2 * (i // 2) + at for at in (0, 0, 4, 4, 1, 1, 5, 5)]  # a nibble per half block
        out.append(lower | bit_extract(k, thirds[i % 2], bits, 1, 2))
    return out


def words_3(k: Builder, field: Field) -> list[Val]:
    """Implement ``Codes.words``: emit codes 0..7 in u16 words."""
    (thirds,) = words_of(k, field, "hmask", 32)
    lower = [v >> 2 * i for v in words_of(k, field, "qs", 64) for i in range(4)]
    moved = [thirds << 2 - i if i < 2 else thirds >> i - 2 for i in range(8)]
    return [(low & 3) | (third & 4) for low, third in zip(lower, moved, strict=True)]


def in_halves_3(k: Builder, field: Field, high: str = "hmask") -> list[Val]:
    """Implement ``Codes.in_halves``: emit codes 0..7; ``high`` names the field of their third
    bits.
    """
    # The upper four bits of a byte belong to the second half.
    thirds = [load_halves(k, field, high, at, 0) for at in (0, 16)]
    thirds = [bit_extract(k, v, [0, 0, 4, 4], 4) for v in thirds]
    lower = enumerate(in_halves_2(k, field))
    return [low | bit_extract(k, thirds[i % 2], i // 2, 1, 2) for i, low in lower]


def six_bits_3(k: Builder, field: Field) -> Val:
    """Emit the six bits of each sub-block's scale, 0..63 (``sc + 32``), 16 bytes per block, u8."""
    packed = field("scales")
    n = packed.ty.lanes // 12
    words = packed.bits(u32 * (3 * n))
    ty = u32 * (4 * n)
    blocks = range(0, 3 * n, 3)
    lower = k.shuffle(words, words, [b + i for b in blocks for i in (0, 1, 0, 1)])
    upper = k.shuffle(words, words, [b + 2 for b in blocks for _ in range(4)])
    lower = lower >> k.const([0, 0, 4, 4] * n, ty)
    upper = upper >> k.const([0, 2, 4, 6] * n, ty)
    sc = (lower & 0x0F0F0F0F) | ((upper & 0x03030303) << 4)
    return sc.bits(u8 * (16 * n))


def steps_3(k: Builder, isa: Isa, field: Field) -> tuple[Val, Val, None, None]:
    """Implement ``Codes.steps``: emit the signed scales -32..31 of the 16 sub-blocks, and ``d``."""
    return six_bits_3(k, field).to(i32) - 32, halves(k, isa, field("d")), None, None


def unpack_folded_3(k: Builder, field: Field) -> list[Val]:
    """Implement ``unpack`` of ``Codes.folded``: emit ``128 + (32 - sc) * (q - 4)`` for stored
    ``sc`` and ``q``, 0..252. With ``sc - 32`` it would be 4..256, too much for a byte.
    """
    return times(k, unpack_3(k, field), 32 - six_bits_3(k, field).to(u16), 4, 128)


def scales_folded_3(k: Builder, isa: Isa, field: Field) -> tuple[Val, None]:
    """Implement ``scales`` of ``Codes.folded``: emit ``-d`` for each 32 codes."""
    return repeat(k, -halves(k, isa, field("d")), 8), None


Q3_FOLDED = Codes(unpack_folded_3, 128, 252, run=8, order=TWO_BITS, scales=scales_folded_3)
Q3_CODES = Codes(
    unpack_3,
    4,
    7,
    run=8,
    order=TWO_BITS,
    sub=16,
    scales=in_floats(steps_3),
    steps=steps_3,
    folded=Q3_FOLDED,
    levels=tuple(range(-4, 4)),
    words=words_3,
    in_halves=in_halves_3,
)
Q3_K = super_blocks("Q3_K", 11, Q3_LAYOUT, read_3, write_3, Q3_SEARCH, Q3_CODES)
