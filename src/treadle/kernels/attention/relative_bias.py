"""Biases of scores by distance, learned for each head and bucket of distances (T5, Raffel et al.,
2020).

In an encoder, keys before the query use the first half of the buckets, keys after it the second; in
a decoder, whose queries see no later keys, keys before the query use all. Of each side's buckets,
half are single near distances; the others grow logarithmically, and the last one has all distances
from ``reach`` on.
"""

from __future__ import annotations

import numpy as np

from treadle.kernels.run_state import PAGE


def buckets(
    distances: np.ndarray, n_buckets: int, reach: int, *, causal: bool = False
) -> np.ndarray:
    """Return the bucket number of each distance (key - query, in tokens), from 0 to ``n_buckets -
    1``; with ``causal`` later keys have the bucket of distance 0. ``reach``: the distance from
    which on all have the last bucket. Computed in float32, as by the models' own code: some
    logarithms are whole numbers, and rounding must agree.
    """
    side = n_buckets if causal else n_buckets // 2
    exact = side // 2
    n = np.maximum(-distances, 0) if causal else np.abs(distances)
    far = np.log(np.maximum(n, 1).astype(np.float32) / np.float32(exact))
    far = far / np.float32(np.log(reach / exact)) * np.float32(side - exact)
    far = np.minimum(exact + far.astype(np.int64), side - 1)
    near = np.where(n < exact, n, far)
    return np.asarray(near if causal else near + (distances > 0) * side)


def row_values(reach: int) -> int:
    """Return the number of f32 values in a head's row of ``biases_by_distance``, for distances up
    to ``reach`` and a page beyond on either side.
    """
    return 2 * (reach + PAGE)


def biases_by_distance(matrix: np.ndarray, reach: int, *, causal: bool = False) -> np.ndarray:
    """Return each head's biases, f32 ``[n_head, row_values(reach)]``, for consecutive distances
    from ``-(reach + PAGE)`` on. ``matrix [n_buckets, n_head]``: the bias of each bucket. Beyond
    ``reach`` all are equal, so a kernel may clamp the index from which it loads a vector of biases.
    ``causal``: later keys have the bias of distance 0.
    """
    end = reach + PAGE
    found = buckets(np.arange(-end, end), len(matrix), reach, causal=causal)
    return np.ascontiguousarray(matrix[found].T, np.float32)
