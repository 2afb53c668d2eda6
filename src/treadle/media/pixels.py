"""Pixels on their way to a tower: resized, normalised, and lined up as rows of patches.

Sizes are height and width. Resizing is Pillow's, on uint8: that is what the models' own
preparation does, so values are equal to the last bit.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from treadle.errors import TreadleError

NEAREST = 0
LANCZOS = 1
BILINEAR = 2
BICUBIC = 3

Size = tuple[int, int]


def resize(pixels: np.ndarray, size: Size, resample: int) -> np.ndarray:
    """Return uint8 ``pixels`` ``[h, w, 3]`` in another size; ``resample`` is Pillow's number of a
    filter, as preprocessor_config.json has it.

    Raises TreadleError where Pillow is not installed.
    """
    try:
        from PIL import Image
    except ImportError as error:
        raise TreadleError(
            'pictures need Pillow, which is not installed: pip install "treadle[pictures]"'
        ) from error
    height, width = size
    picture = Image.fromarray(np.ascontiguousarray(pixels))
    return np.asarray(picture.resize((width, height), Image.Resampling(resample)))


def normalise(pixels: np.ndarray, mean: Sequence[float], std: Sequence[float]) -> np.ndarray:
    """Return ``(pixels / 255 - mean) / std`` by colour, f32, of uint8 ``[..., 3]``.

    Every value is computed once for each of the 256 levels, in the precision of the models' own
    preparation: the quotient in f64, the rest in f32.
    """
    levels = (np.arange(256) * (1 / 255)).astype(np.float32)[:, None]
    table = (levels - np.asarray(mean, np.float32)) / np.asarray(std, np.float32)
    values: np.ndarray = table[pixels, np.arange(3)]
    return values


def patch_rows(values: np.ndarray, patch: int) -> np.ndarray:
    """Return the patches of ``values`` ``[h, w, 3]`` row by row, f32 ``[n, 3 * patch * patch]``.

    Columns are colour, row, column, as in the weights of a convolution. The sides of ``values`` are
    multiples of ``patch``.
    """
    height, width, n_colours = values.shape
    rows = height // patch
    columns = width // patch
    grid = values.reshape(rows, patch, columns, patch, n_colours).transpose(0, 2, 4, 1, 3)
    return np.ascontiguousarray(grid.reshape(rows * columns, -1))


def join_patches(states: np.ndarray, grid: Size, side: int, *, inner: str = "d") -> np.ndarray:
    """Join blocks of ``side`` x ``side`` neighbouring patches into one row each.

    states: f32 ``[rows * columns, d]`` of a grid, row by row.
    inner: order within a joined row: "d" (row, column, d) or "grid" (d, row, column), which is that
        of a convolution's weights.

    Returns f32 ``[rows * columns / side**2, side**2 * d]``.
    """
    rows, columns = grid
    width = states.shape[1]
    blocks = states.reshape(rows // side, side, columns // side, side, width)
    axes = (0, 2, 1, 3, 4) if inner == "d" else (0, 2, 4, 1, 3)
    return np.ascontiguousarray(blocks.transpose(axes).reshape(-1, side * side * width))
