"""IQ4_XS: 8 sub-blocks of 32 weights, nibbles into the steps of IQ4_NL, and a scale of 6 bits each.

``w = d * (scale - 32) * STEPS[q]``. Nibbles lie as in IQ4_NL, sub-block after sub-block. A scale's
low 4 bits are a nibble of ``scales_l`` (low one first), its high 2 bits a pair of ``scales_h``.
"""

from __future__ import annotations

from typing import Any

import numpy as np

from treadle.formats import bits
from treadle.formats.format import Blocks, Builder, Codes, Field, Format, Isa, Val
from treadle.formats.kernel_scales import halves, repeat
from treadle.formats.nibbles import looked_up
from treadle.formats.numbers import searched, with_steps
from treadle.formats.packing import join_bits, split_bits
from treadle.formats.scale_search import Coder
from treadle.formats.uneven import STEPS, TABLE, encode
from treadle.jit.types import f32, i32, u8, u16, u32

LAYOUT = np.dtype(
    [("d", "<f2"), ("scales_h", "<u2"), ("scales_l", "u1", (4,)), ("qs", "u1", (128,))]
)

RANGE = np.geomspace(0.7, 1.25, 14) / 127
SHARES = 1 / np.linspace(24, 36, 10)  # the largest scale near an end of the ladder, of either sign
CODER = Coder(
    sub=32,
    ladder=np.arange(-32, 32, dtype=np.float32),
    encode=encode,
    scales=np.concatenate([RANGE, -RANGE]).astype(np.float32),
    shares=np.concatenate([SHARES, -SHARES, [0.2, 1]]).astype(np.float32),
)


def read(blocks: Blocks) -> tuple[Any, Any]:
    """Scales and steps."""
    low = bits.split(blocks["scales_l"], 2, 4)
    high = bits.split(blocks["scales_h"][..., None], 8, 2).astype(np.uint8)
    return CODER.ladder[low | high << np.uint8(4)], STEPS[split_bits(blocks["qs"], 4, 16)]


def write(out: Blocks, found: Any) -> None:
    """The same, into blocks."""
    out["scales_l"] = bits.join(found.steps & np.uint8(15), 2, 4, "u1")
    out["scales_h"] = bits.join(found.steps >> np.uint8(4), 8, 2, "<u2")[:, 0]
    out["qs"] = join_bits(found.codes, 4, 16)


def unpack(k: Builder, field: Field) -> list[Val]:
    """Steps, plus 128: the first 16 of each sub-block, then the others."""
    return looked_up(k, field, TABLE)


def scales(k: Builder, isa: Isa, field: Field) -> tuple[Val, None]:
    """``d * (scale - 32)`` of the 8 sub-blocks."""
    head = field("d", 8)
    n = head.ty.lanes // 8
    words, halfs = head.bits(u32 * (2 * n)), head.bits(u16 * (4 * n))
    high, low = (repeat(k, v, 8) for v in k.evens(words, 1))  # d below the high bits
    low = (low >> k.const([*range(0, 32, 4)] * n, low.ty)) & 15
    high = (high >> k.const([*range(12, 28, 2)] * n, high.ty)) & 0x30
    steps = ((low | high).bits(i32 * (8 * n)) - 32).to(f32)
    d = k.shuffle(halfs, halfs, range(0, 4 * n, 4)).bits(u8 * (2 * n))
    return steps * repeat(k, halves(k, isa, d), 8), None


CODES = Codes(
    unpack,
    128,
    241,
    run=16,
    order=(tuple(range(0, 16, 2)), tuple(range(1, 16, 2))),
    scales=scales,
)
IQ4_XS = Format(
    "IQ4_XS", 23, 256, LAYOUT, with_steps(read), searched(LAYOUT, CODER.run, write), "q8", CODES
)
