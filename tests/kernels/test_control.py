"""AddDirections against its numpy twin: runs of one row, of an odd number and of many, vectors that
some rows want, with strengths of both signs, behind the scales of an adapter.
"""

from __future__ import annotations

import numpy as np
import pytest

from tests.kernels import registry, rows
from tests.kernels.harness import U32, Memory, Run, assert_close, call
from tests.kernels.registry import DIRECTIONS
from treadle.isa.isa import Isa
from treadle.kernels.elementwise.control_vectors import AddDirections

# Each with the scale of an adapter, and those of three vectors.
TILES = (
    (0, 1, (9.0, 0.0, 1.5, -0.25)),
    (1, 5, (0.0, 2.0, 0.0, 0.0)),
    (9, 16, (9.0, 0.0, 0.0, 0.0)),
)
N_ROWS = 26


@pytest.mark.parametrize("isa", rows.DISTINCT, ids=rows.name)
@pytest.mark.parametrize("spec", DIRECTIONS, ids=registry.name)
def test_add_directions(
    spec: AddDirections, isa: Isa, memory: Memory, rng: np.random.Generator
) -> None:
    """Two roundings for each vector that a row wants; other rows keep their bits."""
    width = spec.k * spec.n_streams
    x = rng.standard_normal((N_ROWS, width + 3)).astype(np.float32)
    w = rng.standard_normal((3, spec.k)).astype(np.float32)
    run = Run(lora=[(at, n, np.array(scales, np.float32)) for at, n, scales in TILES])
    numbers = {"stride": width + 3, "first": 1, "n_vectors": 3}
    expected = x.astype(np.float64)
    spec.run_ref(spec.args(x=expected.reshape(-1), w=w.ravel(), **numbers), run)
    exact = x.astype(np.float64)
    exact[0, :width] += np.tile(1.5 * w[1].astype(np.float64) - 0.25 * w[2], spec.n_streams)
    exact[1:6, :width] += np.tile(2.0 * w[0].astype(np.float64), spec.n_streams)
    assert_close(expected, exact, 1e-14 * np.abs(exact).max(), "twin")
    size = np.abs(x) + np.abs(exact) + 4.0
    for front in (False, True):
        out = memory.copy(x, name="x", front=front)
        args = {"x": out, "w": memory.copy(w, front=front), **numbers}
        call(spec, isa, memory, args, run, len(TILES))
        assert_close(out, expected, 4 * U32 * size, spec.name)
        assert np.array_equal(out[6:], x[6:])
        assert np.array_equal(out[:, width:], x[:, width:])
