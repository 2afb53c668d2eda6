"""Kernels of hyper-connections and of n-grams against their numpy twins."""

from __future__ import annotations

from itertools import pairwise
from typing import Any

import numpy as np
import pytest

from tests.kernels import registry, rows
from tests.kernels.harness import U32, Memory, Run, assert_close, call
from tests.kernels.registry import HYPER_STREAMS, NGRAMS, TABLE_GATHERS
from treadle.isa.isa import Isa
from treadle.kernels.elementwise.attention_residuals import AttentionResidual
from treadle.kernels.elementwise.gated_streams import SpreadToStreams, SumStreams
from treadle.kernels.elementwise.ngram import GatherRows, NgramRows
from treadle.kernels.elementwise.streams import (
    AddToStreams,
    MixStreams,
    NormStreams,
    OutputCopy,
    RepeatStreams,
    ScoreStreams,
)
from treadle.kernels.run_state import PART
from treadle.kernels.spec import Spec

N = 5
PITCH = 3 * 64 + 9  # of all rows


def widths_of(spec: Any) -> tuple[dict[str, int], str, dict[str, int], int, str]:
    """The columns of each input; the output and its own; integers; items a row, and of which."""
    k = spec.k
    if isinstance(spec, OutputCopy):
        return {"x": k}, "out", {"out_stride": PITCH}, 1, "n_outputs"
    n = spec.n
    if isinstance(spec, RepeatStreams):
        return {"x": k}, "out", {"out_stride": PITCH}, 1, "n_tokens"
    if isinstance(spec, NormStreams):
        return {"x": n * k, "w": n * k}, "out", {"out_stride": PITCH, "column": 0}, n, "n_tokens"
    if isinstance(spec, MixStreams):
        both = {"gate_stride": PITCH, "out_stride": PITCH}
        return {"x": n * k, "gate": n * k}, "out", both, 1, "n_tokens"
    if isinstance(spec, AddToStreams):
        more = {"y_stride": PITCH, "weight_stride": PITCH, "column": 4}
        return {"x": n * k, "y": k, "weight": n + 4}, "x", more, n, "n_tokens"
    if isinstance(spec, SumStreams):
        more = {"mix_stride": PITCH, "out_stride": PITCH, "column": 2}
        return {"x": n * k, "mix": n + 2, "base": n, "scale": 1}, "out", more, 1, "n_tokens"
    if isinstance(spec, SpreadToStreams):
        more = {"mix_stride": PITCH, "y_stride": PITCH, "column": 2}
        given = {"x": n * k, "y": k, "mix": n + 2, "base": 2 * n, "scale": 2}
        return given, "x", more, n, "n_tokens"
    if isinstance(spec, AttentionResidual):
        more = {"blocks_stride": PITCH, "out_stride": PITCH, "column": 3}
        return {"blocks": n * k, "x": k + 3, "w": k}, "out", more, 1, "n_tokens"
    assert isinstance(spec, ScoreStreams)
    more = {"value_stride": PITCH, "column": 3}
    return {"key": n * k, "query": n * k, "value": k + 3}, "out", more, n, "n_tokens"


@pytest.mark.parametrize("isa", rows.DISTINCT, ids=rows.name)
@pytest.mark.parametrize("spec", HYPER_STREAMS, ids=registry.name)
def test_streams(spec: Spec, isa: Isa, memory: Memory, rng: np.random.Generator) -> None:
    """Sums of 64 terms at most, roots and sigmoids: some tens of roundings."""
    widths, to, numbers, per, count = widths_of(spec)
    run = Run(N, output_rows=np.array([3, 0], np.int32))
    given: dict[str, Any] = {}
    for name, width in widths.items():
        x = rng.standard_normal((N, PITCH)).astype(np.float32)
        if name in ("gate", "weight", "mix"):
            x[0] *= 300  # e**x has no f32
        x[:, width:] = np.nan
        given[name] = x
    for name in ("w", "base", "scale"):
        if name in given:
            given[name] = (1 + rng.random(widths[name])).astype(np.float32)
    args = {"stride": PITCH, **numbers}
    expected = np.full((N, PITCH), np.nan)
    if to in given:
        expected = given[to].astype(np.float64)
    spec.run_ref(spec.args(**{**given, to: expected}, **args), run)
    for front in (False, True):
        made = {name: memory.copy(x, name=name, front=front) for name, x in given.items()}
        out = made.setdefault(to, memory.array((N, PITCH), np.float32, name="out", front=front))
        call(spec, isa, memory, {**args, **made}, run, run[count] * per)
        there = ~np.isnan(expected)
        assert (np.isnan(out) == ~there).all()
        top = np.abs(expected[there]).max()
        assert_close(out[there], expected[there], 400 * U32 * top, spec.name)


@pytest.mark.parametrize("isa", rows.DISTINCT, ids=rows.name)
@pytest.mark.parametrize("spec", NGRAMS, ids=registry.name)
def test_rows_of_ngrams(
    spec: NgramRows, isa: Isa, memory: Memory, rng: np.random.Generator
) -> None:
    """Of one text, in one run and in two: the second begins with the first one's last tokens."""
    n = 30
    ids = rng.integers(0, 12, n).astype(np.int32)  # with ends among them
    heads = (spec.n - 1) * spec.heads
    sizes = rng.integers(2, 1 << 40, heads)
    factors = rng.integers(1, (1 << 63) // 12, spec.n)
    table = np.concatenate([factors, np.stack([sizes, sizes // 3], 1).ravel()]).astype(np.int64)
    stride = heads + 3
    found = []
    for cuts in ((0, n), (0, 1, 2, 17, n)):
        states = memory.array(3 * 64, np.uint8, name="states")
        twin = states.copy()
        args = {"stride": stride, "cell_bytes": 64, "state_off": 8}
        out: list[np.ndarray] = []
        for i, (start, end) in enumerate(pairwise(cuts)):
            part = np.array([(0, end - start, start, i % 2, (i + 1) % 2, 0)], PART)
            run = Run(end - start, tokens=ids[start:end], parts=part)
            rows_ = memory.array((end - start, stride), np.int64, name="rows")
            expected = np.zeros((end - start, stride), np.int64)
            given = spec.args(out=expected.reshape(-1), hash=table, states=twin, **args)
            spec.run_ref(given, run)
            made = {"out": rows_, "hash": memory.copy(table), "states": states}
            call(spec, isa, memory, {**args, **made}, run, 1)
            assert np.array_equal(rows_[:, :heads], expected[:, :heads])
            assert np.array_equal(states, twin)
            out.append(rows_[:, :heads].copy())
        found.append(np.concatenate(out))
    assert np.array_equal(found[0], found[1])
    assert (found[0] >= sizes // 3).all()
    assert (found[0] < sizes + sizes // 3).all()


@pytest.mark.parametrize("isa", rows.DISTINCT, ids=rows.name)
@pytest.mark.parametrize("spec", TABLE_GATHERS, ids=registry.name)
def test_gathered_rows(
    spec: GatherRows, isa: Isa, memory: Memory, rng: np.random.Generator
) -> None:
    """The format's own values."""
    fmt = spec.fmt
    w = fmt.quantize_rows(rng.standard_normal((9, spec.k)).astype(np.float32))
    arrays = tuple(memory.copy(np.ascontiguousarray(a)) for a in fmt.split(w))
    numbers = rng.integers(0, 9, (N, 8)).astype(np.int64)
    stride = spec.heads * spec.k + 5
    args = {"rows_stride": 8, "stride": stride}
    expected = np.full((N, stride), np.nan)
    spec.run_ref(spec.args(w=arrays, rows=numbers.reshape(-1), x=expected, **args), Run(N))
    x = memory.array((N, stride), np.float32, name="x")
    given = {**args, "w": arrays, "rows": memory.copy(numbers), "x": x}
    call(spec, isa, memory, given, Run(N), N * spec.heads)
    width = spec.heads * spec.k
    assert_close(x[:, :width], expected[:, :width], 2 * U32 * np.abs(w).max() + 1e-6, spec.name)
    assert np.isnan(x[:, width:]).all()
