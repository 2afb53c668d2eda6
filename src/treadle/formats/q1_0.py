"""Q1_0: 128 weights, a sign bit each, with one scale; ``w = d`` where the bit is set, else -d."""

from __future__ import annotations

from typing import Any

import numpy as np

from treadle.formats.format import Blocks, Builder, Codes, F32Array, Field, Format, Val
from treadle.formats.kernel_bits import spread
from treadle.formats.kernel_scales import shared
from treadle.formats.numbers import with_scale
from treadle.formats.packing import join_bits, split_bits
from treadle.formats.rounding import to_f16

LAYOUT = np.dtype([("d", "<f2"), ("qs", "u1", (16,))])


def read(blocks: Blocks) -> Any:
    """Codes 0 and 2."""
    return split_bits(blocks["qs"], 1, 1) << np.uint8(1)


def quantize(x: F32Array, weights: F32Array | None = None) -> Blocks:
    """float32 [..., 128] -> blocks [...]; the importance ``weights`` change nothing.

    The scale is the mean magnitude, summed in order as ggml does; zero counts as positive.
    A NaN makes the scale NaN, an infinity or a mean beyond 65519 makes it infinite.
    """
    out = np.empty(x.shape[:-1], LAYOUT)
    with np.errstate(over="ignore"):
        total: F32Array = np.add.accumulate(np.abs(x), axis=-1)[..., -1]
    out["d"] = to_f16(total / np.float32(x.shape[-1]))
    out["qs"] = join_bits(x >= 0, 1, 1)
    return out


def unpack(k: Builder, field: Field) -> list[Val]:
    """Codes 0 and 2: around 1 they are the signs."""
    return [spread(k, k.each(field("qs"), 8, 8), range(64), 1)]


CODES = Codes(unpack, 1, 2, scales=shared(4), run=128)
Q1_0 = Format("Q1_0", 41, 128, LAYOUT, with_scale(read, 1), quantize, "q8", CODES)
