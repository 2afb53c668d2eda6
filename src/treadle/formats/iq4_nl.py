"""IQ4_NL: 32 weights as nibbles into a table of 16 uneven steps; ``w = d * STEPS[q]``.

Byte j of ``qs`` holds weight j in its low nibble and weight j + 16 in its high one.
"""

from __future__ import annotations

from typing import Any

import numpy as np

from treadle.formats.format import Blocks, Builder, Codes, Field, Format, Val
from treadle.formats.nibbles import looked_up
from treadle.formats.numbers import searched, with_scale
from treadle.formats.packing import join_bits, split_bits
from treadle.formats.scale_search import Coder
from treadle.formats.uneven import STEPS, TABLE, encode

LAYOUT = np.dtype([("d", "<f2"), ("qs", "u1", (16,))])

# The largest magnitude may be the far end, of either sign, or beyond it; in a block of one number
# any step may be the one whose scale f16 holds best. Shares below 1: where f16 runs out of bits.
RANGE = np.geomspace(0.7, 1.25, 40) / 127
CODER = Coder(
    sub=32,
    ladder=np.ones(1, np.float32),
    encode=encode,
    scales=np.concatenate([RANGE, -RANGE, 1 / STEPS]).astype(np.float32),
    shares=np.array([1, 0.5, 0.25], np.float32),
)


def read(blocks: Blocks) -> Any:
    """Steps."""
    return STEPS[split_bits(blocks["qs"], 4, 16)]


def write(out: Blocks, found: Any) -> None:
    """The same, into blocks."""
    out["qs"] = join_bits(found.codes, 4, 16)


def unpack(k: Builder, field: Field) -> list[Val]:
    """Steps, plus 128."""
    return looked_up(k, field, TABLE)


CODES = Codes(unpack, 128, 241, run=16, order=((0,), (1,)))
IQ4_NL = Format(
    "IQ4_NL", 20, 32, LAYOUT, with_scale(read), searched(LAYOUT, CODER.run, write), "q8", CODES
)
