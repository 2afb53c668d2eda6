"""TQ2_0: 256 ternary weights, two bits each, with one scale; ``w = d * (q - 1)``.

For models trained to weights of -1, 0 and 1: anything else loses most of its precision. The
fourth code, 3, is never written, and read as 2.
"""

from __future__ import annotations

from typing import Any

import numpy as np

from treadle.formats.format import Blocks, Builder, Codes, F32Array, Field, Format, Val
from treadle.formats.kernel_scales import TWO_BITS, shared, two_bits
from treadle.formats.numbers import searched, with_scale
from treadle.formats.packing import join_bits, split_bits
from treadle.formats.rounding import Rounded, half_away, inverse, to_int

LAYOUT = np.dtype([("qs", "u1", (64,)), ("d", "<f2")])


def ternary(x: F32Array, weights: F32Array | None) -> Rounded:
    """The largest magnitude, and codes ``round(x / it) + 1``; the importance ``weights`` change
    nothing.

    A NaN makes the scale NaN, an infinity or more than 65519 makes it infinite.
    """
    d = np.abs(x).max(axis=-1)
    with np.errstate(over="ignore", invalid="ignore"):
        q = to_int(half_away(x * inverse(d)[..., None]), -1, 1) + np.int8(1)
    return Rounded(d, q.view(np.uint8))


def read(blocks: Blocks) -> Any:
    """Codes."""
    return split_bits(blocks["qs"], 2, 32)


def write(out: Blocks, found: Rounded) -> None:
    """The same, into blocks."""
    out["qs"] = join_bits(found.q, 2, 32)


def unpack(k: Builder, field: Field) -> list[Val]:
    """Codes 0..3."""
    return two_bits(k, field("qs"))


CODES = Codes(unpack, 1, 3, run=8, order=TWO_BITS, scales=shared(8))
TQ2_0 = Format(
    "TQ2_0", 35, 256, LAYOUT, with_scale(read, 1), searched(LAYOUT, ternary, write), "q8", CODES
)
