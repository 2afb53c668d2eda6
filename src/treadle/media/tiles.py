"""Pictures cut into tiles: how many rows and columns of tiles, and the cut itself.

Towers that were trained on one square size see a large picture as a grid of tiles of that size, and
mostly the whole picture once more, scaled to one tile.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from treadle.errors import TreadleError

if TYPE_CHECKING:
    import numpy as np

Size = tuple[int, int]  # height and width


def tiles_of(pixels: np.ndarray, height: int, width: int) -> list[np.ndarray]:
    """Cut ``pixels`` ``[h, w, ...]``, whose sides are multiples of the tile's, into tiles, row by
    row.
    """
    return [
        pixels[top : top + height, left : left + width]
        for top in range(0, pixels.shape[0], height)
        for left in range(0, pixels.shape[1], width)
    ]


def closest_grid(size: Size, tile: int, n_min: int, n_max: int) -> Size:
    """Return rows and columns of the grid of ``n_min`` to ``n_max`` tiles whose shape is closest to
    the picture's.

    Of grids of one shape, the largest that has less than twice the picture's pixels is taken, else
    the smallest. The rule is InternVL's ("dynamic resolution", 2024), with transformers' order of
    candidates.
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
    """Return how many tiles, besides the whole picture as one tile more, have at most ``max_rows``
    media rows in all, if each has ``per_tile``; at most ``default``. None bounds nothing.

    Raises TreadleError if a single tile has more rows.
    """
    if max_rows is None:
        return default
    check_rows(per_tile, max_rows)
    return max(1, min(default, max_rows // per_tile - 1))


def check_rows(n_rows: int, max_rows: int | None) -> None:
    """Raise TreadleError if ``n_rows`` media rows are more than ``max_rows``."""
    if max_rows is not None and n_rows > max_rows:
        raise TreadleError(
            f"a picture takes at least {n_rows} tokens with this projector "
            f"(expected at most {max_rows}): allow more tokens a picture"
        )
