"""Q6_K: 256 weights of six bits around 32, 16 sub-blocks of 16; ``w = d * sc * (q - 32)``.

Each sub-block has a signed byte as its scale. 64 bytes of ``ql`` hold the lower nibbles of 128
weights, byte j those of weights j and j + 64; 32 bytes of ``qh`` their upper two bits, byte j
those of weights j, j + 32, j + 64 and j + 96.
"""

from __future__ import annotations

from typing import Any

import numpy as np

from treadle.formats.format import Blocks, Builder, Codes, Field, Format, Isa, Val
from treadle.formats.k_signed import SignedSearch
from treadle.formats.kernel_bits import cut
from treadle.formats.kernel_scales import halves, repeat
from treadle.formats.numbers import searched, with_steps
from treadle.formats.packing import join_bits, split_bits
from treadle.jit.types import f32, i8, i32

LAYOUT = np.dtype(
    [("ql", "u1", (128,)), ("qh", "u1", (64,)), ("scales", "i1", (16,)), ("d", "<f2")]
)

# With this many codes a sub-block of 16 can do without the outermost, for a finer step.
SEARCH = SignedSearch(
    n_sub=16,
    half=32,
    top=128,
    grid=tuple(np.arange(24, 32.6, 0.25).tolist()),
    starts=(127.0, 126.0, 125.0),
)


def read(blocks: Blocks) -> tuple[Any, ...]:
    """Scales and codes, with their signs."""
    q = split_bits(blocks["ql"], 4, 64) | split_bits(blocks["qh"], 2, 32) << np.uint8(4)
    return blocks["scales"], q.view(np.int8) - np.int8(32)


def write(out: Blocks, found: Any) -> None:
    """The same, into blocks."""
    q = (found.q + np.int8(32)).view(np.uint8)
    out["scales"] = found.sc
    out["ql"] = join_bits(q & np.uint8(15), 4, 64)
    out["qh"] = join_bits(q >> np.uint8(4), 2, 32)


def unpack(k: Builder, field: Field) -> list[Val]:
    """Codes 0..63, of each half of the block: the first eights of sub-blocks 0 to 3, the second
    ones, then those of sub-blocks 4 to 7.
    """
    lower, upper = k.evens(field("ql"), 8), k.evens(field("qh"), 8)
    out = []
    for late in (0, 4):
        for nibbles, pairs in zip(lower, upper, strict=True):
            # Of 16 bytes for each half, twice: for sub-blocks 0 and 1 (4, 5), then 2 and 3 (6, 7).
            twice = k.each(pairs, 16, 2)
            high = cut(k, twice, [late + i for i in (0, 0, 2, 2)], 2, 4)
            out.append(cut(k, nibbles, late, 4) | high)
    return out


def scales(k: Builder, isa: Isa, field: Field) -> tuple[Val, None]:
    """``d * sc`` of the 16 sub-blocks."""
    steps = field("scales")
    steps = steps.bits(i8.like(steps.ty)).to(i32).to(f32)
    return steps * repeat(k, halves(k, isa, field("d")), 16), None


# Both halves of a sub-block stand in the same lanes, so their dots are scaled together.
ORDER = tuple(
    tuple(half * 16 + sub * 2 + i for half in (0, 1) for sub in range(late, late + 4))
    for late in (0, 4)
    for i in (0, 1)
)
CODES = Codes(unpack, 32, 63, run=8, order=ORDER, sub=16, scales=scales)
Q6_K = Format(
    "Q6_K", 14, 256, LAYOUT, with_steps(read), searched(LAYOUT, SEARCH.run, write), "q8", CODES
)
