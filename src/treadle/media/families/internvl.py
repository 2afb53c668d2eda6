"""InternVL 2.5 to 3.5 (``internvl``): square tiles and the whole picture, nothing between them."""

from __future__ import annotations

import numpy as np

from treadle.media.pixels import BICUBIC, resize
from treadle.media.tiles import closest_grid, tiles_of


def cut(pixels: np.ndarray, tile: int, n_min: int, n_max: int) -> list[np.ndarray]:
    """Return the picture as ``n_min`` to ``n_max`` square tiles of ``tile`` pixels a side, row by
    row, and, where there are several, the whole picture as one more.
    """
    rows, columns = closest_grid((pixels.shape[0], pixels.shape[1]), tile, n_min, n_max)
    tiles = tiles_of(resize(pixels, (rows * tile, columns * tile), BICUBIC), tile, tile)
    return tiles if len(tiles) == 1 else [*tiles, resize(pixels, (tile, tile), BICUBIC)]
