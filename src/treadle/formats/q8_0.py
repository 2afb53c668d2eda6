"""Q8_0: 32 weights as signed bytes with one scale; ``w = d * q``."""

from __future__ import annotations

from operator import itemgetter

import numpy as np

from treadle.formats.format import Blocks, Builder, Codes, F32Array, Field, Format, Val
from treadle.formats.numbers import with_scale
from treadle.formats.rounding import half_away, inverse, to_f16, to_int

LAYOUT = np.dtype([("d", "<f2"), ("qs", "i1", (32,))])


def quantize(x: F32Array) -> Blocks:
    """float32 [..., 32] -> blocks [...]; the largest magnitude becomes 127."""
    out = np.empty(x.shape[:-1], LAYOUT)
    d = np.abs(x).max(axis=-1) / np.float32(127)
    out["d"] = to_f16(d)
    with np.errstate(over="ignore", invalid="ignore"):
        out["qs"] = to_int(half_away(x * inverse(d)[..., None]), -128, 127)
    return out


def unpack(k: Builder, field: Field) -> list[Val]:
    """Codes ``q + 128``."""
    return [field("qs") ^ 0x80]


Q8_0 = Format(
    "Q8_0", 8, 32, LAYOUT, with_scale(itemgetter("qs")), quantize, "q8", Codes(unpack, 128, 255)
)
