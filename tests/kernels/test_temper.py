"""The temperature of attention: one product of floats, and nothing beside its columns."""

from __future__ import annotations

import numpy as np
import pytest

from tests.kernels import registry, rows
from tests.kernels.harness import Memory, Run, call
from tests.kernels.registry import TEMPERS
from treadle.isa.isa import Isa
from treadle.kernels.temper import Temper
from treadle.models.rope import still


@pytest.mark.parametrize("isa", rows.DISTINCT, ids=rows.name)
@pytest.mark.parametrize("spec", TEMPERS, ids=registry.name)
def test_temper(spec: Temper, isa: Isa, memory: Memory, rng: np.random.Generator) -> None:
    n, column, stride = 5, 3, spec.k + 6
    x = rng.standard_normal((n, stride)).astype(np.float32)
    gains = rng.uniform(0.5, 2, n).astype(np.float32)
    table = np.stack([gains, np.zeros_like(gains)], 1)[:, :, None]
    run, args = Run(n, ropes={spec.table: table}), {"stride": stride, "column": column}
    expected = x.copy()
    expected[:, column : column + spec.k] *= gains[:, None]
    twin = x.copy()
    spec.run_ref(spec.args(x=twin, **args), run)
    assert np.array_equal(twin, expected)
    for front in (False, True):
        made = memory.copy(x, name="x", front=front)
        call(spec, isa, memory, {**args, "x": made}, run, n)
        assert np.array_equal(made, expected)


def test_a_table_that_turns_nothing() -> None:
    """Its angles are 0; what it gives grows where a position passes a multiple."""
    table = still(0.5, 16, ahead=1)
    angles, factor = table.frequencies()
    assert angles.tolist() == [0.0]
    assert factor == 1.0
    gains = table.gains(np.array([0, 14, 15, 30, 31]))
    second, third = 1 + 0.5 * np.log(2), 1 + 0.5 * np.log(3)
    np.testing.assert_allclose(gains, [1, 1, second, second, third])
