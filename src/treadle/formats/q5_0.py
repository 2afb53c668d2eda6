"""Q5_0: 32 weights of five bits around 16 with one scale; ``w = d * (q - 16)``.

The lower four bits lie in ``qs`` as in Q4_0; the fifth of weight j is bit j of ``qh``, which is
little-endian.
"""

from __future__ import annotations

from typing import Any

import numpy as np

from treadle.formats.format import Blocks, Builder, Codes, F32Array, Field, Format, Val
from treadle.formats.k_signed import SignedSearch
from treadle.formats.kernel_bits import spread
from treadle.formats.nibbles import nibbles
from treadle.formats.numbers import searched, with_scale
from treadle.formats.packing import join_bits, split_bits
from treadle.formats.rounding import Rounded, signed

LAYOUT = np.dtype([("d", "<f2"), ("qh", "u1", (4,)), ("qs", "u1", (16,))])

# Beyond 16, for blocks of one sign: cutting their extreme off may buy a finer step.
SEARCH = SignedSearch(
    n_sub=1, half=16, top=1, grid=tuple(np.arange(12, 18.1, 0.25).tolist()), starts=()
)


def read(blocks: Blocks) -> Any:
    """Codes 0..31; Q5_1 shares it."""
    return split_bits(blocks["qs"], 4, 16) | split_bits(blocks["qh"], 1, 1) << np.uint8(4)


def write(out: Blocks, found: Rounded) -> None:
    """The same, into blocks."""
    out["qs"] = join_bits(found.q & np.uint8(15), 4, 16)
    out["qh"] = join_bits(found.q >> np.uint8(4), 1, 1)


def search(x: F32Array, weights: F32Array | None) -> Rounded:
    """With ``weights`` the codes of least weighted error, as super-blocks of one sub-block, whose
    integer is -1 (or 0, without a scale).

    A NaN makes ``d`` NaN, an infinity infinite or NaN.
    """
    if weights is None:
        return signed(x, 16)
    found = SEARCH.run(x, weights)
    with np.errstate(invalid="ignore"):  # infinity times 0
        d = found.d * found.sc[:, 0]
    return Rounded(d, (found.q + np.int8(16)).view(np.uint8))


def unpack(k: Builder, field: Field) -> list[Val]:
    """Codes 0..31, as those of Q4_0 lie: weights 0 to 15, then 16 to 31."""
    return with_fifths(k, field, 16)


def with_fifths(k: Builder, field: Field, at: int) -> list[Val]:
    """The same where ``qh`` begins ``at`` bits from the block's beginning: those of Q5_1 too."""
    head, lower = k.each(field("d", 8), 8, 2), nibbles(k, field)
    fifths = (spread(k, head, range(at + i, at + i + 16), 4) for i in (0, 16))
    return [low | fifth for low, fifth in zip(lower, fifths, strict=True)]


CODES = Codes(unpack, 16, 31, run=16, order=((0,), (1,)))
Q5_0 = Format(
    "Q5_0", 6, 32, LAYOUT, with_scale(read, 16), searched(LAYOUT, search, write), "q8", CODES
)
