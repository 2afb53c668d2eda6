"""exp, exp2, silu and gelu in units of the last place of f32, over their whole range, on every
instruction set.
"""

from __future__ import annotations

from collections.abc import Callable
from math import erfc, sqrt

import numpy as np
import pytest

from tests.jit.emit import compiled
from tests.kernels import rows
from tests.kernels.harness import assert_close
from treadle.isa.isa import Isa
from treadle.jit import math
from treadle.jit.builder import Builder
from treadle.jit.types import f32
from treadle.jit.values import Val


def apply(function: Callable[[Builder, Val], Val], isa: Isa, x: np.ndarray) -> np.ndarray:
    """``function`` of f32 ``x [n]``."""
    lanes = isa.lanes
    padded = np.resize(x.astype(np.float32), -(-len(x) // lanes) * lanes)
    out = np.full_like(padded, np.nan)

    def build(k: Builder, source: Val, to: Val) -> None:
        with k.loop(4 * len(padded), step=4 * lanes) as at:
            k.store(to + at, function(k, k.load(source + at, f32 * lanes)))

    compiled(isa, 2, build)(padded, out)
    made: np.ndarray = out[: len(x)]
    return made


def ulp(exact: np.ndarray) -> np.ndarray:
    """One unit in the last place of f32 at ``exact`` (float64), subnormals counted as normal."""
    size: np.ndarray = np.maximum(np.abs(exact), 2.0**-126)
    return np.exp2(np.floor(np.log2(size)) - 23)  # type: ignore[no-any-return]


GRID = np.linspace(-87, 88.3, 200_001).astype(np.float32)


@pytest.mark.parametrize("isa", rows.DISTINCT, ids=rows.name)
def test_exp(isa: Isa) -> None:
    near = np.concatenate([np.logspace(-45, 0, 999), -np.logspace(-45, 0, 999), [0.0, -0.0]])
    x = np.concatenate([GRID, near.astype(np.float32)])
    exact = np.exp(x.astype(np.float64))
    assert_close(apply(math.exp, isa, x), exact, 1.5 * ulp(exact), f"exp on {isa.name}")


@pytest.mark.parametrize("isa", rows.DISTINCT, ids=rows.name)
def test_exp_at_the_ends(isa: Isa) -> None:
    x = np.array([-np.inf, -1e30, -87.1, 88.5, 1e30, np.inf, np.nan, 0.0, -1e-40])
    want = [0, 0, 0, np.inf, np.inf, np.inf, np.nan, 1, 1]
    np.testing.assert_array_equal(apply(math.exp, isa, x), want)


@pytest.mark.parametrize("isa", rows.DISTINCT, ids=rows.name)
def test_exp2(isa: Isa) -> None:
    x = np.linspace(-130, 0, 200_001).astype(np.float32)
    exact = np.exp2(x.astype(np.float64))
    allowed = np.where(x < -126, 2.0**-126, 1.5 * ulp(exact))
    assert_close(apply(math.exp2, isa, x), exact, allowed, f"exp2 on {isa.name}")
    x = np.array([-np.inf, -1e30, -127, -126, 0.0, -0.0, -1e-40, np.nan])
    want = [0, 0, 0, 2.0**-126, 1, 1, 1, np.nan]
    found = apply(math.exp2, isa, x)
    np.testing.assert_array_equal(found, want)
    assert not np.signbit(found[:3]).any()


@pytest.mark.parametrize("isa", rows.DISTINCT, ids=rows.name)
def test_silu(isa: Isa) -> None:
    x = GRID.astype(np.float64)
    exact = x / (1 + np.exp(-x))
    assert_close(apply(math.silu, isa, GRID), exact, 4 * ulp(exact), f"silu on {isa.name}")


@pytest.mark.parametrize("isa", rows.DISTINCT, ids=rows.name)
def test_gelu(isa: Isa) -> None:
    """The argument of the exponential is rounded three times, so its size multiplies the error."""
    x = np.linspace(-12, 12, 100_001).astype(np.float32)
    y = x.astype(np.float64)
    inner = 2 * np.sqrt(2 / np.pi) * (y + 0.044715 * y**3)
    with np.errstate(over="ignore"):
        exact = y / (1 + np.exp(-inner))
    # Below e**-87 the exponential is infinite, and the result zero instead of a number near 1e-37.
    allowed = (4 + 3 * np.minimum(np.abs(inner), 88)) * ulp(exact) + 2e-37
    assert_close(apply(math.gelu, isa, x), exact, allowed, f"gelu on {isa.name}")


@pytest.mark.parametrize("isa", rows.DISTINCT, ids=rows.name)
def test_gelu_quick(isa: Isa) -> None:
    """1.702 and its product are rounded, so the exponential's argument multiplies the error."""
    x = np.linspace(-50, 50, 100_001).astype(np.float32)
    y = x.astype(np.float64)
    with np.errstate(over="ignore"):
        exact = y / (1 + np.exp(-1.702 * y))
    allowed = (4 + 2 * np.minimum(np.abs(1.702 * y), 88)) * ulp(exact) + 1e-36
    assert_close(apply(math.gelu_quick, isa, x), exact, allowed, f"gelu_quick on {isa.name}")


@pytest.mark.parametrize("isa", rows.DISTINCT, ids=rows.name)
def test_gelu_erf(isa: Isa) -> None:
    """The share beyond |x| is off by 16 u: 12 for its polynomial (7 as measured, and as much again
    for reciprocals that are estimates), 4 for exponential and product; the exponential's argument,
    rounded twice, adds u x**2.
    """
    x = np.linspace(-14, 14, 100_001).astype(np.float32)
    y = x.astype(np.float64)
    exact = np.array([v * erfc(-v / sqrt(2)) / 2 for v in y])
    allowed = (16 + np.where(y < 0, y**2, 3)) * ulp(exact) + 2e-37
    assert_close(apply(math.gelu_erf, isa, x), exact, allowed, f"gelu_erf on {isa.name}")


@pytest.mark.parametrize("isa", rows.DISTINCT, ids=rows.name)
def test_relu_and_its_square(isa: Isa) -> None:
    x = np.array([-3e38, -1.5, -0.0, 0.0, 1.5, 3e18, 3e38, np.inf, np.nan], np.float32)
    with np.errstate(over="ignore"):
        exact = np.where(x < 0, 0, x * x)
    np.testing.assert_array_equal(apply(math.relu2, isa, x), exact)
    np.testing.assert_array_equal(apply(math.relu, isa, x), np.where(x < 0, 0, x))


@pytest.mark.parametrize("isa", rows.DISTINCT, ids=rows.name)
@pytest.mark.parametrize("name", ["silu", "gelu", "gelu_quick", "gelu_erf"])
def test_activations_at_the_ends(name: str, isa: Isa) -> None:
    x = np.array([-3e38, -1000.0, -0.0, 0.0, 1000.0, 3e38, np.inf, np.nan])
    got = apply(getattr(math, name), isa, x)
    np.testing.assert_array_equal(got, [0, 0, 0, 0, 1000, np.float32(3e38), np.inf, np.nan])


def test_no_libm() -> None:
    """A kernel's object must link without anything but itself: no call to expf is left in it."""
    from tests.jit.emit import ir_text
    from treadle.jit.compile import emit_assembly

    def build(k: Builder, to: Val) -> None:
        k.store(to, math.gelu(k, math.silu(k, k.load(to, f32 * 8))))

    for isa in rows.DISTINCT:
        assert "call" not in emit_assembly(ir_text(isa, 1, build), isa)
