"""xIELU against numpy in float64."""

from __future__ import annotations

import numpy as np
import pytest

from tests.kernels import registry, rows
from tests.kernels.harness import Memory
from tests.kernels.test_states import checked, floats, of
from treadle.jit.language import Isa
from treadle.kernels.elementwise.xielu import Xielu

U32 = 2.0**-24


@pytest.mark.parametrize("isa", rows.DISTINCT, ids=rows.name)
@pytest.mark.parametrize("spec", of(Xielu), ids=registry.name)
def test_xielu(spec: Xielu, isa: Isa, memory: Memory, rng: np.random.Generator) -> None:
    """Of each term a few roundings, relative to it: the far part subtracts numbers of up to 1.1
    from what is 0.1 at least, so 16 of e**x - 1 - x; then a product, and a sum of two terms.
    """
    scale = 10.0 ** rng.integers(-8, 2, (4, 180))
    x = (floats(rng, 4, 180) * scale).astype(np.float32)
    x[:, :4] = 0.0, -1e-7, -0.5, -200.0
    numbers = np.array([0.8, 1.3, 0.5, -1e-6], np.float32)
    args = {"x": x, "w": numbers, "stride": 180}
    p, n, b, eps = numbers.astype(np.float64)
    y = x.astype(np.float64)
    terms = np.abs(b * y) + np.where(y > 0, p * y * y, n * np.abs(np.expm1(np.minimum(y, eps)) - y))
    less = np.abs(np.minimum(y, eps) - y) * n  # two numbers near each other, subtracted
    tolerance = 24 * U32 * (terms + less) + 1e-30
    checked(spec, isa, memory, args, "x", 4 * spec.groups, lambda exact: tolerance)
