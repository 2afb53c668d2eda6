"""Q4_K, Q5_K and Q6_K: super-blocks of 256 weights, whose sub-blocks have integer scales.

``w = d * sc * q - dmin * m`` in Q4_K and Q5_K, and ``w = d * sc * q`` with signed ``sc`` and ``q``
in Q6_K.
"""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import numpy as np
import numpy.typing as npt

from treadle.formats.format import Blocks, Builder, Codes, Field, Isa, Val
from treadle.formats.k_offset import OffsetSearch, product
from treadle.formats.k_signed import SignedSearch
from treadle.formats.kernel_bits import bit_extract, load_halves, words_of
from treadle.formats.kernel_scales import halves, in_floats, six_bit_steps, six_bits
from treadle.formats.numbers import super_blocks
from treadle.formats.packing import join_bits, split_bits
from treadle.jit.types import i8

U8Array = npt.NDArray[np.uint8]


# -- Q4_K: nibbles, eight sub-blocks of 32 -----------------------------------------------------
#
# Byte j of each 32 of ``qs`` has weight j of one sub-block in its low nibble, and of the next in
# its high one. Scales and minimums have six bits: bytes 0 to 3 of ``scales`` have scales 0 to 3,
# bytes 4 to 7 minimums 0 to 3, in their lower six bits. Bytes 8 to 11 have the lower nibbles of
# scales 4 to 7 (low) and minimums 4 to 7 (high), whose upper two bits are the top bits of bytes
# 0 to 3 and 4 to 7.

Q4_LAYOUT = np.dtype([("d", "<f2"), ("dmin", "<f2"), ("scales", "u1", (12,)), ("qs", "u1", (128,))])

Q4_SEARCH = OffsetSearch(
    n_sub=8,
    levels=15,
    top=63,
    grid=product(np.linspace(-1, 0.5, 7)),
    starts=tuple((float(i), float(j)) for i in range(4) for j in range(3)),
)


def split_scales(packed: U8Array) -> tuple[U8Array, U8Array]:
    """Unpack ``scales`` bytes [..., 12] to ``sc`` [..., 8] and ``m`` [..., 8], all below 64."""
    first = packed[..., :8]
    nibbles = packed[..., 8:]
    upper = first >> np.uint8(6) << np.uint8(4)
    first = first & np.uint8(63)
    scales = np.concatenate([first[..., :4], nibbles & np.uint8(15) | upper[..., :4]], axis=-1)
    minima = np.concatenate([first[..., 4:], nibbles >> np.uint8(4) | upper[..., 4:]], axis=-1)
    return scales, minima


def join_scales(scales: U8Array, minima: U8Array) -> U8Array:
    """Pack ``sc`` and ``m`` [..., 8] into ``scales`` bytes [..., 12]; the inverse of
    ``split_scales``.
    """
    first = np.concatenate([scales[..., :4], minima[..., :4]], axis=-1)
    last = np.concatenate([scales[..., 4:], minima[..., 4:]], axis=-1)
    nibbles = scales[..., 4:] & np.uint8(15) | minima[..., 4:] << np.uint8(4)
    return np.concatenate([first | last >> np.uint8(4) << np.uint8(6), nibbles], axis=-1)


def read_4(blocks: Blocks) -> tuple[Any, ...]:
    """Unpack blocks [...] to ``sc`` [..., 8], codes 0..15 [..., 256] and ``m`` [..., 8]."""
    scales, minimums = split_scales(blocks["scales"])
    return scales, split_bits(blocks["qs"], 4, 32), minimums


def write_4(out: Blocks, found: Any) -> None:
    """Pack ``sc``, ``m`` and codes of ``found``, an ``Offset``, into blocks [n]."""
    out["scales"] = join_scales(found.sc, found.m)
    out["qs"] = join_bits(found.q, 4, 32)


def unpack_4(k: Builder, field: Field) -> list[Val]:
    """Implement ``Codes.unpack``: emit codes 0..15, the first halves of sub-blocks 0, 2, 4 and 6,
    their second halves, then those of 1, 3, 5 and 7.
    """
    first, second = k.evens(field("qs"), 16)
    return [bit_extract(k, v, at, 4) for at in (0, 4) for v in (first, second)]


def in_order_4(k: Builder, field: Field) -> list[Val]:
    """Implement ``Codes.in_order``: emit codes 0..15, a sub-block per vector."""
    return [bit_extract(k, field("qs", 32, 32 * i), at, 4) for i in range(4) for at in (0, 4)]


def in_halves_4(k: Builder, field: Field) -> list[Val]:
    """Implement ``Codes.in_halves``: emit codes 0..15."""
    both = [load_halves(k, field, "qs", at, 64) for at in (0, 16, 32, 48)]
    return [bit_extract(k, v, at, 4) for i in (0, 2) for at in (0, 4) for v in both[i : i + 2]]


def words_4(k: Builder, field: Field) -> list[Val]:
    """Implement ``Codes.words``: emit codes in the lowest four bits of u16 words."""
    return [v >> at for v in words_of(k, field, "qs", 128) for at in (0, 4)]


# Both halves of a sub-block use the same lanes, so their dot products are scaled together.
Q4_ORDER = ((0, 4, 8, 12), (1, 5, 9, 13), (2, 6, 10, 14), (3, 7, 11, 15))
Q4_CODES = Codes(
    unpack_4,
    0,
    15,
    run=16,
    order=Q4_ORDER,
    scales=six_bits,
    steps=six_bit_steps,
    minimums=True,
    levels=tuple(range(16)),
    words=words_4,
    in_order=in_order_4,
    in_halves=in_halves_4,
)
Q4_K = super_blocks("Q4_K", 12, Q4_LAYOUT, read_4, write_4, Q4_SEARCH, Q4_CODES)


# -- Q5_K: five bits, eight sub-blocks of 32 ---------------------------------------------------
#
# Scales and the lower four bits are stored as in Q4_K. The fifth bit of weight j of sub-block i is
# bit i of byte j of ``qh``.

Q5_LAYOUT = np.dtype(
    [
        ("d", "<f2"),
        ("dmin", "<f2"),
        ("scales", "u1", (12,)),
        ("qh", "u1", (32,)),
        ("qs", "u1", (128,)),
    ]
)

Q5_SEARCH = replace(Q4_SEARCH, levels=31)


def read_5(blocks: Blocks) -> tuple[Any, ...]:
    """Unpack blocks [...] to ``sc`` [..., 8], codes 0..31 [..., 256] and ``m`` [..., 8]."""
    scales, lower, minimums = read_4(blocks)
    return scales, lower | split_bits(blocks["qh"], 1, 32) << np.uint8(4), minimums


def write_5(out: Blocks, found: Any) -> None:
    """Pack ``sc``, ``m`` and codes of ``found``, an ``Offset``, into blocks [n]."""
    write_4(out, found._replace(q=found.q & np.uint8(15)))
    out["qh"] = join_bits(found.q >> np.uint8(4), 1, 32)


def unpack_5(k: Builder, field: Field) -> list[Val]:
    """Implement ``Codes.unpack``: emit codes 0..31, in the order of ``unpack_4``."""
    lower = k.evens(field("qs"), 16)
    fifths = [k.each(v, 16, 4) for v in k.evens(field("qh"), 16)]
    out = []
    for odd in (0, 1):
        for first, fifth in zip(lower, fifths, strict=True):
            bits = bit_extract(k, fifth, [odd + i for i in (0, 0, 2, 2, 4, 4, 6, 6)], 1, 4)
            out.append(bit_extract(k, first, 4 * odd, 4) | bits)
    return out


def in_order_5(k: Builder, field: Field) -> list[Val]:
    """Implement ``Codes.in_order``: emit codes 0..31, a sub-block of 32 per vector."""
    fifths = field("qh")
    lower = enumerate(in_order_4(k, field))
    return [low | bit_extract(k, fifths, i, 1, 4) for i, low in lower]


def in_halves_5(k: Builder, field: Field) -> list[Val]:
    """Implement ``Codes.in_halves``: emit codes 0..31."""
    # The upper four bits of a byte belong to the second half.
    fifths = [load_halves(k, field, "qh", at, 0) for at in (0, 16)]
    fifths = [bit_extract(k, v, [0, 0, 4, 4], 4) for v in fifths]
    lower = enumerate(in_halves_4(k, field))
    return [low | bit_extract(k, fifths[i % 2], i // 2, 1, 4) for i, low in lower]


def words_5(k: Builder, field: Field) -> list[Val]:
    """Implement ``Codes.words``: emit codes 0..31 in u16 words."""
    (fifths,) = words_of(k, field, "qh", 32)
    moved = [fifths << 4 - i if i < 4 else fifths >> i - 4 for i in range(8)]
    lower = words_4(k, field)
    return [(low & 15) | (fifth & 16) for low, fifth in zip(lower, moved, strict=True)]


Q5_CODES = Codes(
    unpack_5,
    0,
    31,
    run=16,
    order=Q4_ORDER,
    scales=six_bits,
    steps=six_bit_steps,
    minimums=True,
    levels=tuple(range(32)),
    words=words_5,
    in_order=in_order_5,
    in_halves=in_halves_5,
)
Q5_K = super_blocks("Q5_K", 13, Q5_LAYOUT, read_5, write_5, Q5_SEARCH, Q5_CODES)


# -- Q6_K: six bits around 32, 16 sub-blocks of 16; ``w = d * sc * (q - 32)`` ------------------
#
# The scale of a sub-block is a signed byte. 64 bytes of ``ql`` have the lower nibbles of 128
# weights, byte j those of weights j and j + 64; 32 bytes of ``qh`` have their upper two bits, byte
# j those of weights j, j + 32, j + 64 and j + 96.

Q6_LAYOUT = np.dtype(
    [("ql", "u1", (128,)), ("qh", "u1", (64,)), ("scales", "i1", (16,)), ("d", "<f2")]
)

# With so many codes, a sub-block of 16 may leave the outermost unused, for a finer step.
Q6_SEARCH = SignedSearch(
    n_sub=16,
    half=32,
    top=128,
    grid=tuple(np.arange(24, 32.6, 0.25).tolist()),
    starts=(127.0, 126.0, 125.0),
)


def read_6(blocks: Blocks) -> tuple[Any, ...]:
    """Unpack blocks [...] to ``sc``, int8 [..., 16], and codes -32..31 [..., 256]."""
    q = split_bits(blocks["ql"], 4, 64) | split_bits(blocks["qh"], 2, 32) << np.uint8(4)
    return blocks["scales"], q.view(np.int8) - np.int8(32)


def write_6(out: Blocks, found: Any) -> None:
    """Pack ``sc`` and codes of ``found``, a ``Signed``, into blocks [n]."""
    q = (found.q + np.int8(32)).view(np.uint8)
    out["scales"] = found.sc
    out["ql"] = join_bits(q & np.uint8(15), 4, 64)
    out["qh"] = join_bits(q >> np.uint8(4), 2, 32)


def unpack_6(k: Builder, field: Field) -> list[Val]:
    """Implement ``Codes.unpack``: emit codes 0..63. For each half of the block: the first eights of
    sub-blocks 0 to 3, their second eights, then those of sub-blocks 4 to 7.
    """
    lower = k.evens(field("ql"), 8)
    upper = k.evens(field("qh"), 8)
    out = []
    for late in (0, 4):
        for nibbles, pairs in zip(lower, upper, strict=True):
            # The 16 bytes of each half, twice: for sub-blocks 0 and 1 (4, 5), then 2 and 3 (6, 7).
            twice = k.each(pairs, 16, 2)
            high = bit_extract(k, twice, [late + i for i in (0, 0, 2, 2)], 2, 4)
            out.append(bit_extract(k, nibbles, late, 4) | high)
    return out


def in_order_6(k: Builder, field: Field) -> list[Val]:
    """Implement ``Codes.in_order``: emit codes 0..63, 64 per vector."""
    out = []
    for half in (0, 1):
        nibbles = field("ql", 64, 64 * half)
        pairs = field("qh", 32, 32 * half)
        twice = k.concat(pairs, pairs)
        for late in (0, 4):
            high = bit_extract(k, twice, [late] * 4 + [late + 2] * 4, 2, 4)
            out.append(bit_extract(k, nibbles, late, 4) | high)
    return out


def in_halves_6(k: Builder, field: Field) -> list[Val]:
    """Implement ``Codes.in_halves``: emit codes 0..63."""
    nibbles = [load_halves(k, field, "ql", at, 64) for at in (0, 16, 32, 48)]
    pairs = [load_halves(k, field, "qh", at, 32) for at in (0, 16)]
    return [
        bit_extract(k, nibbles[i % 4], i // 4 * 4, 4)
        | bit_extract(k, pairs[i % 2], i // 2 * 2, 2, 4)
        for i in range(8)
    ]


def steps_6(k: Builder, isa: Isa, field: Field) -> tuple[Val, Val, None, None]:
    """Implement ``Codes.steps``: emit ``sc`` of the 16 sub-blocks, and ``d``."""
    sc = field("scales")
    return sc.bits(i8.like(sc.ty)), halves(k, isa, field("d")), None, None


# Both halves of a sub-block use the same lanes, so their dot products are scaled together.
Q6_ORDER = tuple(
    tuple(half * 16 + sub * 2 + i for half in (0, 1) for sub in range(late, late + 4))
    for late in (0, 4)
    for i in (0, 1)
)
Q6_CODES = Codes(
    unpack_6,
    32,
    63,
    run=8,
    order=Q6_ORDER,
    sub=16,
    scales=in_floats(steps_6),
    steps=steps_6,
    in_order=in_order_6,
    in_halves=in_halves_6,
)
Q6_K = super_blocks("Q6_K", 14, Q6_LAYOUT, read_6, write_6, Q6_SEARCH, Q6_CODES)
