"""Arranges inputs so that a convolution is a matrix product (im2col): each row has the values that
one output reads.
"""

from __future__ import annotations

import numpy as np

WIDTH = 3  # window size in each direction; padding is zeros


def rows_of_1d(x: np.ndarray, step: int) -> np.ndarray:
    """Return the im2col rows of a convolution over 3 neighbouring rows, padded with zeros, at every
    ``step``-th row. ``x``: f32 ``[n, c]``; the result: f32 ``[ceil(n / step), c * 3]``, to be
    multiplied with weights ``[n_out, c, 3]``.
    """
    padded = np.pad(x, ((1, 1), (0, 0)))
    seen = np.lib.stride_tricks.sliding_window_view(padded, WIDTH, axis=0)[::step]
    return np.ascontiguousarray(seen.reshape(len(seen), -1))


def rows_of_2d(x: np.ndarray, step: int) -> np.ndarray:
    """Return the im2col rows of a convolution over 3 x 3 neighbours, padded with zeros, in steps of
    ``step`` in both directions. ``x``: f32 ``[h, w, c]``; the result, row by row: f32
    ``[ceil(h / step) * ceil(w / step), c * 9]``, to be multiplied with ``[n_out, c, 3, 3]``.
    """
    padded = np.pad(x, ((1, 1), (1, 1), (0, 0)))
    seen = np.lib.stride_tricks.sliding_window_view(padded, (WIDTH, WIDTH), axis=(0, 1))
    seen = seen[::step, ::step]
    return np.ascontiguousarray(seen.reshape(seen.shape[0] * seen.shape[1], -1))
