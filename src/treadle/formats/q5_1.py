"""Q5_1: 32 weights of five bits with one scale and one minimum; ``w = d * q + m``.

The codes lie in ``qs`` and ``qh`` as in Q5_0.
"""

from __future__ import annotations

import numpy as np

from treadle.formats.format import Builder, Codes, F32Array, Field, Format, Val
from treadle.formats.k_offset import OffsetSearch, product
from treadle.formats.numbers import searched, with_scale
from treadle.formats.q5_0 import read, with_fifths, write
from treadle.formats.rounding import Rounded, above

LAYOUT = np.dtype([("d", "<f2"), ("m", "<f2"), ("qh", "u1", (4,)), ("qs", "u1", (16,))])

SEARCH = OffsetSearch(
    n_sub=1, levels=31, top=1, grid=product(np.linspace(-1, 0.5, 7)), starts=((0.0, 0.0),)
)


def search(x: F32Array, weights: F32Array | None) -> Rounded:
    """With ``weights`` the codes of least weighted error, as super-blocks of one sub-block, whose
    integers are 1 (or 0, without what they scale).

    A NaN makes ``d`` NaN, an infinity infinite or NaN.
    """
    if weights is None:
        return above(x, 31)
    found = SEARCH.run(x, weights)
    with np.errstate(invalid="ignore"):  # infinity times 0
        d = found.d * found.sc[:, 0].astype(np.float32)
    return Rounded(d, found.q, -found.dmin * found.m[:, 0].astype(np.float32))


def unpack(k: Builder, field: Field) -> list[Val]:
    """Codes 0..31, in the order of Q5_0's."""
    return with_fifths(k, field, 32)


CODES = Codes(unpack, 0, 31, m="m", run=16, order=((0,), (1,)))
Q5_1 = Format("Q5_1", 7, 32, LAYOUT, with_scale(read), searched(LAYOUT, search, write), "q8", CODES)
