"""Clamp, ClampBetween, and Softcap of tokens, against their numpy twins: what lies beside the
columns stays.
"""

from __future__ import annotations

import numpy as np
import pytest

from tests.kernels import registry, rows
from tests.kernels.harness import U32, Memory, Run, assert_close, call
from tests.kernels.registry import CAPS, CLAMPS, CLAMPS_BETWEEN, HIDDEN
from treadle.isa.isa import Isa
from treadle.kernels.elementwise.clamp import Clamp, ClampBetween
from treadle.kernels.elementwise.fill import NEVER, Hide
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
@pytest.mark.parametrize("spec", CLAMPS_BETWEEN, ids=registry.name)
@pytest.mark.parametrize("bounds", [(-0.5, 0.75), (-np.inf, 0.1), (0.2, np.inf)])
def test_clamp_between(
    spec: ClampBetween,
    bounds: tuple[float, float],
    isa: Isa,
    memory: Memory,
    rng: np.random.Generator,
) -> None:
    """It rounds nothing, and leaves what it reads."""
    n = 4
    column = 6
    out_column = 2
    stride = column + spec.k + 3
    out_stride = out_column + spec.k + 5
    x = rng.standard_normal((n, stride)).astype(np.float32)
    x[1, column : column + 3] = np.nan, np.inf, -np.inf
    before = rng.standard_normal((n, out_stride)).astype(np.float32)
    strides = {"stride": stride, "out_stride": out_stride}
    strides |= {"column": column, "out_column": out_column}
    low, high = limits = np.array(bounds, np.float32)
    expected = before.copy()
    part = x[:, column : column + spec.k]
    expected[:, out_column : out_column + spec.k] = np.where(
        part < low, low, np.where(part > high, high, part)
    )
    twin = before.copy()
    spec.run_ref(spec.args(x=x, bounds=limits, out=twin, **strides), Run(n))
    np.testing.assert_array_equal(twin, expected)
    for front in (False, True):
        source = memory.copy(x, name="x", front=front)
        out = memory.copy(before, name="out", front=front)
        const = memory.copy(limits, name="bounds", front=front)
        call(spec, isa, memory, {**strides, "x": source, "out": out, "bounds": const}, Run(n), n)
        np.testing.assert_array_equal(out, expected)
        np.testing.assert_array_equal(source, x)


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


@pytest.mark.parametrize("isa", rows.DISTINCT, ids=rows.name)
@pytest.mark.parametrize("spec", HIDDEN, ids=registry.name)
def test_columns_that_are_no_token(
    spec: Hide, isa: Isa, memory: Memory, rng: np.random.Generator
) -> None:
    n = 3
    stride = 11
    x = rng.standard_normal((n, stride)).astype(np.float32)
    x[1, spec.first] = np.nan
    expected = x.copy()
    expected[:, spec.first : spec.last] = np.float32(NEVER)
    run = Run(output_rows=np.arange(n, dtype=np.int32))
    twin = x.copy()
    spec.run_ref(spec.args(y=twin, stride=stride), run)
    assert np.array_equal(twin, expected)
    for front in (False, True):
        made = memory.copy(x, name="y", front=front)
        call(spec, isa, memory, {"y": made, "stride": stride}, run, n)
        assert np.array_equal(made, expected)
