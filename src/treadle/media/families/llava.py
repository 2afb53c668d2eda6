"""LLaVA 1.5 and 1.6 (``mlp``): a CLIP tower with a class token, of a square or of tiles."""

from __future__ import annotations

import math
from collections.abc import Sequence

import numpy as np

from treadle.media.pixels import BICUBIC, resize
from treadle.media.tiles import Size, tiles_of


def centre_square(pixels: np.ndarray, side: int) -> np.ndarray:
    """Return the middle square of a picture whose shorter side was scaled to ``side``."""
    height, width, _ = pixels.shape
    long = int(side * max(height, width) / min(height, width))
    size = (long, side) if height > width else (side, long)
    scaled = resize(pixels, size, BICUBIC)
    top = (size[0] - side) // 2
    left = (size[1] - side) // 2
    return scaled[top : top + side, left : left + side]


def best_canvas(size: Size, canvases: Sequence[Size]) -> Size:
    """Return the canvas in which most of the picture's pixels are kept, and of several the one that
    wastes least.
    """
    height, width = size
    kept_most = 0
    wasted_least = math.inf
    best = canvases[0]
    for canvas in canvases:
        scale = min(canvas[1] / width, canvas[0] / height)
        kept = min(int(width * scale) * int(height * scale), width * height)
        wasted = canvas[0] * canvas[1] - kept
        if kept > kept_most or (kept == kept_most and wasted < wasted_least):
            kept_most = kept
            wasted_least = wasted
            best = canvas
    return best


def fitted_size(size: Size, canvas: Size) -> Size:
    """Return the size of a picture scaled, in its shape, to just fit a canvas; rounded up."""
    height, width = size
    across = canvas[1] / width
    down = canvas[0] / height
    if across < down:
        return min(math.ceil(height * across), canvas[0]), canvas[1]
    return canvas[0], min(math.ceil(width * down), canvas[1])


def cut(pixels: np.ndarray, canvas: Size, side: int) -> list[np.ndarray]:
    """Return the whole picture squeezed to a square of ``side`` pixels, then the tiles of a canvas
    that has it in its middle, on black.
    """
    size = pixels.shape[0], pixels.shape[1]
    fitted = fitted_size(size, canvas)
    board = np.zeros((*canvas, 3), np.uint8)
    top = (canvas[0] - fitted[0]) // 2
    left = (canvas[1] - fitted[1]) // 2
    scaled = resize(pixels, fitted, BICUBIC)
    board[top : top + fitted[0], left : left + fitted[1]] = scaled
    return [resize(pixels, (side, side), BICUBIC), *tiles_of(board, side, side)]


def unpadded(size: Size, grid: Size) -> tuple[slice, slice]:
    """Return the rows and columns of a grid of states that a picture of ``size`` covers; those
    beside them are of the black canvas.
    """
    height, width = size
    rows, columns = grid
    if width / height > columns / rows:
        covered = int(round(height * (columns / width), 7))
        padding = (rows - covered) // 2
        return slice(padding, rows - padding), slice(0, columns)
    covered = int(round(width * (rows / height), 7))
    padding = (columns - covered) // 2
    return slice(0, rows), slice(padding, columns - padding)
