"""Pixels to rows of patches: resizing, normalising, cutting, and the order of rows.

Resizing is Pillow's on uint8, as in the processors of transformers that published models were
trained with. torchvision's results differ by one level in some pixels, resized floats by up to 11.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Literal

import numpy as np
import numpy.typing as npt

from treadle.errors import TreadleError
from treadle.media.limits import MOST_RATIO
from treadle.media.picture_file import pillow

Pixels = npt.NDArray[np.uint8]  # [height, width, 3]
Floats = npt.NDArray[np.float32]
Filter = Literal["bilinear", "bicubic", "lanczos"]

BYTE = np.float32(255)


def resize(pixels: Pixels, size: tuple[int, int], how: Filter) -> Pixels:
    """Return the picture resized to ``size`` (height, width) by the filter ``how``; the same array
    if it has that size.
    """
    if pixels.shape[:2] == size:
        return pixels
    image = pillow("Image")
    resampling = getattr(image.Resampling, how.upper())
    made = image.fromarray(pixels).resize(size[::-1], resampling)
    return np.asarray(made)


def normalise(pixels: Pixels, mean: Sequence[float], std: Sequence[float]) -> Floats:
    """Return ``(pixels / 255 - mean) / std``, f32, in transformers' order of operations; ``mean``
    and ``std`` have one number for each colour.
    """
    scaled = pixels.astype(np.float32) / BYTE
    made = (scaled - np.array(mean, np.float32)) / np.array(std, np.float32)
    return np.asarray(made, np.float32)


def patches(values: Floats, side: int) -> Floats:
    """Cut a picture f32 ``[height, width, 3]`` into square patches, row by row: f32 ``[n, 3 *
    side**2]``, a patch's values in the order colour, row, column, as in a convolution's weights.
    """
    h, w, c = values.shape
    made = values.reshape(h // side, side, w // side, side, c).transpose(0, 2, 4, 1, 3)
    return np.ascontiguousarray(made.reshape(h // side * (w // side), c * side * side))


def block_order(grid: tuple[int, int], side: int) -> npt.NDArray[np.int64]:
    """Return the row-major indices of the patches of ``grid`` (rows, columns), int64
    ``[n_patches]``, in another order: block by block of ``side`` x ``side`` patches, each block row
    by row.
    """
    h, w = grid
    at = np.arange(h * w).reshape(h // side, side, w // side, side)
    return at.transpose(0, 2, 1, 3).ravel()


def axial_rotations(
    rows: np.ndarray, columns: np.ndarray, dims: int, base: float = 10000.0
) -> Floats:
    """Return cosines and sines of a 2-D rope for ``n`` patches, f32 ``[n, 2, dims / 2]``: the first
    half of a head's pairs turns by the patch' row, the second half by its column (``rows``,
    ``columns``: ``[n]``; Su et al., arXiv 2104.09864, in two axes).
    """
    half = dims // 2
    frequencies = base ** (-np.arange(0, half, 2) / half)
    angles = np.concatenate(
        [np.multiply.outer(rows, frequencies), np.multiply.outer(columns, frequencies)], axis=1
    )
    return np.stack([np.cos(angles), np.sin(angles)], 1).astype(np.float32)


def check_ratio(size: tuple[int, int]) -> None:
    """Raise TreadleError for a picture without pixels, or one side of which is more than MOST_RATIO
    times the other.
    """
    h, w = size
    if min(size) < 1 or max(size) > MOST_RATIO * min(size):
        what = f"a picture of {w} x {h} pixels"
        raise TreadleError(f"{what}: expected sides whose ratio is at most {MOST_RATIO}")


def area_size(size: tuple[int, int], step: int, least: int, most: int) -> tuple[int, int]:
    """Return height and width, multiples of ``step``, nearest to ``size`` with an area from
    ``least`` to ``most`` pixels: ``smart_resize`` of transformers' Qwen2-VL. Unlike there, ``most``
    holds for long pictures too.

    Raises TreadleError for sides whose ratio is above 200.
    """
    check_ratio(size)
    most = max(most, step * step)
    least = max(1, min(least, most))  # a side may be rounded to 0
    h, w = (round(side / step) * step for side in size)
    if h * w > most:
        shrink = math.sqrt(size[0] * size[1] / most)
        h, w = (max(step, math.floor(side / shrink / step) * step) for side in size)
    elif h * w < least:
        grow = math.sqrt(least / (size[0] * size[1]))
        h, w = (math.ceil(side * grow / step) * step for side in size)
    if h * w > most:  # the shorter side could not shrink further
        longest = most // min(h, w) // step * step
        h, w = min(h, longest), min(w, longest)
    return h, w
