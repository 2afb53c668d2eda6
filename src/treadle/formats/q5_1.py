"""Q5_1: 32 weights of five bits with one scale and one minimum; ``w = d * q + m``.

The codes lie in ``qs`` and ``qh`` as in Q5_0.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np

from treadle.formats.format import Blocks, Codes, F32Array, Format
from treadle.formats.k_offset import OffsetSearch, product
from treadle.formats.q5_0 import join_five, split_five, with_fifths
from treadle.formats.rounding import inverse, to_f16, to_int

if TYPE_CHECKING:
    from treadle.formats.kernel_scales import Field
    from treadle.jit.builder import Builder
    from treadle.jit.values import Val

LAYOUT = np.dtype([("d", "<f2"), ("m", "<f2"), ("qh", "u1", (4,)), ("qs", "u1", (16,))])

SEARCH = OffsetSearch(
    n_sub=1, levels=31, top=1, grid=product(np.linspace(-1, 0.5, 7)), starts=((0.0, 0.0),)
)


def dequantize(blocks: Blocks) -> F32Array:
    """blocks [...] -> float32 [..., 32]."""
    q = split_five(blocks).astype(np.float32)
    with np.errstate(invalid="ignore"):  # a scale of infinity times a quant of zero
        scaled = q * blocks["d"].astype(np.float32)[..., None]
        return scaled + blocks["m"].astype(np.float32)[..., None]


def quantize(x: F32Array, weights: F32Array | None = None) -> Blocks:
    """float32 [..., 32] -> blocks [...]; with ``weights`` as x, those of least weighted error.

    Without, the smallest weight becomes 0, the largest 31. A NaN makes ``d`` NaN, an infinity
    infinite or NaN.
    """
    if weights is not None:
        return search(x, weights)
    out = np.empty(x.shape[:-1], LAYOUT)
    m = x.min(axis=-1)
    with np.errstate(over="ignore", invalid="ignore"):
        d = (x.max(axis=-1) - m) / np.float32(31)
        q = to_int((x - m[..., None]) * inverse(d)[..., None] + np.float32(0.5), 0, 31)
    out["d"], out["m"] = to_f16(d), to_f16(m)
    join_five(q.view(np.uint8), out)
    return out


def search(x: F32Array, weights: F32Array) -> Blocks:
    """As super-blocks of one sub-block, whose integers are 1 (or 0, without what they scale)."""
    found = SEARCH.run(x, weights)
    out = np.empty(len(found.d), LAYOUT)
    with np.errstate(invalid="ignore"):  # infinity times 0
        out["d"] = to_f16(found.d * found.sc[:, 0].astype(np.float32))
    out["m"] = to_f16(-found.dmin * found.m[:, 0].astype(np.float32))
    join_five(found.q, out)
    return out.reshape(x.shape[:-1])


def unpack(k: Builder, field: Field) -> list[Val]:
    """Codes 0..31, in the order of Q5_0's."""
    return with_fifths(k, field, 32)


CODES = Codes(unpack, 0, 31, m="m", run=16, order=((0,), (1,)))
Q5_1 = Format("Q5_1", 7, 32, LAYOUT, dequantize, quantize, "q8", CODES)
