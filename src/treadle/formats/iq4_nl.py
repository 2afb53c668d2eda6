"""IQ4_NL: 32 weights as nibbles into a table of 16 uneven steps; ``w = d * STEPS[q]``.

Byte j of ``qs`` holds weight j in its low nibble and weight j + 16 in its high one.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np

from treadle.formats.format import Blocks, Codes, F32Array, Format
from treadle.formats.nibbles import looked_up
from treadle.formats.rounding import join_nibbles, split_nibbles
from treadle.formats.scale_search import Coder, fit, flat
from treadle.formats.uneven import STEPS, TABLE, encode

if TYPE_CHECKING:
    from treadle.formats.kernel_scales import Field
    from treadle.jit.builder import Builder
    from treadle.jit.values import Val

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


def dequantize(blocks: Blocks) -> F32Array:
    """blocks [...] -> float32 [..., 32]."""
    q = STEPS[split_nibbles(blocks["qs"])]
    with np.errstate(invalid="ignore"):
        return blocks["d"].astype(np.float32)[..., None] * q


def quantize(x: F32Array, weights: F32Array | None = None) -> Blocks:
    """float32 [..., 32], and the weights of its errors, -> blocks [...]; scale_search says how."""
    found = fit(*flat(x, weights), CODER)
    out = np.empty(len(found.d), LAYOUT)
    out["d"] = found.d
    out["qs"] = join_nibbles(found.codes)
    return out.reshape(x.shape[:-1])


def unpack(k: Builder, field: Field) -> list[Val]:
    """Steps, plus 128."""
    return looked_up(k, field, TABLE)


CODES = Codes(unpack, 128, 241, run=16, order=((0,), (1,)))
IQ4_NL = Format("IQ4_NL", 20, 32, LAYOUT, dequantize, quantize, "q8", CODES)
