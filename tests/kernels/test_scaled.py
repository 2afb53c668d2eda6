"""Rows times one number each, against products in numpy; nothing beside their columns."""

from __future__ import annotations

import numpy as np
import pytest

from tests.kernels import registry, rows
from tests.kernels.harness import U32, Memory, Run, assert_close, call
from tests.kernels.registry import TEMPERS, TIMES, WEIGHS
from treadle.isa.isa import Isa
from treadle.kernels.elementwise.scale import ScaleByExpert, ScaleColumns, Temper
from treadle.models.rope import scale_only


@pytest.mark.parametrize("isa", rows.DISTINCT, ids=rows.name)
@pytest.mark.parametrize("spec", TEMPERS, ids=registry.name)
def test_temper(spec: Temper, isa: Isa, memory: Memory, rng: np.random.Generator) -> None:
    n = 5
    column = 3
    stride = spec.k + 6
    x = rng.standard_normal((n, stride)).astype(np.float32)
    gains = rng.uniform(0.5, 2, n).astype(np.float32)
    table = np.stack([gains, np.zeros_like(gains)], 1)[:, :, None]
    run = Run(n, ropes={spec.table: table})
    args = {"stride": stride, "column": column}
    expected = x.copy()
    expected[:, column : column + spec.k] *= gains[:, None]
    twin = x.copy()
    spec.run_ref(spec.args(x=twin, **args), run)
    assert np.array_equal(twin, expected)
    for front in (False, True):
        made = memory.copy(x, name="x", front=front)
        call(spec, isa, memory, {**args, "x": made}, run, n)
        assert np.array_equal(made, expected)


@pytest.mark.parametrize("isa", rows.DISTINCT, ids=rows.name)
@pytest.mark.parametrize("spec", TIMES, ids=registry.name)
def test_times(spec: ScaleColumns, isa: Isa, memory: Memory, rng: np.random.Generator) -> None:
    """One product each: the same bits."""
    n = 5
    column = 3
    stride = spec.k + 6
    x = rng.standard_normal((n, stride)).astype(np.float32)
    run = Run(n)
    args = {"stride": stride, "column": column}
    expected = x.copy()
    twin = x.copy()
    expected[:, column : column + spec.k] *= np.float32(spec.gain)
    spec.run_ref(spec.args(x=twin, **args), run)
    assert np.array_equal(twin, expected)
    for front in (False, True):
        made = memory.copy(x, name="x", front=front)
        call(spec, isa, memory, {**args, "x": made}, run, n)
        assert np.array_equal(made, expected)


@pytest.mark.parametrize("isa", rows.DISTINCT, ids=rows.name)
@pytest.mark.parametrize("spec", WEIGHS, ids=registry.name)
def test_weigh(spec: ScaleByExpert, isa: Isa, memory: Memory, rng: np.random.Generator) -> None:
    """A sigmoid is within 8 roundings, and a product is one more. A score past the last is not
    looked at.
    """
    n = 5
    strides = {"stride": spec.k + 3, "scores_stride": spec.n + 1, "out_stride": spec.k + 5}
    x = rng.standard_normal((n, spec.k + 3)).astype(np.float32)
    scores = 4 * rng.standard_normal((n, spec.n + 1)).astype(np.float32)
    scores[:, spec.n] = 100
    best = scores[:, : spec.n].max(-1, keepdims=True).astype(np.float64)
    exact = x[:, : spec.k] / (1 + np.exp(-best))
    twin = np.full((n, spec.k + 5), 7.0)
    spec.run_ref(spec.args(x=x, scores=scores, out=twin, **strides), Run(n))
    np.testing.assert_allclose(twin[:, : spec.k], exact, rtol=1e-12)
    assert (twin[:, spec.k :] == 7).all()
    for front in (False, True):
        out = memory.copy(np.full((n, spec.k + 5), 7, np.float32), name="out", front=front)
        given = {"x": memory.copy(x, name="x", front=front), "out": out}
        given["scores"] = memory.copy(scores, name="scores", front=front)
        call(spec, isa, memory, {**strides, **given}, Run(n), n)
        assert_close(out[:, : spec.k], exact, 9 * U32 * np.abs(exact) + 1e-37, spec.name)
        assert (out[:, spec.k :] == 7).all()


def test_a_table_that_turns_nothing() -> None:
    """Its angles are 0; what it gives grows where a position passes a multiple."""
    table = scale_only(0.5, 16, ahead=1)
    angles, factor = table.frequencies()
    assert angles.tolist() == [0.0]
    assert factor == 1.0
    gains = table.gains(np.array([0, 14, 15, 30, 31]))
    second = 1 + 0.5 * np.log(2)
    third = 1 + 0.5 * np.log(3)
    np.testing.assert_allclose(gains, [1, 1, second, second, third])
