"""Q2_0: 64 weights, two bits each, with one scale; ``w = d * (q - 1)``, so -d, 0, d or 2 d.

Byte j of ``qs`` holds weights 4 j to 4 j + 3. The quantiser of ggml makes the largest magnitude 1,
for models trained to ternary weights: it never writes code 3, and nor does this one.
"""

from __future__ import annotations

from typing import Any

import numpy as np

from treadle.formats.format import Blocks, Builder, Codes, Field, Format, Val
from treadle.formats.kernel_scales import shared
from treadle.formats.numbers import searched, with_scale
from treadle.formats.packing import join_bits, split_bits
from treadle.formats.rounding import Rounded
from treadle.formats.tq2_0 import ternary
from treadle.jit.types import u8, u32

LAYOUT = np.dtype([("d", "<f2"), ("qs", "u1", (16,))])


def read(blocks: Blocks) -> Any:
    """Codes."""
    return split_bits(blocks["qs"], 2, 1)


def write(out: Blocks, found: Rounded) -> None:
    """The same, into blocks."""
    out["qs"] = join_bits(found.q, 2, 1)


def unpack(k: Builder, field: Field) -> list[Val]:
    """Codes 0..3: each byte is spread over four, whose lowest two bits no other copy reaches."""
    qs = field("qs").to(u32)
    qs = qs | (qs << 6)
    qs = (qs | (qs << 12)) & 0x03030303
    return [qs.bits(u8 * (4 * qs.ty.lanes))]


CODES = Codes(unpack, 1, 3, scales=shared(2), run=64)
Q2_0 = Format(
    "Q2_0", 42, 64, LAYOUT, with_scale(read, 1), searched(LAYOUT, ternary, write), "q8", CODES
)
