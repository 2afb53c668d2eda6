"""Add and AddRows against their numpy twins: one rounding of each sum."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from tests.kernels import registry, rows
from tests.kernels.harness import U32, Memory, Run, assert_close, call
from tests.kernels.registry import SUMS
from treadle.isa.isa import Isa
from treadle.kernels.elementwise.add import Add, AddRows
from treadle.kernels.run_state import PART

LENGTHS = (5, 1, 3)
POSITIONS = (2, 0, 7)


@pytest.mark.parametrize("isa", rows.DISTINCT, ids=rows.name)
@pytest.mark.parametrize("spec", [s for s in SUMS if isinstance(s, Add)], ids=registry.name)
def test_add(spec: Add, isa: Isa, memory: Memory, rng: np.random.Generator) -> None:
    n = 4
    stride = spec.k + 3
    x, h = (rng.standard_normal((n, stride)).astype(np.float32) for _ in range(2))
    expected = np.full((n, stride), np.nan)
    spec.run_ref(spec.args(x=x, h=h, out=expected, stride=stride), Run(n))
    for front in (False, True):
        given = {"x": memory.copy(x, front=front), "h": memory.copy(h, front=front)}
        out = memory.array((n, stride), np.float32, name="out", front=front)
        call(spec, isa, memory, {**given, "out": out, "stride": stride}, Run(n), n)
        assert_close(out, expected, U32 * np.nan_to_num(np.abs(expected)), spec.name)


@pytest.mark.parametrize("isa", rows.DISTINCT, ids=rows.name)
@pytest.mark.parametrize("spec", [s for s in SUMS if isinstance(s, AddRows)], ids=registry.name)
def test_add_rows(spec: AddRows, isa: Isa, memory: Memory, rng: np.random.Generator) -> None:
    """Rows of each part's own positions, and nothing behind the columns."""
    stride = spec.k + 3
    starts = np.cumsum([0, *LENGTHS[:-1]])
    records = zip(starts, LENGTHS, POSITIONS, strict=True)
    parts = np.array([(at, n, position, 0, 0, 5) for at, n, position in records], PART)
    x = rng.standard_normal((sum(LENGTHS), stride)).astype(np.float32)
    w = rng.standard_normal((10, spec.k)).astype(np.float32)
    run = Run(parts=parts)
    expected = x.astype(np.float64)
    spec.run_ref(spec.args(x=expected, w=w.ravel(), stride=stride), run)
    at = np.array([p + t for _, n, p, *_ in parts for t in range(n)])
    row = {"position": at, "type": (at >= 5).astype(int), "first": 0 * at}[spec.by]
    assert_close(expected[:, : spec.k], x[:, : spec.k].astype(np.float64) + w[row], 0.0, "twin")
    for front in (False, True):
        out = memory.copy(x, name="x", front=front)
        args: dict[str, Any] = {"x": out, "w": memory.copy(w, front=front), "stride": stride}
        call(spec, isa, memory, args, run, len(parts))
        assert_close(out, expected, U32 * np.abs(expected), spec.name)
        assert np.array_equal(out[:, spec.k :], x[:, spec.k :])
