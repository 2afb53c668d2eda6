"""Clamp against its numpy twin: it rounds nothing, and what lies beside the columns stays."""

from __future__ import annotations

import numpy as np
import pytest

from tests.kernels import registry, rows
from tests.kernels.harness import Memory, Run, call
from tests.kernels.registry import CLAMPS
from treadle.isa.isa import Isa
from treadle.kernels.clamp import Clamp


@pytest.mark.parametrize("isa", rows.DISTINCT, ids=rows.name)
@pytest.mark.parametrize("spec", CLAMPS, ids=registry.name)
def test_clamp(spec: Clamp, isa: Isa, memory: Memory, rng: np.random.Generator) -> None:
    n, column = 4, 6
    stride = column + spec.k + 3
    x = 2 * spec.limit * rng.standard_normal((n, stride)).astype(np.float32)
    x[1, column : column + 3] = np.nan, np.inf, -np.inf
    expected, strides = x.copy(), {"stride": stride, "column": column}
    spec.run_ref(spec.args(x=expected, **strides), Run(n))
    inside = expected[:, column : column + spec.k]
    assert np.nanmax(np.abs(inside)) == np.float32(spec.limit)
    assert np.isnan(inside[1, 0])
    assert 0 < np.count_nonzero(inside != x[:, column : column + spec.k]) < inside.size
    for front in (False, True):
        out = memory.copy(x, name="x", front=front)
        call(spec, isa, memory, {"x": out, **strides}, Run(n), n)
        np.testing.assert_array_equal(out, expected)
