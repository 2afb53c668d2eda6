"""Q4_K: 256 weights as unsigned nibbles, eight sub-blocks of 32; ``w = d * sc * q - dmin * m``.

Each sub-block has a scale ``sc`` and a minimum ``m`` of six bits (scales6.py). Byte j of each 32 of
``qs`` holds weight j of one sub-block in its low nibble, and of the next in its high one.
"""

from __future__ import annotations

from typing import Any

import numpy as np

from treadle.formats.format import Blocks, Builder, Codes, Field, Format, Val
from treadle.formats.k_offset import OffsetSearch, product
from treadle.formats.kernel_bits import cut
from treadle.formats.kernel_scales import six_bits
from treadle.formats.numbers import searched, with_steps
from treadle.formats.packing import join_bits, split_bits
from treadle.formats.scales6 import join_scales, split_scales

LAYOUT = np.dtype([("d", "<f2"), ("dmin", "<f2"), ("scales", "u1", (12,)), ("qs", "u1", (128,))])

SEARCH = OffsetSearch(
    n_sub=8,
    levels=15,
    top=63,
    grid=product(np.linspace(-1, 0.5, 7)),
    starts=tuple((float(i), float(j)) for i in range(4) for j in range(3)),
)


def read(blocks: Blocks) -> tuple[Any, ...]:
    """Scales, codes and minimums."""
    scales, minimums = split_scales(blocks["scales"])
    return scales, split_bits(blocks["qs"], 4, 32), minimums


def write(out: Blocks, found: Any) -> None:
    """The same, into blocks."""
    out["scales"] = join_scales(found.sc, found.m)
    out["qs"] = join_bits(found.q, 4, 32)


def unpack(k: Builder, field: Field) -> list[Val]:
    """Codes 0..15: the first halves of sub-blocks 0, 2, 4 and 6, then the second ones; then those
    of 1, 3, 5 and 7.
    """
    first, second = k.evens(field("qs"), 16)
    return [cut(k, v, at, 4) for at in (0, 4) for v in (first, second)]


# Both halves of a sub-block stand in the same lanes, so their dots are scaled together.
ORDER = ((0, 4, 8, 12), (1, 5, 9, 13), (2, 6, 10, 14), (3, 7, 11, 15))
CODES = Codes(unpack, 0, 15, run=16, order=ORDER, scales=six_bits, minimums=True)
Q4_K = Format(
    "Q4_K", 12, 256, LAYOUT, with_steps(read), searched(LAYOUT, SEARCH.run, write), "q8", CODES
)
