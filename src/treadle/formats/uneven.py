"""The 16 uneven steps of IQ4_NL and IQ4_XS: close around zero, where most weights are."""

from __future__ import annotations

import numpy as np
import numpy.typing as npt

from treadle.formats.format import F32Array

STEPS = np.array(
    [-127, -104, -83, -65, -49, -35, -22, -10, 1, 13, 25, 38, 53, 69, 89, 113], np.float32
)
STEPS.flags.writeable = False
TABLE = [128 + int(v) for v in STEPS]  # as bytes, for kernels

# The borders between two steps are halves or wholes: so every cell of a half has one nearest step.
CELLS = 512
NEAREST = np.abs((np.arange(CELLS) - 255.5)[:, None] / 2 - STEPS).argmin(axis=1).astype(np.uint8)


def encode(
    u: F32Array, weights: F32Array | None, careful: bool
) -> tuple[npt.NDArray[np.uint8], F32Array]:
    """Codes and values as scale_search wants them: float32 [n, sub] -> [n, sub] twice."""
    cell = u * np.float32(2)
    cell += np.float32(CELLS // 2)
    np.clip(cell, 0, CELLS - 1, out=cell)
    codes = NEAREST.take(cell.astype(np.uint16))
    return codes, STEPS.take(codes)
