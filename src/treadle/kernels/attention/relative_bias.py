"""Biases of scores by distance, learned for each head and bucket of distances (T5, Raffel et al.,
2020).

Keys before the query use the first half of the buckets, keys after it the second. In each half, a
quarter of all buckets are single near distances; the others grow logarithmically, and the last one
has all distances from ``reach`` on.
"""

from __future__ import annotations

import numpy as np

from treadle.kernels.attention.records import PAGE


def buckets(distances: np.ndarray, n_buckets: int, reach: int) -> np.ndarray:
    """Return the bucket of each distance, key - query, in tokens. Computed in float32, as by the
    models' own code: some logarithms are whole numbers, and rounding must agree.
    """
    half = n_buckets // 2
    exact = n_buckets // 4
    n = np.abs(distances)
    far = np.log(np.maximum(n, 1).astype(np.float32) / np.float32(exact))
    far = far / np.float32(np.log(reach / exact)) * np.float32(half - exact)
    far = np.minimum(exact + far.astype(np.int64), half - 1)
    return np.asarray(np.where(n < exact, n, far) + (distances > 0) * half)


def row_values(reach: int) -> int:
    """Return the f32 values of a head's row of ``by_distance``."""
    return 2 * (reach + PAGE)


def by_distance(matrix: np.ndarray, reach: int) -> np.ndarray:
    """Return each head's biases from ``[n_buckets, n_head]``, f32 ``[n_head, row_values]``, for
    distances from ``-(reach + PAGE)`` on. Beyond ``reach`` all are equal, so that a vector of keys
    can be clamped.
    """
    end = reach + PAGE
    found = buckets(np.arange(-end, end), len(matrix), reach)
    return np.ascontiguousarray(matrix[found].T, np.float32)
