"""Cuts pictures into tiles, and chooses how many rows and columns of tiles.

Towers that were trained on squares of one size read a large picture as a grid of tiles of that
size, and usually the whole picture once more, scaled to one tile.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from treadle.errors import TreadleError

if TYPE_CHECKING:
    import numpy as np

Size = tuple[int, int]  # height and width


def tiles_of(pixels: np.ndarray, height: int, width: int) -> list[np.ndarray]:
    """Cut ``pixels`` ``[h, w, ...]`` into tiles of ``height`` x ``width``, row by row; the tiles
    are views. The picture's sides must be multiples of the tile's.
    """
    return [
        pixels[top : top + height, left : left + width]
        for top in range(0, pixels.shape[0], height)
        for left in range(0, pixels.shape[1], width)
    ]


def closest_grid(size: Size, tile: int, n_min: int, n_max: int) -> Size:
    """Return the rows and columns of the grid of ``n_min`` to ``n_max`` square tiles whose ratio is
    closest to that of a picture of ``size``. ``tile``: pixels of a tile's side.

    Of grids of one ratio, the largest with less than twice the picture's pixels is taken, else the
    smallest. The rule is InternVL's ("dynamic resolution", 2024), with the order of candidates in
    transformers.
    """
    height, width = size
    grids = [
        (rows, columns)
        for columns in range(1, n_max + 1)
        for rows in range(1, n_max + 1)
        if n_min <= rows * columns <= n_max
    ]
    best = (1, 1)
    least = float("inf")
    for rows, columns in sorted(grids, key=lambda grid: grid[0] * grid[1]):
        difference = abs(width / height - columns / rows)
        large = height * width > 0.5 * tile * tile * rows * columns
        if difference < least or (difference == least and large):
            least = difference
            best = (rows, columns)
    return best


def tiles_within(max_rows: int | None, per_tile: int, default: int) -> int:
    """Return how many tiles of ``per_tile`` media rows each, with the whole picture as one more,
    fit ``max_rows``: at least 1, at most ``default``. None: ``default``.

    Raises TreadleError if a single tile has more than ``max_rows``.
    """
    if max_rows is None:
        return default
    check_rows(per_tile, max_rows)
    return max(1, min(default, max_rows // per_tile - 1))


def check_rows(n_rows: int, max_rows: int | None) -> None:
    """Raise TreadleError if ``n_rows`` media rows are more than ``max_rows`` (None: any number)."""
    if max_rows is not None and n_rows > max_rows:
        raise TreadleError(
            f"a picture takes at least {n_rows} tokens with this projector "
            f"(expected at most {max_rows}): allow more tokens a picture"
        )
