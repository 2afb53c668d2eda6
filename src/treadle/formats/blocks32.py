"""Q4_0, Q4_1, Q5_0, Q5_1 and Q8_0: 32 weights with one scale, and in the _1 formats a minimum.

``w = d * (q - offset)``, or ``w = d * q + m``. Byte j of ``qs`` holds weight j in its low nibble
and weight j + 16 in its high one; the fifth bit of Q5's weight j is bit j of ``qh``. Q8_0 has
signed bytes.
"""

from __future__ import annotations

from collections.abc import Callable
from operator import itemgetter
from typing import Any

import numpy as np

from treadle.formats.format import Blocks, Builder, Codes, F32Array, Field, Val
from treadle.formats.k_offset import Offset, OffsetSearch, product
from treadle.formats.k_signed import Signed, SignedSearch
from treadle.formats.kernel_bits import bit_spread, nibbles, paired_words
from treadle.formats.numbers import Weighted, in_bits, one_scale
from treadle.formats.packing import join_bits, split_bits
from treadle.formats.rounding import (
    RoundedBlocks,
    half_away,
    inverse,
    quantize_unsigned,
    signed,
    to_int,
)

Q4_0_LAYOUT = np.dtype([("d", "<f2"), ("qs", "u1", (16,))])
Q4_1_LAYOUT = np.dtype([("d", "<f2"), ("m", "<f2"), ("qs", "u1", (16,))])
Q5_0_LAYOUT = np.dtype([("d", "<f2"), ("qh", "u1", (4,)), ("qs", "u1", (16,))])
Q5_1_LAYOUT = np.dtype([("d", "<f2"), ("m", "<f2"), ("qh", "u1", (4,)), ("qs", "u1", (16,))])
Q8_0_LAYOUT = np.dtype([("d", "<f2"), ("qs", "i1", (32,))])
HALVES = ((0,), (1,))  # weights 0 to 15, then 16 to 31


# -- four bits ---------------------------------------------------------------------------------

read_4, write_4 = in_bits(4, 16)
Q4_0_CODES = Codes(
    nibbles, 8, 15, run=16, order=HALVES, levels=tuple(range(-8, 8)), words=paired_words
)
Q4_1_CODES = Codes(
    nibbles, 0, 15, m="m", run=16, order=HALVES, levels=tuple(range(16)), words=paired_words
)


# With importances, scales (and minimums) are searched for the least weighted error. The grid has
# the unrounded code of the largest magnitude; beyond 8 that weight is clipped to favour the others.
Q4_0_SEARCH = SignedSearch(
    n_sub=1, half=8, top=1, grid=tuple(np.arange(4, 12.1, 0.25).tolist()), starts=()
)
Q4_1_SEARCH = OffsetSearch(
    n_sub=1, levels=15, top=1, grid=product(np.linspace(-1, 2, 10)), starts=((0.0, 0.0),)
)


def signed_numbers(half: int) -> Callable[[Any], RoundedBlocks]:
    """Return a function that converts a ``Signed`` search result, with blocks of one sub-block, to
    RoundedBlocks: codes ``q + half``, scale ``d * sc`` (``sc`` is -1, or 0 in a block of zeros).

    A NaN weight makes ``d`` NaN, an infinite weight makes it infinite or NaN.
    """

    def numbers(found: Signed) -> RoundedBlocks:
        with np.errstate(invalid="ignore"):  # infinity times 0
            d = found.d * found.sc[:, 0]
        return RoundedBlocks(d, (found.q + np.int8(half)).view(np.uint8))

    return numbers


def offset_numbers(found: Offset) -> RoundedBlocks:
    """Convert an ``Offset`` search result, with blocks of one sub-block, to RoundedBlocks: codes,
    scale ``d * sc`` and minimum ``-dmin * m``; ``sc`` and ``m`` are 0 or 1.
    """
    with np.errstate(invalid="ignore"):
        d = found.d * found.sc[:, 0].astype(np.float32)
    return RoundedBlocks(d, found.q, -found.dmin * found.m[:, 0].astype(np.float32))


def round_4_0(x: F32Array, weights: F32Array | None) -> RoundedBlocks:
    """Round float32 [n, 32] to Q4_0 codes 0..15, bit-identical to ggml; ``weights`` are ignored."""
    return signed(x, 8)


def round_4_1(x: F32Array, weights: F32Array | None) -> RoundedBlocks:
    """Round float32 [n, 32] to Q4_1 codes, bit-identical to ggml: the smallest weight becomes 0,
    the largest 15. ``weights`` are ignored.
    """
    return quantize_unsigned(x, 15)


Q4_0 = one_scale(
    "Q4_0",
    2,
    32,
    Q4_0_LAYOUT,
    read_4,
    write_4,
    round_4_0,
    Q4_0_CODES,
    offset=8,
    weighted=Weighted(Q4_0_SEARCH, signed_numbers(8)),
)
Q4_1 = one_scale(
    "Q4_1",
    3,
    32,
    Q4_1_LAYOUT,
    read_4,
    write_4,
    round_4_1,
    Q4_1_CODES,
    weighted=Weighted(Q4_1_SEARCH, offset_numbers),
)


# -- five bits ---------------------------------------------------------------------------------


def read_5(blocks: Blocks) -> Any:
    """Unpack blocks [...] to codes 0..31, uint8 [..., 32]."""
    return read_4(blocks) | split_bits(blocks["qh"], 1, 1) << np.uint8(4)


def write_5(out: Blocks, found: RoundedBlocks) -> None:
    """Pack codes 0..31, ``found.q`` [n, 32], into ``qs`` and ``qh`` of blocks [n]."""
    out["qs"] = join_bits(found.q & np.uint8(15), 4, 16)
    out["qh"] = join_bits(found.q >> np.uint8(4), 1, 1)


Q5_0_SEARCH = SignedSearch(
    n_sub=1, half=16, top=1, grid=tuple(np.arange(8, 20.1, 0.25).tolist()), starts=()
)
Q5_1_SEARCH = OffsetSearch(
    n_sub=1, levels=31, top=1, grid=product(np.linspace(-2, 2, 9)), starts=((0.0, 0.0),)
)


def round_5_0(x: F32Array, weights: F32Array | None) -> RoundedBlocks:
    """Round float32 [n, 32] to Q5_0 codes 0..31, bit-identical to ggml; ``weights`` are ignored."""
    return signed(x, 16)


def round_5_1(x: F32Array, weights: F32Array | None) -> RoundedBlocks:
    """Round float32 [n, 32] to Q5_1 codes, bit-identical to ggml: the smallest weight becomes 0,
    the largest 31. ``weights`` are ignored.
    """
    return quantize_unsigned(x, 31)


def with_fifths(at: int) -> Callable[[Builder, Field], list[Val]]:
    """Return a ``Codes.unpack`` that emits codes 0..31, those of the first 16 weights, then the
    others; ``at``: bit offset of ``qh`` in the block (16 in Q5_0, 32 in Q5_1).
    """

    def unpack(k: Builder, field: Field) -> list[Val]:
        head = k.each(field("d", 8), 8, 2)
        lower = nibbles(k, field)
        fifths = (bit_spread(k, head, range(at + i, at + i + 16), 4) for i in (0, 16))
        return [low | fifth for low, fifth in zip(lower, fifths, strict=True)]

    return unpack


Q5_0_CODES = Codes(with_fifths(16), 16, 31, run=16, order=HALVES)
Q5_1_CODES = Codes(with_fifths(32), 0, 31, m="m", run=16, order=HALVES)
Q5_0 = one_scale(
    "Q5_0",
    6,
    32,
    Q5_0_LAYOUT,
    read_5,
    write_5,
    round_5_0,
    Q5_0_CODES,
    offset=16,
    weighted=Weighted(Q5_0_SEARCH, signed_numbers(16)),
)
Q5_1 = one_scale(
    "Q5_1",
    7,
    32,
    Q5_1_LAYOUT,
    read_5,
    write_5,
    round_5_1,
    Q5_1_CODES,
    weighted=Weighted(Q5_1_SEARCH, offset_numbers),
)


# -- eight bits --------------------------------------------------------------------------------


def search_8(x: F32Array, weights: F32Array | None) -> RoundedBlocks:
    """Quantise float32 [n, 32] to integers -127..127 and a scale ``d`` [n]: the largest magnitude
    becomes 127. ``weights`` are ignored.
    """
    d = np.abs(x).max(axis=-1) / np.float32(127)
    with np.errstate(over="ignore", invalid="ignore"):
        q = to_int(half_away(x * inverse(d)[..., None]), -128, 127)
    return RoundedBlocks(d, q.view(np.uint8))


def write_8(out: Blocks, found: RoundedBlocks) -> None:
    """Write ``found.q`` [n, 32] into ``qs`` of blocks [n], as signed bytes."""
    out["qs"] = found.q.view(np.int8)


def unpack_8(k: Builder, field: Field) -> list[Val]:
    """Implement ``Codes.unpack``: emit codes ``q + 128``, u8."""
    return [field("qs") ^ 0x80]


Q8_0_CODES = Codes(unpack_8, 128, 255)
Q8_0 = one_scale("Q8_0", 8, 32, Q8_0_LAYOUT, itemgetter("qs"), write_8, search_8, Q8_0_CODES)
