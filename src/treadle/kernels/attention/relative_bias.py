"""Numbers that are added to scores by distance: learned for each head and bucket of distances (T5,
Raffel et al., 2020).

Keys before the query have the first half of the buckets, keys behind it the second. In each half a
quarter of all are near distances, one for each; the others grow as the logarithm does, and the last
one has all distances from ``reach`` on.
"""

from __future__ import annotations

import numpy as np

from treadle.kernels.attention.page_layout import PAGE


def buckets(distances: np.ndarray, n_buckets: int, reach: int) -> np.ndarray:
    """The bucket of each distance, key - query, in tokens. In float32, as the models' own code:
    some logarithms are whole numbers, which rounding must not miss.
    """
    half, exact = n_buckets // 2, n_buckets // 4
    n = np.abs(distances)
    far = np.log(np.maximum(n, 1).astype(np.float32) / np.float32(exact))
    far = far / np.float32(np.log(reach / exact)) * np.float32(half - exact)
    far = np.minimum(exact + far.astype(np.int64), half - 1)
    return np.asarray(np.where(n < exact, n, far) + (distances > 0) * half)


def row_values(reach: int) -> int:
    """f32 values of a head's row of ``by_distance``."""
    return 2 * (reach + PAGE)


def by_distance(matrix: np.ndarray, reach: int) -> np.ndarray:
    """Of ``[n_buckets, n_head]`` the numbers of each head, f32 ``[n_head, row_values]``, for
    distances from ``-(reach + PAGE)`` on: a vector of keys beyond ``reach`` finds equal ones.
    """
    end = reach + PAGE
    found = buckets(np.arange(-end, end), len(matrix), reach)
    return np.ascontiguousarray(matrix[found].T, np.float32)
