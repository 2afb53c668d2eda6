"""Codes of IQ1: a point of ternary numbers, moved by an eighth up or down.

With the shift no weight is quite zero, and a sub-block may lean to one side.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import cache
from typing import Any

import numpy as np
import numpy.typing as npt

from treadle.formats.format import F32Array
from treadle.formats.grids import IQ1
from treadle.formats.nearest import Index, Nearest

SHIFT = np.float32(0.125)
DOWN = 2048  # the bit of a code beyond the index of its point: shifted down
NEAREST = Nearest(IQ1, 5)


@cache
def points() -> F32Array:
    """[2 * DOWN, 8]: what the codes stand for."""
    grid = IQ1.points.astype(np.float32)
    return np.concatenate([grid + SHIFT, grid - SHIFT])


def values(codes: npt.NDArray[Any]) -> F32Array:
    """[..., n] codes -> [..., 8 n]: what they stand for."""
    return points().take(codes, axis=0).reshape(*codes.shape[:-1], codes.shape[-1] * 8)


@dataclass(frozen=True)
class Shifted:
    """Nearest shifted points, where ``group`` weights share a shift."""

    group: int

    def encode(
        self, u: F32Array, weights: F32Array | None, careful: bool
    ) -> tuple[Index, F32Array]:
        """Codes [n, sub / 8] and values [n, sub] for scale_search: of float32 [n, sub]."""
        tried = []
        for shift, code in ((SHIFT, 0), (-SHIFT, DOWN)):
            codes = NEAREST.encode(u - shift, weights, careful)[0] + code
            r = points().take(codes, axis=0).reshape(u.shape)
            r -= u
            w = r if weights is None else r * weights
            groups = -1, self.group
            loss = np.vecdot(r.reshape(groups), w.reshape(groups))
            tried.append((codes.reshape(len(loss), -1), loss))
        (up, up_loss), (down, down_loss) = tried
        codes = np.where((down_loss < up_loss)[:, None], down, up).reshape(len(u), -1)
        return codes, points().take(codes, axis=0).reshape(u.shape)
