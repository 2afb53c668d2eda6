"""Clamp, and Softcap of tokens, against their numpy twins: what lies beside the columns stays."""

from __future__ import annotations

import numpy as np
import pytest

from tests.kernels import registry, rows
from tests.kernels.harness import U32, Memory, Run, assert_close, call
from tests.kernels.registry import CAPS, CLAMPS
from treadle.isa.isa import Isa
from treadle.kernels.elementwise.clamp import Clamp
from treadle.kernels.elementwise.softcap import Softcap


@pytest.mark.parametrize("isa", rows.DISTINCT, ids=rows.name)
@pytest.mark.parametrize("spec", CLAMPS, ids=registry.name)
def test_clamp(spec: Clamp, isa: Isa, memory: Memory, rng: np.random.Generator) -> None:
    """It rounds nothing."""
    n = 4
    column = 6
    stride = column + spec.k + 3
    x = 2 * spec.limit * rng.standard_normal((n, stride)).astype(np.float32)
    x[1, column : column + 3] = np.nan, np.inf, -np.inf
    expected = x.copy()
    strides = {"stride": stride, "column": column}
    spec.run_ref(spec.args(x=expected, **strides), Run(n))
    inside = expected[:, column : column + spec.k]
    assert np.nanmax(np.abs(inside)) == np.float32(spec.limit)
    assert np.isnan(inside[1, 0])
    assert 0 < np.count_nonzero(inside != x[:, column : column + spec.k]) < inside.size
    for front in (False, True):
        out = memory.copy(x, name="x", front=front)
        call(spec, isa, memory, {"x": out, **strides}, Run(n), n)
        np.testing.assert_array_equal(out, expected)


@pytest.mark.parametrize("isa", rows.DISTINCT, ids=rows.name)
@pytest.mark.parametrize("spec", CAPS, ids=registry.name)
def test_cap(spec: Softcap, isa: Isa, memory: Memory, rng: np.random.Generator) -> None:
    """In units of 2**-24, on arguments up to 1: tanh 2 (``jit/math.py``), its argument 2, the last
    product 1. Larger ones give the cap, and NaN stays NaN.
    """
    n = 4
    stride = spec.k + 3
    x = rng.uniform(-spec.cap, spec.cap, (n, stride)).astype(np.float32)
    x[1, :3] = np.nan, 1e6, -1e6
    expected = x.astype(np.float64)
    inside = slice(spec.k)
    spec.run_ref(spec.args(y=expected, stride=stride), Run(n))
    assert np.nanmax(np.abs(expected[:, inside])) == spec.cap
    for front in (False, True):
        out = memory.copy(x, name="y", front=front)
        call(spec, isa, memory, {"y": out, "stride": stride}, Run(n), n * spec.pieces)
        assert np.isnan(out[1, 0])
        found = np.where(np.isnan(x), x[0, 0], out)
        assert_close(found, np.where(np.isnan(x), x[0, 0], expected), spec.cap * 5 * U32, spec.name)
        outside = np.ones(stride, bool)
        outside[inside] = False
        np.testing.assert_array_equal(out[:, outside], x[:, outside])
