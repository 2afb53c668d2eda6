"""What adapters add to experts' products, against the numpy twins: tiles of one row, of an odd
number and of many, neighbours of which each wants other adapters, some none.
"""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from tests.kernels import registry, rows
from tests.kernels.harness import U32, Memory, Run, assert_close, call
from tests.kernels.registry import EXPERT_LORAS
from treadle.isa.isa import Isa
from treadle.kernels.matmul.lora import GROUP, GROUP_OF, PIECE, STRIP
from treadle.kernels.matmul.lora_experts import (
    ExpertAdapterWeights,
    ExpertDown,
    ExpertUp,
    OfExperts,
)
from treadle.kernels.moe.route import Sort, blocks_most

N_TOKENS = 23
BLOCK = 4
MOST = 8
SCALES = ((0.0, 1.5, -0.25), (0.0, 0.0, 0.0), (2.0, 0.0, 1.0), (0.0, 0.0, 0.5))


def of(kind: type) -> list[Any]:
    return [spec for spec in EXPERT_LORAS if isinstance(spec, kind)]


@pytest.mark.parametrize("isa", rows.DISTINCT, ids=rows.name)
def test_wants(isa: Isa, memory: Memory) -> None:
    """Tokens of no record want nothing, whatever was in memory."""
    (spec,) = of(ExpertAdapterWeights)
    lora = [(at, n, np.array(SCALES[i], np.float32)) for i, at, n in ((0, 0, 1), (2, 3, 16))]
    run = Run(n_tokens=21, lora=lora)
    expected = np.full((22, 3), np.nan)
    spec.run_ref(spec.args(out=expected.reshape(-1)), run)
    assert np.isfinite(expected[:21]).all()
    assert not expected[[1, 2, 19, 20]].any()
    assert (expected[3:19] == SCALES[2]).all()
    out = memory.array(expected.shape, np.float32, name="out")
    out[...] = np.nan
    call(spec, isa, memory, {"out": out}, run, 1)
    assert np.array_equal(out, expected.astype(np.float32), equal_nan=True)


class Problem:
    """Which rows meet which expert, of which token they are, and what this wants."""

    def __init__(self, spec: OfExperts, rng: np.random.Generator) -> None:
        self.run = Run(N_TOKENS)
        n_slots = N_TOKENS * spec.n_used
        used = np.array([[0, 1], [4, 2], [0, 4]])[np.arange(N_TOKENS) % 3]
        used[0] = 3, 0  # of the fourth expert one row; most are of the first
        self.wants = np.array(SCALES, np.float32)[rng.integers(0, len(SCALES), N_TOKENS)]
        self.tiles: np.ndarray = used.ravel().astype(np.int32)
        self.rows: np.ndarray | None = None
        self.tokens: np.ndarray = np.arange(n_slots) // spec.n_used
        self.units, self.n_rows, self.met = n_slots, n_slots, np.ones(n_slots, bool)
        if not spec.sorted:
            return
        sort = Sort(spec.n, spec.n_used, BLOCK, MOST)
        n_tiles, n_blocks = (blocks_most(n_slots, 5, rows) for rows in (MOST, BLOCK))
        tiles = np.zeros(1 + 3 * n_tiles, np.int64)
        sorted_rows = np.zeros(2 + n_blocks * BLOCK, np.int32)
        given = {"tiles": tiles, "rows": sorted_rows, "places": np.zeros(n_slots, np.int32)}
        given["first"] = 0
        sort.run_ref(sort.args(chosen=self.tiles, **given), self.run)
        self.tiles, self.rows, self.units = tiles, sorted_rows, int(tiles[0])
        self.n_rows = int(sorted_rows[:2].view(np.int64)[0]) * BLOCK
        self.tokens = sorted_rows[2 : 2 + self.n_rows]
        self.met = np.zeros(self.n_rows, bool)
        sizes = []
        for _, first, n in tiles[1 : 1 + 3 * self.units].reshape(-1, 3):
            self.met[first : first + n] = True
            sizes.append(int(n))
        assert {1, MOST} <= set(sizes)
        assert any(n % 2 and n > 1 for n in sizes)

    def wanted(self, adapter: int) -> np.ndarray:
        """Of each row, whether it is met and its token wants this adapter."""
        found: np.ndarray = self.met & (self.wants[self.tokens, adapter] != 0)
        return found

    def args(self, memory: Memory | None = None) -> dict[str, Any]:
        given = {"wants": self.wants, "tiles": self.tiles, "rows": self.rows}
        if memory is None:
            return {**given, "wants": self.wants.ravel()}
        return {n: None if a is None else memory.copy(a, name=n) for n, a in given.items()}


@pytest.mark.parametrize("isa", rows.DISTINCT, ids=rows.name)
@pytest.mark.parametrize("spec", of(ExpertDown), ids=registry.name)
def test_down(spec: ExpertDown, isa: Isa, memory: Memory, rng: np.random.Generator) -> None:
    """A sum of k products in f32, k roundings and one of each product; and two of the scale."""
    problem = Problem(spec, rng)
    groups = np.array([(0, 0.5), (1, 2.0), (1, 2.0), (2, -1.0)], GROUP_OF)
    n_rows = N_TOKENS if spec.of_tokens else problem.n_rows
    stride = spec.width + 7
    t_stride = GROUP * len(groups) + 3
    x = np.full((n_rows, stride), np.nan, np.float32)
    x[:, : spec.width] = 0.0
    x[:, : spec.k] = rng.standard_normal((n_rows, spec.k))
    w = np.zeros((len(groups) * spec.n * GROUP, spec.width), np.float32)
    w[:, : spec.k] = rng.standard_normal((len(w), spec.k))
    blocks = spec.fmt.quantize_rows(w)
    common = {"stride": stride, "t_stride": t_stride}
    expected = np.full((problem.n_rows, t_stride), np.nan)
    args = {"x": x.ravel(), "w": blocks, "groups": groups, "t": expected.reshape(-1)}
    spec.run_ref(spec.args(**args, **common, **problem.args()), problem.run)
    wanted = np.repeat([problem.wanted(a) for a in (0, 1, 1, 2)], GROUP, 0).T
    assert np.array_equal(np.isfinite(expected[:, :-3]), wanted)
    size = 6 * spec.k  # of |x| |w|, by far; of 2 at most each as often as not
    tolerance = np.where(wanted, 4 * (spec.k + 3) * U32 * size, np.inf)
    for front in (False, True):
        given = {"x": memory.copy(x, front=front), "w": memory.copy(blocks, front=front)}
        given |= {"groups": memory.copy(groups, front=front), **problem.args(memory)}
        t = given["t"] = memory.array(expected.shape, np.float32, name="t", front=front)
        call(spec, isa, memory, {**given, **common}, problem.run, len(groups) * problem.units)
        found = t[:, :-3][wanted]
        of_it = expected[:, :-3][wanted]
        assert_close(found, of_it, tolerance[wanted], spec.name)


@pytest.mark.parametrize("isa", rows.DISTINCT, ids=rows.name)
@pytest.mark.parametrize("spec", of(ExpertUp), ids=registry.name)
def test_up(spec: ExpertUp, isa: Isa, memory: Memory, rng: np.random.Generator) -> None:
    """A sum of y and r products in f32: r + 1 roundings. The second adapter has no last strip."""
    problem = Problem(spec, rng)
    before = 3  # rows of y
    ranks = (5, 16, 1)
    firsts = (0, 8, 24)
    pieces = np.zeros((spec.n_adapters, spec.n_strips), PIECE)
    parts = []
    at = 0
    row_bytes = spec.fmt.row_bytes(STRIP)
    for adapter, (rank, first) in enumerate(zip(ranks, firsts, strict=True)):
        n_strips = spec.n_strips - (adapter == 1)
        pitch = n_strips * rank * row_bytes
        for strip in range(n_strips):
            pieces[adapter, strip] = first, rank, at + strip * rank * row_bytes, pitch
        parts.append(rng.standard_normal((spec.n * n_strips * rank, STRIP)).astype(np.float32))
        at += spec.n * pitch
    blocks = spec.fmt.quantize_rows(np.concatenate(parts))
    stride = spec.n_strips * STRIP + 3
    t_stride = 28
    y = rng.standard_normal((before + problem.n_rows, stride)).astype(np.float32)
    t = np.full((problem.n_rows, t_stride), np.nan, np.float32)
    for adapter, (rank, first) in enumerate(zip(ranks, firsts, strict=True)):
        some = problem.wanted(adapter)
        t[some, first : first + rank] = rng.standard_normal((int(some.sum()), rank))
    common = {"first": before, "stride": stride, "t_stride": t_stride}
    expected = y.astype(np.float64)
    args = {"t": t.ravel(), "w": blocks, "pieces": pieces.ravel(), "y": expected.reshape(-1)}
    spec.run_ref(spec.args(**args, **common, **problem.args()), problem.run)
    changed = (expected != y)[:, : spec.n_strips * STRIP].any(1)
    assert not changed[:before].any()
    assert np.array_equal(changed[before:], np.any([problem.wanted(a) for a in range(3)], 0))
    size = np.abs(expected)
    size[before:] += np.nan_to_num(np.abs(t)).sum(1, keepdims=True) * 5
    for front in (False, True):
        given = {"t": memory.copy(t, front=front), "w": memory.copy(blocks, front=front)}
        given |= {"pieces": memory.copy(pieces, front=front), **problem.args(memory)}
        out = given["y"] = memory.copy(y, name="y", front=front)
        call(spec, isa, memory, {**given, **common}, problem.run, spec.n_strips * problem.units)
        assert_close(out, expected, 24 * U32 * size, spec.name)
        assert np.array_equal(out[:, -3:], y[:, -3:])
