"""Nearest-point search in a codebook, for many vectors at once.

Space is cut into cells. ``find`` looks up the vector's cell in a table with one point per cell; it
costs little more than rounding and is accurate enough to choose scales. ``search`` compares the
NEARBY points nearest to the cell: for normally distributed vectors it misses the nearest point in
one of a hundred cases, and then by little.
"""

from __future__ import annotations

from typing import Any

import numpy as np
import numpy.typing as npt

from treadle.base.fast_classes import cached_property, dataclass
from treadle.formats.format import F32Array
from treadle.formats.grids import Codebook

NEARBY = 32  # points that ``search`` compares
BATCH = 512  # vectors at once, so that the compared points stay in the L2 cache

Index = npt.NDArray[np.intp]


@dataclass(frozen=True)
class Nearest:
    """Nearest-point search in ``grid``; the table of ``find`` has ``cells`` cells along each
    coordinate.
    """

    grid: Codebook
    cells: int

    def encode(
        self, u: F32Array, weights: F32Array | None, careful: bool
    ) -> tuple[Index, F32Array]:
        """Implement ``FormatCoder.encode``: float32 [n, sub] -> codes [n, sub / dim] and values [n,
        sub].
        """
        v = u.reshape(-1, self.grid.dim)
        if careful:
            found = self.search(v, None if weights is None else weights.reshape(v.shape))
        else:
            found = self.find(v)
        return found.reshape(len(u), -1), self.points.take(found, axis=0).reshape(u.shape)

    def find(self, u: F32Array) -> Index:
        """Return point indices [n] for ``u``, float32 [n, dim]: of the point nearest to the centre
        of each vector's cell.
        """
        return self.table.take(self.cell(u, self.cells)).astype(np.intp)

    def search(self, u: F32Array, weights: F32Array | None) -> Index:
        """Return point indices [n] for ``u`` [n, dim]: of the points near its cell, that of least
        squared error, weighted by ``weights`` [n, dim] if given.

        ``sum w (u - p)^2`` is least where ``sum (w u) p - sum w p^2 / 2`` is largest.
        """
        found = np.empty(len(u), np.intp)
        cell = self.cell(u, len(self.grid.alphabet))
        for i in range(0, len(u), BATCH):
            s = slice(i, i + BATCH)
            near = self.nearby.take(cell[s], axis=0)
            p = self.points.take(near, axis=0)  # [batch, NEARBY, dim]
            if weights is None:
                score = np.matmul(p, u[s, :, None])[..., 0]
                score -= self.half_squares.take(near)
            else:
                score = np.matmul(p, (weights[s] * u[s])[..., None])[..., 0]
                p *= p
                score -= np.matmul(p, (weights[s] * np.float32(0.5))[..., None])[..., 0]
            best = score.argmax(axis=1)[:, None]
            found[s] = np.take_along_axis(near, best, axis=1)[:, 0]
        return found

    def cell(self, u: F32Array, n: int) -> Index:
        """Return the cell numbers [n] of ``u`` [n, dim], below ``n ** dim``, with ``n`` cells along
        each coordinate.
        """
        low = self.grid.alphabet[0]
        high = self.grid.alphabet[-1]
        pitch = (high - low) / (n - 1)
        at = u * np.float32(1 / pitch)
        at += np.float32(0.5 - low / pitch)  # plus a half, so that the truncating cast rounds
        np.clip(at, 0, n - 0.5, out=at)
        return number(at.astype(np.uint8), n)

    @cached_property
    def points(self) -> F32Array:
        """The codebook's points as float32 [n, dim]."""
        return self.grid.points.astype(np.float32)

    @cached_property
    def half_squares(self) -> F32Array:
        """Half the squared length, |p|^2 / 2, of each point, [n]."""
        squares: F32Array = (self.points**2).sum(axis=1) / np.float32(2)
        return squares

    @cached_property
    def table(self) -> npt.NDArray[np.uint16]:
        """The point nearest to each cell's centre, [cells ** dim].

        |p - c|^2 is a sum over coordinates, so it is split into a term of the lower half of the
        coordinates plus a term of the upper half.
        """
        half = self.grid.dim // 2
        centre = corners(self.ends(self.cells), half)  # [cells ** half, half]
        low, high = (
            ((centre[:, None] - p) ** 2).sum(axis=-1) for p in np.hsplit(self.points, 2)
        )  # [cells ** half, n]
        table = np.empty((len(centre), len(centre)), np.uint16)
        total = np.empty_like(low)
        for row, rest in zip(table, high, strict=True):
            row[:] = np.add(low, rest, out=total).argmin(axis=1)
        return table.reshape(-1)

    @cached_property
    def nearby(self) -> npt.NDArray[np.uint16]:
        """The points nearest to each cell, [len(alphabet) ** dim, NEARBY]."""
        centre = corners(self.ends(len(self.grid.alphabet)), self.grid.dim)
        near = np.empty((len(centre), NEARBY), np.uint16)
        for i in range(0, len(centre), BATCH):
            far = self.half_squares - centre[i : i + BATCH] @ self.points.T
            near[i : i + BATCH] = np.argpartition(far, NEARBY - 1, axis=1)[:, :NEARBY]
        return near

    def ends(self, n: int) -> F32Array:
        """Return the centres of ``n`` cells along a coordinate, [n]."""
        return np.linspace(self.grid.alphabet[0], self.grid.alphabet[-1], n, dtype=np.float32)


def corners(at: F32Array, dim: int) -> F32Array:
    """Return all vectors whose coordinates are numbers of ``at``, [len(at) ** dim, dim]; coordinate
    0 varies fastest.
    """
    n = len(at)
    return at[np.arange(n**dim)[:, None] // n ** np.arange(dim) % n]


def number(digits: npt.NDArray[np.uint8], base: int) -> npt.NDArray[Any]:
    """Convert digits [n, dim] in ``base``, least significant first, to numbers [n].

    All digits of a vector are in one word, and every round combines neighbours within it.
    """
    dim = digits.shape[1]
    word = digits.view(f"<u{dim}")[:, 0].astype(np.uint64)
    bits = 8
    while bits < 8 * dim:
        mask = np.uint64(sum(((1 << bits) - 1) << i for i in range(0, 8 * dim, 2 * bits)))
        word = (word & mask) + (word >> np.uint64(bits) & mask) * np.uint64(base)
        bits = 2 * bits
        base = base * base
    return word.astype(np.intp)
