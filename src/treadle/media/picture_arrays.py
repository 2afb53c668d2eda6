"""Converts arrays of pixels, in the forms that callers have, to uint8 RGB."""

from __future__ import annotations

from typing import Any

import numpy as np

from treadle.errors import TreadleError
from treadle.media.limits import MediaLimits

ROWS = 64  # converted at a time: temporary arrays stay small beside a large picture


def rgb_of_array(array: np.ndarray, place: str, limits: MediaLimits | None = None) -> np.ndarray:
    """Return an array of pixels as a new array uint8 ``[h, w, 3]``.

    ``array``: ``[h, w]`` or ``[h, w, 1]`` (grey), ``[h, w, 3]``, or ``[h, w, 4]`` with alpha, which
    is blended with white; uint8, uint16 (65535 is white), or floats from 0 to 1. Raises
    TreadleError for anything else, UnsupportedError beyond ``limits`` (None: without limits).
    ``place`` names the array in errors.
    """
    if array.ndim == 2:
        array = array[:, :, None]
    if array.ndim != 3 or array.shape[2] not in (1, 3, 4):
        raise TreadleError(
            f"{place}: an array of shape {list(array.shape)}: expected [h, w] or [h, w, 3 or 4]"
        )
    floats = array.dtype.kind == "f"
    if not floats and array.dtype not in (np.uint8, np.uint16):
        raise TreadleError(
            f"{place}: an array of {array.dtype}: expected uint8, uint16, or floats from 0 to 1"
        )
    height, width, _ = array.shape
    if limits is not None:
        limits.check_size(height, width, place)
    out = np.empty((height, width, 3), np.uint8)
    for begin in range(0, height, ROWS):
        rows = array[begin : begin + ROWS]
        if floats:
            rows = _from_floats(rows, place)
        elif array.dtype == np.uint16:
            rows = _from_16_bits(rows)
        out[begin : begin + ROWS] = on_white(rows) if rows.shape[2] == 4 else rows
    return out


def on_white(rgba: np.ndarray) -> np.ndarray:
    """Return RGBA pixels, uint8 ``[h, w, 4]``, blended with white: uint8 ``[h, w, 3]``, exactly
    rounded.
    """
    alpha = rgba[:, :, 3:].astype(np.uint16)
    mixed = rgba[:, :, :3] * alpha
    mixed += (255 - alpha) * np.uint16(255)  # at most 255 * 255
    # round(mixed / 255) without a division; exact for every product of two bytes
    mixed += 128
    mixed += mixed >> 8
    mixed >>= 8
    return mixed.astype(np.uint8)


def _from_16_bits(values: np.ndarray) -> np.ndarray:
    """Return values of 16 bits as uint8, ``round(values / 257)``: 65535 becomes 255."""
    return ((values.astype(np.uint32) * 255 + 32767) // 65535).astype(np.uint8)


def _from_floats(values: np.ndarray, place: str) -> np.ndarray:
    least: Any = values.min()
    most: Any = values.max()
    if not (least >= 0 and most <= 1):  # NaN fails both
        found = least if not least >= 0 else most
        raise TreadleError(f"{place}: an array of floats has {found:g}: expected 0 to 1")
    return np.rint(values.astype(np.float32) * 255).astype(np.uint8)
