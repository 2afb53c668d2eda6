"""Down and Up against their numpy twins: runs of one row, of an odd number and of many, adapters of
several ranks, some of them unwanted.
"""

from __future__ import annotations

import numpy as np
import pytest

from tests.kernels import registry, rows
from tests.kernels.harness import U32, Memory, Run, assert_close, call
from tests.kernels.registry import LORAS
from treadle.isa.isa import Isa
from treadle.kernels.matmul.lora import GROUP, GROUP_OF, PIECE, STRIP, LoraDown, LoraUp

TILES = ((0, 1, (0.0, 1.5, -0.25)), (1, 5, (2.0, 0.0, 1.0)), (9, 16, (0.0, 0.0, 0.5)))
N_ROWS = 26
N_ADAPTERS = 3
STRIDE = 7


def run_of() -> Run:
    return Run(lora=[(at, n, np.array(scales, np.float32)) for at, n, scales in TILES])


def wanted(adapter: int) -> np.ndarray:
    """Rows that want an adapter."""
    found = [np.arange(at, at + n) for at, n, scales in TILES if scales[adapter]]
    return np.concatenate(found)


@pytest.mark.parametrize("isa", rows.DISTINCT, ids=rows.name)
@pytest.mark.parametrize("spec", [s for s in LORAS if isinstance(s, LoraDown)], ids=registry.name)
def test_down(spec: LoraDown, isa: Isa, memory: Memory, rng: np.random.Generator) -> None:
    """A sum of k products in f32, k roundings and one of each product; and two of the scale."""
    groups = np.array([(0, 0.5), (1, 2.0), (1, 2.0), (2, -1.0)], GROUP_OF)
    stride = spec.width + STRIDE
    n_columns = GROUP * len(groups)
    x = np.full((N_ROWS, stride), np.nan, np.float32)
    x[:, : spec.width] = 0.0
    x[:, : spec.k] = rng.standard_normal((N_ROWS, spec.k))
    w = np.zeros((n_columns, spec.width), np.float32)
    w[:, : spec.k] = rng.standard_normal((n_columns, spec.k))
    blocks = spec.fmt.quantize_rows(w)
    w = np.abs(spec.fmt.dequantize_rows(blocks).astype(np.float64))
    t_stride = n_columns + 3
    expected = np.full((N_ROWS, t_stride), np.nan)
    common = {"stride": stride, "t_stride": t_stride}
    args = {"x": x.ravel(), "w": blocks, "groups": groups, "t": expected.reshape(-1)}
    spec.run_ref(spec.args(**args, **common), run_of())
    assert np.isnan(expected[:, :4]).sum() == 4 * (N_ROWS - len(wanted(0)))
    bound = 4 * (spec.k + 3) * U32 * np.abs(np.nan_to_num(x[:, : spec.k])) @ w[:, : spec.k].T
    tolerance = np.pad(bound, ((0, 0), (0, 3)))
    for front in (False, True):
        given = {"x": memory.copy(x, front=front), "w": memory.copy(blocks, front=front)}
        given["groups"] = memory.copy(groups, front=front)
        t = given["t"] = memory.array(expected.shape, np.float32, name="t", front=front)
        call(spec, isa, memory, {**given, **common}, run_of(), len(groups) * len(TILES))
        assert_close(t, expected, tolerance, spec.name)


@pytest.mark.parametrize("isa", rows.DISTINCT, ids=rows.name)
@pytest.mark.parametrize("spec", [s for s in LORAS if isinstance(s, LoraUp)], ids=registry.name)
def test_up(spec: LoraUp, isa: Isa, memory: Memory, rng: np.random.Generator) -> None:
    """A sum of y and r products in f32: r + 1 roundings. The second adapter has no last strip."""
    ranks = (5, 16, 1)
    firsts = (0, 8, 24)
    pieces = np.zeros((N_ADAPTERS, spec.n_strips), PIECE)
    parts = []
    at = 0
    for adapter, (rank, first) in enumerate(zip(ranks, firsts, strict=True)):
        for strip in range(spec.n_strips - (adapter == 1)):
            pieces[adapter, strip] = first, rank, at, 0
            parts.append(rng.standard_normal((rank, STRIP)).astype(np.float32))
            at += rank * spec.fmt.row_bytes(STRIP)
    blocks = spec.fmt.quantize_rows(np.concatenate(parts))
    stride = spec.n_strips * STRIP + 3
    t_stride = 28
    y = rng.standard_normal((N_ROWS, stride)).astype(np.float32)
    t = np.full((N_ROWS, t_stride), np.nan, np.float32)
    for adapter, (rank, first) in enumerate(zip(ranks, firsts, strict=True)):
        some = wanted(adapter)
        t[some, first : first + rank] = rng.standard_normal((len(some), rank))
    common = {"stride": stride, "t_stride": t_stride}
    expected = y.astype(np.float64)
    args = {"t": t.ravel(), "w": blocks, "pieces": pieces.ravel(), "y": expected.reshape(-1)}
    spec.run_ref(spec.args(**args, **common), run_of())
    changed = (expected != y)[:, : spec.n_strips * STRIP].any(1)
    assert changed.nonzero()[0].tolist() == sorted({*wanted(0), *wanted(1), *wanted(2)})
    size = np.abs(expected) + np.nan_to_num(np.abs(t)).sum(1, keepdims=True) * 5
    for front in (False, True):
        given = {"t": memory.copy(t, front=front), "w": memory.copy(blocks, front=front)}
        given["pieces"] = memory.copy(pieces, front=front)
        out = given["y"] = memory.copy(y, name="y", front=front)
        call(spec, isa, memory, {**given, **common}, run_of(), spec.n_strips * len(TILES))
        assert_close(out, expected, 24 * U32 * size, spec.name)
        assert np.array_equal(out[:, -3:], y[:, -3:])
