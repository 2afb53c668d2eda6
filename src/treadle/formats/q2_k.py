"""Q2_K: 256 weights of two bits, 16 sub-blocks of 16; ``w = d * sc * q - dmin * m``.

Byte i of ``scales`` holds a sub-block's scale in its low nibble and its minimum in the high one.
32 bytes of ``qs`` hold 128 weights: byte j weight j in its lowest two bits, then j + 32 and so on.
"""

from __future__ import annotations

from typing import Any

import numpy as np

from treadle.formats.format import Blocks, Builder, Codes, Field, Format, Isa, Val
from treadle.formats.k_offset import OffsetSearch, product
from treadle.formats.kernel_scales import TWO_BITS, times, two_bits, two_factors
from treadle.formats.numbers import searched, with_steps
from treadle.formats.packing import join_bits, split_bits
from treadle.jit.types import f32, i32, u16

LAYOUT = np.dtype([("scales", "u1", (16,)), ("qs", "u1", (64,)), ("d", "<f2"), ("dmin", "<f2")])

SEARCH = OffsetSearch(
    n_sub=16,
    levels=3,
    top=15,
    grid=product(np.linspace(-0.3, 0.7, 5)),
    starts=tuple((float(i), float(j)) for i in range(4) for j in range(3)),
)


def read(blocks: Blocks) -> tuple[Any, ...]:
    """Scales, codes and minimums."""
    both = blocks["scales"]
    return both & np.uint8(15), split_bits(blocks["qs"], 2, 32), both >> np.uint8(4)


def write(out: Blocks, found: Any) -> None:
    """The same, into blocks."""
    out["scales"] = found.sc | found.m << np.uint8(4)
    out["qs"] = join_bits(found.q, 2, 32)


def unpack(k: Builder, field: Field) -> list[Val]:
    """Codes 0..3."""
    return two_bits(k, field("qs"))


def scales(k: Builder, isa: Isa, field: Field) -> tuple[Val, Val]:
    """``d * sc`` and ``-dmin * m`` of the 16 sub-blocks."""
    both = field("scales")
    d, m = two_factors(k, isa, field("d", 4), 16)
    return (both & 15).to(i32).to(f32) * d, (both >> 4).to(i32).to(f32) * m


def unpack_folded(k: Builder, field: Field) -> list[Val]:
    """``sc * q``: 0..45."""
    return times(k, unpack(k, field), (field("scales") & 15).to(u16), 0, 0)


def scales_folded(k: Builder, isa: Isa, field: Field) -> tuple[Val, Val]:
    """``d`` for each 32 codes, ``-dmin * m`` for each 16."""
    d, m = two_factors(k, isa, field("d", 4), 16)
    first = k.shuffle(d, d, range(0, d.ty.lanes, 2))
    return first, (field("scales") >> 4).to(i32).to(f32) * m


FOLDED = Codes(
    unpack_folded, 0, 45, run=8, order=TWO_BITS, m_sub=16, scales=scales_folded, minimums=True
)
CODES = Codes(
    unpack, 0, 3, run=8, order=TWO_BITS, sub=16, scales=scales, minimums=True, folded=FOLDED
)
Q2_K = Format(
    "Q2_K", 10, 256, LAYOUT, with_steps(read), searched(LAYOUT, SEARCH.run, write), "q8", CODES
)
