"""Q5_K: 256 weights of five bits, eight sub-blocks of 32; ``w = d * sc * q - dmin * m``.

Scales and the lower four bits lie as in Q4_K. The fifth bit of weight j of sub-block i is bit i of
byte j of ``qh``.
"""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import numpy as np

from treadle.formats import q4_k
from treadle.formats.format import Blocks, Builder, Codes, Field, Format, Val
from treadle.formats.kernel_bits import cut
from treadle.formats.kernel_scales import six_bits
from treadle.formats.numbers import searched, with_steps
from treadle.formats.packing import join_bits, split_bits

LAYOUT = np.dtype(
    [
        ("d", "<f2"),
        ("dmin", "<f2"),
        ("scales", "u1", (12,)),
        ("qh", "u1", (32,)),
        ("qs", "u1", (128,)),
    ]
)

SEARCH = replace(q4_k.SEARCH, levels=31)


def read(blocks: Blocks) -> tuple[Any, ...]:
    """Scales, codes and minimums."""
    scales, lower, minimums = q4_k.read(blocks)
    return scales, lower | split_bits(blocks["qh"], 1, 32) << np.uint8(4), minimums


def write(out: Blocks, found: Any) -> None:
    """The same, into blocks."""
    q4_k.write(out, found._replace(q=found.q & np.uint8(15)))
    out["qh"] = join_bits(found.q >> np.uint8(4), 1, 32)


def unpack(k: Builder, field: Field) -> list[Val]:
    """Codes 0..31, in the order of Q4_K's."""
    lower = k.evens(field("qs"), 16)
    fifths = [k.each(v, 16, 4) for v in k.evens(field("qh"), 16)]
    out = []
    for odd in (0, 1):
        for first, fifth in zip(lower, fifths, strict=True):
            bits = cut(k, fifth, [odd + i for i in (0, 0, 2, 2, 4, 4, 6, 6)], 1, 4)
            out.append(cut(k, first, 4 * odd, 4) | bits)
    return out


CODES = Codes(unpack, 0, 31, run=16, order=q4_k.ORDER, scales=six_bits, minimums=True)
Q5_K = Format(
    "Q5_K", 13, 256, LAYOUT, with_steps(read), searched(LAYOUT, SEARCH.run, write), "q8", CODES
)
