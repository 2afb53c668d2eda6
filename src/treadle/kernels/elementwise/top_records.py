"""Requests for a row's largest logits, and their results; without the kernels, so that a run
imports little.
"""

from __future__ import annotations

from typing import Protocol

import numpy as np

from treadle.base.fast_named_tuple import NamedTuple

N_TOP = 64  # above common top_k values and the most alternatives of APIs
TOTAL = 8 * N_TOP  # byte offset of the sum in a result


class AsyncMask(Protocol):
    """A grammar mask that is still being computed when the run begins."""

    def wait(self) -> bytes:
        """Wait for the mask, and return it: one bit for each token id, as in ``LogitsQuery``."""


class LogitsQuery(NamedTuple):
    """A request for a row's N_TOP largest logits. ``mask``: one bit for each token id, 1 if it is
    allowed, lowest bit first; a AsyncMask is waited for before the first step that reads masks.
    ``first``: only the largest one (and its equals). ``total``: also the sum of exponentials.
    """

    mask: bytes | AsyncMask | None = None
    first: bool = False
    total: bool = False


QUERIES = 2  # most queries of one row; at most one has a mask
# A row of the logits; the byte offset of its mask from the run's block, 0 for none.
SAMPLED = np.dtype([(name, "i8") for name in ("row", "mask", "first", "total")])
# A row's result: values and ids, the largest first, ties by lowest id; the sum of exp(x -
# values[0]).
RESULT = np.dtype(
    {
        "names": ["values", "ids", "total"],
        "formats": [("f4", N_TOP), ("i4", N_TOP), "f8"],
        "offsets": [0, 4 * N_TOP, 8 * N_TOP],
        "itemsize": 8 * N_TOP + 64,
    }
)
# Relative error of ``total``, in u = 2**-24. exp is accurate to 2 units (2u), its argument to u
# times its distance from the maximum, whose mean under the softmax is below ln(n_vocab) + 1 < 17. A
# sum of FLUSH terms adds 15u. Joining adds another exp, with an argument accurate to 17u.
TOTAL_ERROR = 64 * 2.0**-24
