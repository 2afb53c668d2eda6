"""Convolutions within blocks of tokens against their numpy twin."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from tests.kernels import registry, rows
from tests.kernels.harness import U32, Memory, Run, assert_close, call
from tests.kernels.registry import BLOCK_CONVOLUTIONS
from treadle.isa.isa import Isa
from treadle.kernels.recurrent.block_convolution import BlockConvolution
from treadle.kernels.run_state import PART

PARTS = np.array([(0, 5, 9, 0, 0, 0), (5, 1, 0, 0, 0, 0), (6, 3, 70, 0, 0, 0)], PART)
N = 9


def given(spec: BlockConvolution, rng: np.random.Generator) -> dict[str, Any]:
    """Rows of awkward strides, of the second of two sides."""
    n_deltas = spec.taps * spec.k // spec.group
    widths = {"x": spec.k + 5, "delta": n_deltas + 7}
    made = {name: rng.standard_normal((N, n)) for name, n in widths.items()}
    made["base"] = rng.standard_normal((2, spec.taps, spec.k))
    floats: dict[str, Any] = {name: value.astype(np.float32) for name, value in made.items()}
    strides = {"stride": widths["x"], "delta_stride": widths["delta"]}
    return floats | strides | {"column": 2, "delta_column": 3, "first": spec.taps * spec.k}


@pytest.mark.parametrize("isa", rows.DISTINCT, ids=rows.name)
@pytest.mark.parametrize("spec", BLOCK_CONVOLUTIONS, ids=registry.name)
def test_block_convolution(
    spec: BlockConvolution, isa: Isa, memory: Memory, rng: np.random.Generator
) -> None:
    """Three sequences in one run. Each term has a rounding of its weight, and the sum one a tap."""
    args = given(spec, rng)
    run = Run(parts=PARTS)
    twin = {k: v.astype(np.float64) if isinstance(v, np.ndarray) else v for k, v in args.items()}
    flat = {k: v.ravel() if k == "base" else v for k, v in twin.items()}
    spec.run_ref(spec.args(**flat), run)
    weights = np.abs(args["base"]).max() + np.abs(args["delta"]).max()
    tolerance = (spec.taps + 2) * spec.taps * U32 * weights * np.abs(args["x"]).max()
    for front in (False, True):
        made = {
            k: memory.copy(v, name=k, front=front) if isinstance(v, np.ndarray) else v
            for k, v in args.items()
        }
        call(spec, isa, memory, made, run, len(PARTS) * spec.tiles)
        assert_close(made["x"], twin["x"], tolerance, spec.name)


def test_a_block_alone(rng: np.random.Generator) -> None:
    """The twin is the sum that the docstring says: of one sequence, in plain loops."""
    spec = BlockConvolution(6, 3, 2)
    args = given(spec, rng)
    args = {k: v.astype(np.float64) if isinstance(v, np.ndarray) else v for k, v in args.items()}
    x = args["x"][:, 2:8].copy()
    expected = np.zeros((N, 6))
    for t in range(N):
        for c in range(6):
            for j in range(min(t + 1, 3)):
                weight = args["base"][1, j, c] + args["delta"][t, 3 + 3 * j + c // 2]
                expected[t, c] += weight * x[t - j, c]
    flat = {k: v.ravel() if k == "base" else v for k, v in args.items()}
    spec.run_ref(spec.args(**flat), Run(parts=np.array([(0, N, 0, 0, 0, 0)], PART)))
    assert np.allclose(args["x"][:, 2:8], expected, rtol=0, atol=1e-12)
