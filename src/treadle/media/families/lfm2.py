"""LFM2-VL (``lfm2``): a SigLIP 2 tower on pictures in their own shape; large ones are cut into
square tiles, with a smaller whole picture behind them.
"""

from __future__ import annotations

import math

import numpy as np

from treadle.base.fast_dataclass import dataclass
from treadle.media.pixels import BILINEAR, resize
from treadle.media.tiles import Size, closest_grid, tiles_of


@dataclass(frozen=True)
class Lfm2Limits:
    """Limits of a picture in media rows, and of its tiles. The files do not name them, so these are
    the published models': LiquidAI/LFM2-VL-1.6B's preprocessor_config.json.
    """

    min_rows: int = 64
    max_rows: int = 256
    tile: int = 512  # pixels of a tile's side
    min_tiles: int = 2
    max_tiles: int = 10
    tolerance: float = 2.0  # a picture of more than ``tolerance * max_rows`` rows is cut


def scaled_size(size: Size, step: int, limits: Lfm2Limits) -> Size:
    """Return the size in multiples of ``step`` pixels, a media row's side, within the limits of
    rows.
    """
    height, width = size
    rows = max(1, round(height / step))
    columns = max(1, round(width / step))
    if rows * columns > limits.max_rows:
        scale = math.sqrt(height * width / (limits.max_rows * step * step))
        rows = max(1, math.floor(height / scale / step))
        columns = max(1, math.floor(width / scale / step))
    elif rows * columns < limits.min_rows:
        scale = math.sqrt(limits.min_rows * step * step / (height * width))
        rows = math.ceil(height * scale / step)
        columns = math.ceil(width * scale / step)
    return rows * step, columns * step


def tile_grid(size: Size, step: int, limits: Lfm2Limits) -> Size:
    """Return the rows and columns of tiles of a picture; (1, 1): it is not cut."""
    rows = max(1, round(size[0] / step))
    columns = max(1, round(size[1] / step))
    if rows * columns <= limits.max_rows * limits.tolerance or limits.max_tiles < 2:
        return 1, 1
    n_min = min(limits.min_tiles, limits.max_tiles)
    return closest_grid(size, limits.tile, n_min, limits.max_tiles)


def cut(pixels: np.ndarray, step: int, limits: Lfm2Limits) -> tuple[list[np.ndarray], Size]:
    """Return a picture's tiles row by row, with the whole picture in its own shape behind them, and
    the rows and columns of tiles; of a picture that is not cut, only the whole.
    """
    size = pixels.shape[0], pixels.shape[1]
    whole = resize(pixels, scaled_size(size, step, limits), BILINEAR)
    grid = tile_grid(size, step, limits)
    if grid == (1, 1):
        return [whole], grid
    side = limits.tile
    canvas = resize(pixels, (grid[0] * side, grid[1] * side), BILINEAR)
    return [*tiles_of(canvas, side, side), whole], grid


def layout(grid: Size, per_tile: int, per_whole: int) -> tuple[str | range, ...]:
    """Return what stands in the prompt for a picture of ``grid`` tiles of ``per_tile`` media rows,
    and a whole picture of ``per_whole``.
    """
    if grid == (1, 1):
        return "<|image_start|>", range(per_whole), "<|image_end|>"
    parts: list[str | range] = []
    text = "<|image_start|>"
    first = 0
    for row in range(1, grid[0] + 1):
        for column in range(1, grid[1] + 1):
            parts += [f"{text}<|img_row_{row}_col_{column}|>", range(first, first + per_tile)]
            first += per_tile
            text = ""
    whole = range(first, first + per_whole)
    return *parts, "<|img_thumbnail|>", whole, "<|image_end|>"


def resized_positions(table: np.ndarray, grid: Size) -> np.ndarray:
    """Return rows of a square table of positions ``[side * side, d]``, resized to ``grid`` by
    triangles that widen where the table is reduced (bilinear with antialias): f32
    ``[rows * columns, d]``.
    """
    side = math.isqrt(len(table))
    squares = table.reshape(side, side, -1).astype(np.float64)
    down = _triangles(grid[0], side)
    across = _triangles(grid[1], side)
    rows: np.ndarray = np.einsum("ra,cb,abd->rcd", down, across, squares)
    made: np.ndarray = rows.reshape(grid[0] * grid[1], -1).astype(np.float32)
    return made


def _triangles(n: int, side: int) -> np.ndarray:
    """Return the weights ``[n, side]`` of ``side`` samples in each of ``n``."""
    scale = side / n
    centres = (np.arange(n) + 0.5) * scale - 0.5
    distances = np.abs(np.arange(side) - centres[:, None])
    weights = np.maximum(0.0, 1 - distances / max(scale, 1.0))
    made: np.ndarray = weights / weights.sum(1, keepdims=True)
    return made
