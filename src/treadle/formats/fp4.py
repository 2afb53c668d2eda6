"""E2M1, the four-bit float of the microscaling formats: sign, two exponent bits, one of mantissa.

Its magnitudes are 0, 0.5, 1, 1.5, 2, 3, 4 and 6. ggml keeps them doubled, so that they are whole
numbers a kernel can multiply as bytes, and halves the scales instead; so does treadle.
"""

from __future__ import annotations

import numpy as np
import numpy.typing as npt

from treadle.formats.format import F32Array

MAGNITUDES = np.array([0, 1, 2, 3, 4, 6, 8, 12], np.float32)
VALUES = np.concatenate([MAGNITUDES, -MAGNITUDES])  # by code; code 8, the negative zero, is 0
VALUES[8] = 0
TABLE = [16 + int(v) for v in VALUES]  # as bytes, for kernels
MIDDLES = ((MAGNITUDES[1:] + MAGNITUDES[:-1]) / 2).tolist()


def nearest(x: F32Array, d: F32Array) -> npt.NDArray[np.uint8]:
    """The codes whose values times ``d`` are nearest to ``x``; halfway, the smaller magnitude.

    NaN is 0, and what is beyond the largest value becomes it; where ``d`` is 0, code 0.
    """
    a = np.abs(x)
    q = np.zeros(x.shape, np.uint8)
    for middle in MIDDLES:
        q += a > d * np.float32(middle)
    q[(x < 0) & (q > 0)] += np.uint8(8)
    return np.where(d > 0, q, np.uint8(0))
