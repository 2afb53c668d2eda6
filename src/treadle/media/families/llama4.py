"""Llama 4 (``llama4``): square tiles of a canvas in the picture's shape, then the whole picture."""

from __future__ import annotations

import math

import numpy as np

from treadle.media.pixels import BILINEAR, resize
from treadle.media.tiles import Size, tiles_of


def canvases(n_max: int, tile: int) -> list[Size]:
    """Return the sizes of all grids of at most ``n_max`` tiles, grids of one shape together, and
    those with most tiles first.
    """
    shapes: dict[float, list[Size]] = {}
    for n in range(n_max, 0, -1):
        for rows in (factor for factor in range(1, n + 1) if n % factor == 0):
            columns = n // rows
            shapes.setdefault(rows / columns, []).append((rows * tile, columns * tile))
    return [canvas for group in shapes.values() for canvas in group]


def best_canvas(size: Size, sizes: list[Size]) -> Size:
    """Return the canvas that needs the least enlargement of the picture, or else the least
    reduction; of several, the smallest.
    """
    sides = np.asarray(sizes, np.float32) / np.asarray(size, np.float32)
    scales = sides.min(1)
    larger = scales[scales >= 1]
    scale = larger.min() if len(larger) else scales.max()
    fitting = [canvas for canvas, each in zip(sizes, scales, strict=True) if each == scale]
    return min(fitting, key=lambda canvas: canvas[0] * canvas[1])


def fitted_size(size: Size, canvas: Size, tile: int) -> Size:
    """Return the size of a picture in its shape on a canvas, rounded down; it is enlarged to one
    tile at most.
    """
    height, width = size
    room = min(max(height, tile), canvas[0]), min(max(width, tile), canvas[1])
    across = room[1] / width
    down = room[0] / height
    if across < down:
        return max(1, min(math.floor(height * across), room[0])), room[1]
    return room[0], max(1, min(math.floor(width * down), room[1]))


def cut(pixels: np.ndarray, tile: int, n_max: int) -> tuple[list[np.ndarray], Size]:
    """Return a picture's tiles row by row, on a black canvas, and, where there are several, the
    whole picture squeezed to one more; and the rows and columns of tiles.
    """
    size = pixels.shape[0], pixels.shape[1]
    canvas = best_canvas(size, canvases(n_max, tile))
    grid = canvas[0] // tile, canvas[1] // tile
    height, width = fitted_size(size, canvas, tile)
    board = np.zeros((*canvas, 3), np.uint8)
    board[:height, :width] = resize(pixels, (height, width), BILINEAR)
    tiles = tiles_of(board, tile, tile)
    if len(tiles) == 1:
        return tiles, grid
    return [*tiles, resize(pixels, (tile, tile), BILINEAR)], grid


def layout(grid: Size, per_tile: int) -> tuple[str | range, ...]:
    """Return what stands in the prompt for a picture of ``grid`` tiles with ``per_tile`` media rows
    each, and for the whole picture behind them.
    """
    rows, columns = grid
    parts: list[str | range] = []
    text = "<|image_start|>"
    first = 0
    for _ in range(rows if rows * columns > 1 else 0):
        for column in range(columns):
            parts += [text, range(first, first + per_tile)]
            first += per_tile
            text = "<|tile_x_separator|>" if column + 1 < columns else "<|tile_y_separator|>"
    parts += [f"{text}<|image|>", range(first, first + per_tile), "<|image_end|>"]
    return tuple(parts)
