"""ColumnNorm against its numpy twin: the tolerance is Norm's."""

from __future__ import annotations

import numpy as np
import pytest

from tests.kernels import registry, rows
from tests.kernels.harness import U32, Memory, Run, assert_close, call
from tests.kernels.registry import COLUMN_NORMS
from tests.kernels.test_elementwise import norm_error
from treadle.isa.isa import Isa
from treadle.kernels.column_norm import ColumnNorm


@pytest.mark.parametrize("isa", rows.DISTINCT, ids=rows.name)
@pytest.mark.parametrize("spec", COLUMN_NORMS, ids=registry.name)
def test_column_norm(spec: ColumnNorm, isa: Isa, memory: Memory, rng: np.random.Generator) -> None:
    """In place; what lies before and behind the columns stays."""
    n, column = 4, 6
    width = spec.heads * spec.k
    stride = column + width + 3
    x = 3 * rng.standard_normal((n, stride)).astype(np.float32)
    x[1] = 0
    w = rng.standard_normal(spec.k).astype(np.float32)
    expected, strides = x.astype(np.float64), {"stride": stride, "column": column}
    spec.run_ref(spec.args(x=expected, w=w, **strides), Run(n))
    tolerance = np.abs(expected) * (norm_error(spec.k, isa) + U32)
    tolerance[:, :column] = tolerance[:, column + width :] = 0
    for front in (False, True):
        out = memory.copy(x, name="x", front=front)
        args = {"x": out, "w": memory.copy(w, front=front), **strides}
        call(spec, isa, memory, args, Run(n), n * spec.heads)
        assert_close(out, expected, tolerance, spec.name)
