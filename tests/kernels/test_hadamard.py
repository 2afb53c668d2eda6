"""Rotations against their numpy twin, and what they must leave as it is."""

from __future__ import annotations

import numpy as np
import pytest

from tests.kernels import registry, rows
from tests.kernels.harness import U32, Memory, Run, assert_close, call
from tests.kernels.registry import ROTATIONS
from treadle.isa.isa import Isa
from treadle.kernels.attention.hadamard import MOST, Rotate, points, rotate_ref


@pytest.mark.parametrize("isa", rows.DISTINCT, ids=rows.name)
@pytest.mark.parametrize("spec", ROTATIONS, ids=registry.name)
def test_rotate(spec: Rotate, isa: Isa, memory: Memory, rng: np.random.Generator) -> None:
    """In place; what lies behind the heads stays."""
    n = 4
    width = spec.heads * spec.k
    x = rng.standard_normal((n, width + 5)).astype(np.float32)
    expected = x.astype(np.float64)
    spec.run_ref(spec.args(x=expected, stride=width + 5), Run(n))
    # Each value is a sum of so many, a rounding for each halving and one for the scale.
    m = points(spec.k)
    sums = np.abs(x[:, :width]).reshape(n, -1, m).sum(-1).repeat(m, -1) / np.sqrt(m)
    tolerance = np.zeros_like(expected)
    tolerance[:, :width] = sums * (np.log2(m) + 2) * U32
    for front in (False, True):
        out = memory.copy(x, name="x", front=front)
        call(spec, isa, memory, {"x": out, "stride": width + 5}, Run(n), n * spec.heads)
        assert_close(out, expected, tolerance, spec.name)


@pytest.mark.parametrize("dims", [32, 96, 128, 256, 320])
def test_scores_stay_and_it_is_its_own_inverse(dims: int, rng: np.random.Generator) -> None:
    assert dims % points(dims) == 0
    assert points(dims) <= MOST
    q, k = rng.standard_normal((2, 7, dims))
    np.testing.assert_allclose(rotate_ref(rotate_ref(q)), q, atol=1e-13)
    np.testing.assert_allclose(rotate_ref(q) @ rotate_ref(k).T, q @ k.T, atol=1e-12)
    one = np.zeros(dims)
    one[3] = 1.0  # what stands out is spread evenly
    assert np.count_nonzero(np.isclose(np.abs(rotate_ref(one)), points(dims) ** -0.5)) == points(
        dims
    )
