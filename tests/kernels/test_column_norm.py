"""ColumnNorm against its numpy twin: the tolerance is Norm's."""

from __future__ import annotations

import numpy as np
import pytest

from tests.kernels import registry, rows
from tests.kernels.harness import U32, Memory, Run, assert_close, call
from tests.kernels.registry import COLUMN_NORMS
from treadle.isa.isa import Isa
from treadle.kernels.elementwise.column_norm import ColumnNorm
from treadle.selftest.rounding_bounds import centring_error, norm_error


@pytest.mark.parametrize("isa", rows.DISTINCT, ids=rows.name)
@pytest.mark.parametrize("spec", COLUMN_NORMS, ids=registry.name)
def test_column_norm(spec: ColumnNorm, isa: Isa, memory: Memory, rng: np.random.Generator) -> None:
    """In place; what lies before and behind the columns stays."""
    n = 4
    column = 6
    width = spec.heads * spec.k
    stride = column + width + 3
    x = 3 * rng.standard_normal((n, stride)).astype(np.float32)
    x[1] = 0
    w = rng.standard_normal((spec.heads if spec.own else 1, spec.k)).astype(np.float32)
    vectors = {"w": w.ravel()}
    if spec.bias:
        vectors["bias"] = rng.standard_normal(spec.k).astype(np.float32)
    expected = x.astype(np.float64)
    strides = {"stride": stride, "column": column}
    parts = expected[:, column : column + width].copy().reshape(n, spec.heads, spec.k)
    spec.run_ref(spec.args(x=expected, **vectors, **strides), Run(n))
    relative = norm_error(spec.k, isa) + U32
    tolerance = np.zeros((n, stride))
    off = centring_error(spec, isa, parts, w)
    off = off + relative * np.abs(vectors.get("bias", 0.0))  # it may cancel what it is added to
    inside = slice(column, column + width)
    tolerance[:, inside] = off.reshape(n, width) + np.abs(expected[:, inside]) * relative
    for front in (False, True):
        out = memory.copy(x, name="x", front=front)
        copies = {name: memory.copy(v, front=front) for name, v in vectors.items()}
        args = {"x": out, **copies, **strides}
        call(spec, isa, memory, args, Run(n), n * spec.heads)
        assert_close(out, expected, tolerance, spec.name)
