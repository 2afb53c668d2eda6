"""SmolVLM, SmolVLM2, Idefics 3, Granite-Docling (``idefics3``): square tiles, then the whole
picture as one more; each tile's place is named in the text.
"""

from __future__ import annotations

import math

import numpy as np

from treadle.media.pixels import LANCZOS, resize
from treadle.media.tiles import Size, check_rows, tiles_of

LARGEST = 4096  # pixels of the longer side, whatever the settings say

FAKE = "<fake_token_around_image>"


def scaled_size(size: Size, longest: int) -> Size:
    """Return the size whose longer side is ``longest``; the shorter one is rounded to an even
    number.
    """
    height, width = size
    ratio = width / height
    if width >= height:
        width = longest
        height = int(width / ratio)
        height += height % 2
    else:
        height = longest
        width = int(height * ratio)
        width += width % 2
    return _within(max(height, 1), max(width, 1))


def _within(height: int, width: int) -> Size:
    """Return the size with its longer side at most ``LARGEST``."""
    ratio = width / height
    if width >= height and width > LARGEST:
        width = LARGEST
        height = int(width / ratio)
    elif height > width and height > LARGEST:
        height = LARGEST
        width = int(height * ratio)
    return max(height, 1), max(width, 1)


def canvas_size(size: Size, tile: int) -> Size:
    """Return ``size`` with both sides rounded up to multiples of ``tile``."""
    height, width = size
    ratio = width / height
    if width >= height:
        width = math.ceil(width / tile) * tile
        height = math.ceil(int(width / ratio) / tile) * tile
    else:
        height = math.ceil(height / tile) * tile
        width = math.ceil(int(height * ratio) / tile) * tile
    return height, width


def cut(
    pixels: np.ndarray, tile: int, longest: int, per_tile: int, max_rows: int | None
) -> tuple[list[np.ndarray], Size]:
    """Return a picture's tiles row by row and, behind them, the whole picture as a tile; and the
    rows and columns of tiles. A picture that is one tile has no others: (0, 0).

    tile: pixels of a tile's side. longest: pixels of the scaled picture's longer side.
    per_tile: media rows of a tile, of which all have at most ``max_rows``.

    The steps are those of transformers' ``Idefics3ImageProcessor``: the picture is resized twice.
    Raises TreadleError if one tile has more than ``max_rows``.
    """
    size = pixels.shape[0], pixels.shape[1]
    check_rows(per_tile, max_rows)
    while True:
        scaled = scaled_size(size, longest)
        canvas = canvas_size(scaled, tile)
        grid = canvas[0] // tile, canvas[1] // tile
        n_tiles = grid[0] * grid[1]
        if n_tiles == 1 or max_rows is None or (n_tiles + 1) * per_tile <= max_rows:
            break
        longest -= tile
    whole = resize(resize(pixels, scaled, LANCZOS), canvas, LANCZOS)
    if n_tiles == 1:
        return [whole], (0, 0)
    return [*tiles_of(whole, tile, tile), resize(whole, (tile, tile), LANCZOS)], grid


def layout(grid: Size, per_tile: int) -> tuple[str | range, ...]:
    """Return what stands in the prompt for a picture of ``grid`` tiles, with ``per_tile`` media
    rows each, and for the whole picture behind them.
    """
    rows, columns = grid
    parts: list[str | range] = []
    text = ""
    first = 0
    for row in range(1, rows + 1):
        for column in range(1, columns + 1):
            parts += [f"{text}{FAKE}<row_{row}_col_{column}>", range(first, first + per_tile)]
            first += per_tile
            text = ""
        text = "\n"
    text = "\n\n" if rows else ""
    parts += [f"{text}{FAKE}<global-img>", range(first, first + per_tile), FAKE]
    return tuple(parts)
