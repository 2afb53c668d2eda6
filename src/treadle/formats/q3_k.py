"""Q3_K: 256 weights of three bits around 4, 16 sub-blocks of 16; ``w = d * (sc - 32) * (q - 4)``.

The lower two bits lie in ``qs`` as in Q2_K; the third of weight j + 32 i is bit i of byte j of
``hmask``. The scales have six bits: bytes 0 to 7 of ``scales`` hold the lower nibbles of scales
0 to 7 (low) and 8 to 15 (high), bytes 8 to 11 the upper two bits of all, byte j those of scales
j, j + 4, j + 8 and j + 12.
"""

from __future__ import annotations

from typing import Any

import numpy as np

from treadle.formats.format import Blocks, Builder, Codes, Field, Format, Isa, Val
from treadle.formats.k_signed import SignedSearch
from treadle.formats.kernel_bits import cut
from treadle.formats.kernel_scales import TWO_BITS, halves, repeat, times, two_bits
from treadle.formats.numbers import searched, with_steps
from treadle.formats.packing import join_bits, split_bits
from treadle.jit.types import f32, i32, u8, u16, u32

LAYOUT = np.dtype(
    [("hmask", "u1", (32,)), ("qs", "u1", (64,)), ("scales", "u1", (12,)), ("d", "<f2")]
)

SEARCH = SignedSearch(
    n_sub=16,
    half=4,
    top=32,
    grid=tuple(np.arange(3, 6.1, 0.25).tolist()),
    # From scales so large that they cut the largest sub-blocks off, for the sake of all others.
    starts=tuple(np.arange(28.0, 44.0).tolist()),
)


def read(blocks: Blocks) -> tuple[Any, ...]:
    """Scales and codes, with their signs."""
    packed = blocks["scales"]
    sc = split_bits(packed[..., :8], 4, 8) | split_bits(packed[..., 8:], 2, 4) << np.uint8(4)
    q = split_bits(blocks["qs"], 2, 32) | split_bits(blocks["hmask"], 1, 32) << np.uint8(2)
    return sc.view(np.int8) - np.int8(32), q.view(np.int8) - np.int8(4)


def write(out: Blocks, found: Any) -> None:
    """The same, into blocks."""
    scales, q = (found.sc + np.int8(32)).view(np.uint8), (found.q + np.int8(4)).view(np.uint8)
    out["scales"][:, :8] = join_bits(scales & np.uint8(15), 4, 8)
    out["scales"][:, 8:] = join_bits(scales >> np.uint8(4), 2, 4)
    out["qs"] = join_bits(q & np.uint8(3), 2, 32)
    out["hmask"] = join_bits(q >> np.uint8(2), 1, 32)


def unpack(k: Builder, field: Field) -> list[Val]:
    """Codes 0..7."""
    thirds = [k.each(v, 16, 4) for v in k.evens(field("hmask"), 8)]
    out = []
    for i, lower in enumerate(two_bits(k, field("qs"))):
        bits = [2 * (i // 2) + at for at in (0, 0, 4, 4, 1, 1, 5, 5)]  # those of a half are nibbles
        out.append(lower | cut(k, thirds[i % 2], bits, 1, 2))
    return out


def steps(k: Builder, field: Field) -> Val:
    """``sc`` of the 16 sub-blocks, bytes."""
    packed = field("scales")
    n = packed.ty.lanes // 12
    words, ty, blocks = packed.bits(u32 * (3 * n)), u32 * (4 * n), range(0, 3 * n, 3)
    lower = k.shuffle(words, words, [b + i for b in blocks for i in (0, 1, 0, 1)])
    upper = k.shuffle(words, words, [b + 2 for b in blocks for _ in range(4)])
    lower, upper = lower >> k.const([0, 0, 4, 4] * n, ty), upper >> k.const([0, 2, 4, 6] * n, ty)
    sc = (lower & 0x0F0F0F0F) | ((upper & 0x03030303) << 4)
    return sc.bits(u8 * (16 * n))


def scales(k: Builder, isa: Isa, field: Field) -> tuple[Val, None]:
    """``d * (sc - 32)`` of the 16 sub-blocks."""
    sc = (steps(k, field).to(i32) - 32).to(f32)
    return sc * repeat(k, halves(k, isa, field("d")), 16), None


def unpack_folded(k: Builder, field: Field) -> list[Val]:
    """``128 + (32 - sc) * (q - 4)``: 0..252. Of ``sc - 32`` it would be 4..256."""
    return times(k, unpack(k, field), 32 - steps(k, field).to(u16), 4, 128)


def scales_folded(k: Builder, isa: Isa, field: Field) -> tuple[Val, None]:
    """``-d`` for each 32 codes."""
    return repeat(k, -halves(k, isa, field("d")), 8), None


FOLDED = Codes(unpack_folded, 128, 252, run=8, order=TWO_BITS, scales=scales_folded)
CODES = Codes(unpack, 4, 7, run=8, order=TWO_BITS, sub=16, scales=scales, folded=FOLDED)
Q3_K = Format(
    "Q3_K", 11, 256, LAYOUT, with_steps(read), searched(LAYOUT, SEARCH.run, write), "q8", CODES
)
