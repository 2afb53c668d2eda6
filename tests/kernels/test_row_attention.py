"""Kernels of rows that are keys and values, and of streams that a token mixes by its own weights,
against their numpy twins.
"""

from __future__ import annotations

from itertools import pairwise
from typing import Any

import numpy as np
import pytest

from tests.kernels import registry, rows
from tests.kernels.harness import U32, Memory, Run, assert_close, call
from tests.kernels.registry import (
    COMPRESSIONS,
    MANIFOLDS,
    ROW_ATTENTIONS,
    ROW_CHOICES,
    ROW_SCORES,
    ROW_STORES,
    STREAM_WEIGHTS,
    TOKEN_ROUTES,
    TURNED_HEADS,
)
from treadle.isa.isa import Isa
from treadle.kernels.attention.hadamard import points
from treadle.kernels.attention.page_layout import PageLayout
from treadle.kernels.attention.row_attention import SCORED, RowAttention, RowChoice, RowScores
from treadle.kernels.attention.row_pages import RowStore, TurnHeads, place_of
from treadle.kernels.elementwise.manifold import BlendStreams, StreamWeights
from treadle.kernels.moe.route import RouteByToken
from treadle.kernels.page_sizes import rows_of
from treadle.kernels.recurrent.compress import Compress
from treadle.kernels.run_state import PAGE, PART

N = 5
PITCH = 4 * 64 + 9  # of all rows
LAYER_OFF = 64
# First row, tokens, position of the first one.
PARTS = [(0, 3, 0), (3, 1, 129), (4, 4, 61)]
N_TOKENS = 8


class Texts:
    """Pages of random rows of PARTS, by pool: of each token, and of units. What no token has
    written stays 0xFF, NaN wherever it is a float.
    """

    def __init__(self, layouts: list[tuple[PageLayout, int]], rng: np.random.Generator) -> None:
        counts = [-(-(position + n) // PAGE) for _, n, position in PARTS]
        self.pools: list[np.ndarray] = []
        self.page_bytes: list[int] = []
        lists: list[list[np.ndarray]] = [[] for _ in PARTS]
        for layout, unit in layouts:
            page_bytes = LAYER_OFF + layout.layer_bytes
            pool = np.full(sum(counts) * page_bytes, 0xFF, np.uint8)
            order = rng.permutation(sum(counts))
            for (_, n, position), count, mine in zip(PARTS, counts, lists, strict=True):
                mine.append(order[:count])
                order = order[count:]
                for row in range((position + n) // unit):
                    page, place = place_of(row, unit)
                    home = layout.head_ref(pool, int(mine[-1][page]), page_bytes, LAYER_OFF, 0)
                    x = rng.standard_normal(layout.head_dim)
                    layout.write_ref(home, place, x, x)
            self.pools.append(pool)
            self.page_bytes.append(page_bytes)
        parts = np.array([(*part, 0, 0, 0) for part in PARTS], PART)
        self.run = Run(N_TOKENS, parts=parts, pages=lists)


def layout_of(spec: Any, unit: int) -> PageLayout:
    return PageLayout(spec.kv, 1, spec.head_dim, spec.head_dim, True, rows_of(unit))


@pytest.mark.parametrize("isa", rows.DISTINCT, ids=rows.name)
@pytest.mark.parametrize("spec", ROW_ATTENTIONS, ids=registry.name)
def test_row_attention(
    spec: RowAttention, isa: Isa, memory: Memory, rng: np.random.Generator
) -> None:
    """A score is a chain of D products, a result a mean of n rows: off by at most as many roundings
    of their largest terms.
    """
    layouts = [(layout_of(spec, 1), 1)]
    if spec.unit:
        layouts.append((layout_of(spec, spec.unit), spec.unit))
    texts = Texts(layouts, rng)
    width = spec.n_head * spec.head_dim
    x = (rng.standard_normal((N_TOKENS, width + 3)) * spec.head_dim**-0.5).astype(np.float32)
    sinks = rng.standard_normal(spec.n_head).astype(np.float32)
    sinks[0] = 30.0
    args: dict[str, Any] = {"stride": width + 3, "out_stride": width + 5, "layer_off": LAYER_OFF}
    args["page_bytes"] = texts.page_bytes[0]
    if spec.unit:
        args |= {"units_page_bytes": texts.page_bytes[1], "units_layer_off": LAYER_OFF}
    arrays: dict[str, Any] = {"qkv": x, "sinks": sinks, "pool": texts.pools[0]}
    if spec.unit:
        arrays["units"] = texts.pools[1]
    if spec.top:
        chosen = np.full((N_TOKENS, 16), -1, np.int32)
        for first, n, position in PARTS:
            for t in range(n):
                n_rows = (position + t + 1) // spec.unit
                listed = np.sort(rng.permutation(n_rows)[: spec.top])
                chosen[first + t, 0] = len(listed)
                chosen[first + t, 1 : 1 + len(listed)] = listed
        arrays["chosen"] = chosen
        args["chosen_stride"] = 16
    expected = np.full((N_TOKENS, width + 5), np.nan)
    given = {**arrays, "chosen": arrays["chosen"].reshape(-1)} if spec.top else arrays
    spec.run_ref(spec.args(**given, **args, out=expected), texts.run)
    out = memory.array(expected.shape, np.float32, name="out")
    made = {name: memory.copy(a, name=name) for name, a in arrays.items()}
    call(spec, isa, memory, {**args, **made, "out": out}, texts.run, N_TOKENS * spec.n_groups)
    there = ~np.isnan(expected)
    assert (np.isnan(out) == ~there).all()
    top = np.abs(expected[there]).max()
    score = (spec.head_dim + 4) * np.abs(x).sum(-1).max() * 5
    assert_close(out[there], expected[there], 2 * (score + 200) * U32 * top, spec.name)


@pytest.mark.parametrize("isa", rows.DISTINCT, ids=rows.name)
@pytest.mark.parametrize("spec", ROW_SCORES, ids=registry.name)
def test_row_scores(spec: RowScores, isa: Isa, memory: Memory, rng: np.random.Generator) -> None:
    texts = Texts([(layout_of(spec, spec.unit), spec.unit)], rng)
    width = spec.n_head * spec.head_dim
    q = rng.standard_normal((N_TOKENS, width + 3)).astype(np.float32)
    weights = rng.standard_normal((N_TOKENS, spec.n_head + 5)).astype(np.float32)
    stride = spec.slices * SCORED
    args: dict[str, Any] = {"stride": width + 3, "weights_stride": spec.n_head + 5}
    args |= {"weights_column": 2, "scores_stride": stride, "layer_off": LAYER_OFF}
    args["page_bytes"] = texts.page_bytes[0]
    expected = np.full((N_TOKENS, stride), np.nan)
    arrays = {"q": q, "weights": weights, "pool": texts.pools[0]}
    spec.run_ref(spec.args(**arrays, **args, scores=expected), texts.run)
    scores = memory.array(expected.shape, np.float32, name="scores")
    made = {name: memory.copy(a, name=name) for name, a in arrays.items()}
    call(spec, isa, memory, {**args, **made, "scores": scores}, texts.run, N_TOKENS * spec.slices)
    there = ~np.isnan(expected)
    assert there.any()
    assert (np.isnan(scores) == ~there).all()
    most = np.abs(q).sum(-1).max() * 5 * np.abs(weights).max() * spec.scale
    allowed = (spec.head_dim + spec.n_head + 4) * U32 * most
    assert np.abs(scores[there] - expected[there]).max() <= allowed


@pytest.mark.parametrize("isa", rows.DISTINCT, ids=rows.name)
@pytest.mark.parametrize("spec", ROW_CHOICES, ids=registry.name)
def test_choose_rows(spec: RowChoice, isa: Isa, memory: Memory, rng: np.random.Generator) -> None:
    """With scores that many rows share, and infinities."""
    texts = Texts([], rng)
    texts.run.pages = [[np.arange(8)] for _ in PARTS]
    args = {"scores_stride": 64, "chosen_stride": 1 + spec.top}
    for some in (rng.standard_normal((N_TOKENS, 64)), rng.integers(-2, 3, (N_TOKENS, 64)) * 0.5):
        x = some.astype(np.float32)
        x[:, 2] = -np.inf
        x[:, 5] = np.inf
        expected = np.full((N_TOKENS, 1 + spec.top), -1, np.int32)
        given = spec.args(scores=x.copy().reshape(-1), chosen=expected.reshape(-1), **args)
        spec.run_ref(given, texts.run)
        chosen = memory.array(expected.shape, np.int32, name="chosen")
        made = {"scores": memory.copy(x), "chosen": chosen}
        call(spec, isa, memory, {**args, **made}, texts.run, N_TOKENS)
        assert np.array_equal(chosen, expected)


@pytest.mark.parametrize("isa", rows.DISTINCT, ids=rows.name)
@pytest.mark.parametrize("spec", ROW_STORES, ids=registry.name)
def test_row_store(spec: RowStore, isa: Isa, memory: Memory, rng: np.random.Generator) -> None:
    """Only where a unit ends within its page, and nothing else of a page."""
    page = spec.page
    each = min(spec.unit, PAGE)
    page_bytes = LAYER_OFF + page.layer_bytes
    slots = np.array([2 * PAGE + each - 1, 0, PAGE - 1, 3 * PAGE + 30, PAGE + each - 1])
    angles = rng.uniform(0, 100, (N, spec.rope_dims // 2))
    table = np.stack([np.cos(angles), np.sin(angles)], 1).astype(np.float32)
    run = Run(N, ropes={spec.table: table}, slots={spec.pool: slots})
    key = rng.standard_normal((N, spec.head_dim + 6)).astype(np.float32)
    arrays = {"key": key}
    if spec.eps is not None:
        arrays["norm"] = (1 + rng.random(spec.head_dim)).astype(np.float32)
    if spec.rotates_back:
        turn = rng.uniform(0, 6, spec.rope_dims // 2)
        arrays["back"] = np.concatenate([np.cos(turn), np.sin(turn)]).astype(np.float32)
    args = {"k_stride": key.shape[1], "k_column": 5, "page_bytes": page_bytes}
    args["layer_off"] = LAYER_OFF
    expected = np.full(4 * page_bytes, 0xFF, np.uint8)
    spec.run_ref(spec.args(**arrays, **args, pool=expected), run)
    pool = memory.array(len(expected), name="pool")
    made = {name: memory.copy(a, name=name) for name, a in arrays.items()}
    call(spec, isa, memory, {**args, **made, "pool": pool}, run, N)
    written = expected != 0xFF
    for slot in slots:
        if slot % each == each - 1:
            pair = [
                page.read_ref(page.head_ref(p, int(slot) // PAGE, page_bytes, LAYER_OFF, 0))[0]
                for p in (pool, expected)
            ]
            got, want = (rows_[slot % PAGE // each] for rows_ in pair)
            unit = {"f16": 2.0**-10, "bf16": 2.0**-7, "f32": 2.0**-23}.get(spec.kv, 1 / 7)
            relative = 20 * U32 * (points(spec.head_dim) if page.keys.fmt.rotated else 1)
            top = np.abs(want).max()
            assert np.abs(got - want).max() <= (unit + relative) * top + 1e-6
    assert (pool[~written] == 0xFF).mean() > 0.98  # codes may be 0xFF themselves


@pytest.mark.parametrize("isa", rows.DISTINCT, ids=rows.name)
@pytest.mark.parametrize("spec", TURNED_HEADS, ids=registry.name)
def test_turned_heads(spec: TurnHeads, isa: Isa, memory: Memory, rng: np.random.Generator) -> None:
    width = spec.heads * spec.head_dim
    angles = rng.uniform(0, 100, (N, spec.rope_dims // 2))
    table = np.stack([np.cos(angles), np.sin(angles)], 1).astype(np.float32)
    run = Run(N, ropes={spec.table: table})
    x = rng.standard_normal((N, width + 7)).astype(np.float32)
    args = {"stride": width + 7, "column": 4}
    expected = x.astype(np.float64)
    spec.run_ref(spec.args(x=expected, **args), run)
    made = memory.copy(x, name="x")
    call(spec, isa, memory, {**args, "x": made}, run, N * spec.heads)
    m = points(spec.head_dim) if spec.hadamard else 1
    relative = np.sqrt(m) * (20 + np.log2(m)) * U32
    assert_close(made, expected, 2 * np.abs(expected).max() * relative, spec.name)


@pytest.mark.parametrize("isa", rows.DISTINCT, ids=rows.name)
@pytest.mark.parametrize("spec", COMPRESSIONS, ids=registry.name)
def test_compression(spec: Compress, isa: Isa, memory: Memory, rng: np.random.Generator) -> None:
    """Of one text, in one run and in several, whose bits are the same; the softmax of all of a
    unit's tokens at once is the judge of the twin.
    """
    n = 3 * spec.unit + 2
    width = spec.columns
    kv, gate = (rng.standard_normal((n, width + 3)).astype(np.float32) for _ in range(2))
    bias = rng.standard_normal((spec.unit, width)).astype(np.float32)
    cell = 4 * spec.n_values + 12
    found = []
    for cuts in ((0, n), (0, 1, 3, spec.unit + 1, n)):
        states = memory.array(2 * cell, np.uint8, name="states")
        twin = states.copy()
        made: list[np.ndarray] = []
        for i, (start, end) in enumerate(pairwise(cuts)):
            part = np.array([(0, end - start, start, i % 2, (i + 1) % 2, 0)], PART)
            run = Run(end - start, parts=part)
            args: dict[str, Any] = {"kv_stride": width + 3, "gate_stride": width + 3}
            args |= {"out_stride": spec.k + 1, "kv_column": 2, "gate_column": 3}
            args |= {"cell_bytes": cell, "state_off": 8}
            arrays = {"kv": kv[start:end], "gate": gate[start:end], "bias": bias}
            expected = np.full((end - start, spec.k + 1), np.nan)
            given = spec.args(**{**arrays, "bias": bias.ravel()}, **args, out=expected, states=twin)
            spec.run_ref(given, run)
            out = memory.array(expected.shape, np.float32, name="out")
            copies = {name: memory.copy(a, name=name) for name, a in arrays.items()}
            call(
                spec, isa, memory, {**args, **copies, "out": out, "states": states}, run, spec.tiles
            )
            assert_close(out[:, : spec.k], expected[:, : spec.k], 200 * U32 * 5, spec.name)
            made.append(out[:, : spec.k].copy())
        found.append(np.concatenate(made))
    assert np.array_equal(found[0], found[1])
    ends = range(spec.unit - 1, n, spec.unit)
    own = slice(width - spec.k, width)
    for which, end in enumerate(ends):
        begin = end + 1 - spec.unit
        scores = gate[begin : begin + spec.unit, 3:][:, own].astype(np.float64) + bias[:, own]
        values = kv[begin : begin + spec.unit, 2:][:, own].astype(np.float64)
        if spec.overlap and which:
            last = slice(begin - spec.unit, begin)
            more = gate[last, 3:][:, : spec.k].astype(np.float64) + bias[:, : spec.k]
            scores = np.concatenate([more, scores])
            values = np.concatenate([kv[last, 2:][:, : spec.k], values])
        p = np.exp(scores - scores.max(0))
        exact = (p * values).sum(0) / p.sum(0)
        assert_close(found[0][end], exact, 200 * U32 * 5, spec.name)


@pytest.mark.parametrize("isa", rows.DISTINCT, ids=rows.name)
@pytest.mark.parametrize("spec", STREAM_WEIGHTS, ids=registry.name)
def test_stream_weights(
    spec: StreamWeights, isa: Isa, memory: Memory, rng: np.random.Generator
) -> None:
    """Some tens of roundings for each normalisation; rows and columns sum to 1 at the end."""
    width = spec.n * (2 + spec.n) if spec.rounds else spec.n
    x = rng.standard_normal((N, PITCH)).astype(np.float32)
    x[0] *= 30
    arrays = {"x": x, "scale": np.array([0.7, 1.3, 0.9], np.float32)}
    arrays["base"] = rng.standard_normal(width).astype(np.float32)
    args = {"stride": PITCH, "column": 3, "out_stride": PITCH}
    expected = np.full((N, PITCH), np.nan)
    spec.run_ref(spec.args(**arrays, **args, out=expected), Run(N))
    out = memory.array((N, PITCH), np.float32, name="out")
    made = {name: memory.copy(a, name=name) for name, a in arrays.items()}
    call(spec, isa, memory, {**args, **made, "out": out}, Run(N), N)
    there = ~np.isnan(expected)
    assert (np.isnan(out) == ~there).all()
    allowed = 4e-5 if spec.rounds else 100 * U32  # e**x of 30 standard deviations
    assert_close(out[there], expected[there], allowed, spec.name)
    if spec.rounds > 1:
        comb = out[1:, 2 * spec.n : width].reshape(-1, spec.n, spec.n)
        assert np.abs(comb.sum(1) - 1).max() < 1e-4


@pytest.mark.parametrize("isa", rows.DISTINCT, ids=rows.name)
@pytest.mark.parametrize("spec", MANIFOLDS, ids=registry.name)
def test_streams(spec: Any, isa: Isa, memory: Memory, rng: np.random.Generator) -> None:
    blends = isinstance(spec, BlendStreams)
    widths = {"x": spec.n * spec.k}
    args = {"stride": PITCH, **({"y_stride": PITCH} if blends else {"out_stride": PITCH})}
    if blends or not spec.mean:
        widths["weight"] = spec.n * (2 + spec.n)
        args["weight_stride"] = PITCH
    if blends:
        widths["y"] = spec.k
    arrays: dict[str, Any] = {}
    for name, width in widths.items():
        arrays[name] = rng.standard_normal((N, PITCH)).astype(np.float32)
        arrays[name][:, width:] = np.nan
    to = "x" if blends else "out"
    expected = arrays["x"].astype(np.float64) if blends else np.full((N, PITCH), np.nan)
    spec.run_ref(spec.args(**{**arrays, to: expected}, **args), Run(N))
    made = {name: memory.copy(a, name=name) for name, a in arrays.items()}
    out = made.setdefault(to, memory.array((N, PITCH), np.float32, name="out"))
    call(spec, isa, memory, {**args, **made}, Run(N), N * (spec.slices if blends else 1))
    there = ~np.isnan(expected)
    assert (np.isnan(out) == ~there).all()
    assert_close(out[there], expected[there], 40 * U32 * np.abs(expected[there]).max(), spec.name)


@pytest.mark.parametrize("isa", rows.DISTINCT, ids=rows.name)
@pytest.mark.parametrize("spec", TOKEN_ROUTES, ids=registry.name)
def test_route_by_token(
    spec: RouteByToken, isa: Isa, memory: Memory, rng: np.random.Generator
) -> None:
    stride = spec.n + 3
    scores = rng.standard_normal((N, stride)).astype(np.float32)
    table = rng.permuted(np.tile(np.arange(spec.n), (20, 1)), axis=1)[:, : spec.n_used]
    table = np.ascontiguousarray(table.astype(np.int32))
    run = Run(N, tokens=rng.integers(0, 20, N).astype(np.int32))
    chosen = np.zeros(N * spec.n_used, np.int32)
    weights = np.zeros(N * spec.n_used)
    outs = {"chosen": chosen, "weights": weights}
    spec.run_ref(spec.args(scores=scores, table=table, **outs, stride=stride), run)
    made: dict[str, Any] = {"scores": memory.copy(scores), "table": memory.copy(table)}
    made["stride"] = stride
    made["chosen"] = memory.array(chosen.shape, np.int32, name="chosen")
    made["weights"] = memory.array(chosen.shape, np.float32, name="weights")
    call(spec, isa, memory, made, run, N)
    assert np.array_equal(made["chosen"], chosen)
    assert_close(made["weights"], weights, 16 * U32 * np.abs(weights), spec.name)
