"""Q5_0: 32 weights of five bits around 16 with one scale; ``w = d * (q - 16)``.

The lower four bits lie in ``qs`` as in Q4_0; the fifth of weight j is bit j of ``qh``, which is
little-endian.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np

from treadle.formats.format import Blocks, Codes, F32Array, Format
from treadle.formats.k_signed import SignedSearch
from treadle.formats.kernel_bits import spread
from treadle.formats.nibbles import nibbles
from treadle.formats.packing import U8Array, join_bits, split_bits
from treadle.formats.rounding import inverse, to_f16, to_int

if TYPE_CHECKING:
    from treadle.formats.kernel_scales import Field
    from treadle.jit.builder import Builder
    from treadle.jit.values import Val

LAYOUT = np.dtype([("d", "<f2"), ("qh", "u1", (4,)), ("qs", "u1", (16,))])

# Beyond 16, for blocks of one sign: cutting their extreme off may buy a finer step.
SEARCH = SignedSearch(
    n_sub=1, half=16, top=1, grid=tuple(np.arange(12, 18.1, 0.25).tolist()), starts=()
)


def split_five(blocks: Blocks) -> U8Array:
    """Codes 0..31 [..., 32]; Q5_1 shares it."""
    return split_bits(blocks["qs"], 4, 16) | split_bits(blocks["qh"], 1, 1) << np.uint8(4)


def join_five(q: U8Array, out: Blocks) -> None:
    """Undoes split_five."""
    out["qs"] = join_bits(q & np.uint8(15), 4, 16)
    out["qh"] = join_bits(q >> np.uint8(4), 1, 1)


def dequantize(blocks: Blocks) -> F32Array:
    """blocks [...] -> float32 [..., 32]."""
    q = split_five(blocks).astype(np.float32) - np.float32(16)
    with np.errstate(invalid="ignore"):  # a scale of infinity times a quant of zero
        return q * blocks["d"].astype(np.float32)[..., None]


def quantize(x: F32Array, weights: F32Array | None = None) -> Blocks:
    """float32 [..., 32] -> blocks [...]; with ``weights`` as x, those of least weighted error.

    Without, the weight of largest magnitude becomes -16, the end with the longer reach: so ``d``
    has the sign opposite to that weight's. A NaN makes ``d`` NaN, an infinity infinite or NaN.
    """
    if weights is not None:
        return search(x, weights)
    out = np.empty(x.shape[:-1], LAYOUT)
    extreme = np.take_along_axis(x, np.abs(x).argmax(axis=-1)[..., None], axis=-1)[..., 0]
    d = extreme / np.float32(-16)
    out["d"] = to_f16(d)
    with np.errstate(over="ignore", invalid="ignore"):
        q = to_int(x * inverse(d)[..., None] + np.float32(16.5), 0, 31)
    join_five(q.view(np.uint8), out)
    return out


def search(x: F32Array, weights: F32Array) -> Blocks:
    """As super-blocks of one sub-block, whose integer is -1 (or 0, without a scale)."""
    found = SEARCH.run(x, weights)
    out = np.empty(len(found.d), LAYOUT)
    with np.errstate(invalid="ignore"):  # infinity times 0
        out["d"] = to_f16(found.d * found.sc[:, 0])
    join_five((found.q + np.int8(16)).view(np.uint8), out)
    return out.reshape(x.shape[:-1])


def unpack(k: Builder, field: Field) -> list[Val]:
    """Codes 0..31, as those of Q4_0 lie: weights 0 to 15, then 16 to 31."""
    return with_fifths(k, field, 16)


def with_fifths(k: Builder, field: Field, at: int) -> list[Val]:
    """The same where ``qh`` begins ``at`` bits from the block's beginning: those of Q5_1 too."""
    head, lower = k.each(field("d", 8), 8, 2), nibbles(k, field)
    fifths = (spread(k, head, range(at + i, at + i + 16), 4) for i in (0, 16))
    return [low | fifth for low, fifth in zip(lower, fifths, strict=True)]


CODES = Codes(unpack, 16, 31, run=16, order=((0,), (1,)))
Q5_0 = Format("Q5_0", 6, 32, LAYOUT, dequantize, quantize, "q8", CODES)
