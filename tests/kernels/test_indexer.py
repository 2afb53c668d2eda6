"""The kernels of an indexer against their numpy twins: keys that are stored, scores, the choice to
the bit, and attention to chosen keys.
"""

from __future__ import annotations

from dataclasses import replace
from itertools import product
from typing import Any

import numpy as np
import pytest

from tests.kernels import registry, rows
from tests.kernels.harness import U32, Memory, Run, assert_close, call
from tests.kernels.registry import ATTENTIONS_CHOSEN, CHOICES, INDEX_SCORES, INDEX_STORES
from tests.kernels.test_attention import BATCH, Cache, build_run, cache_of, tolerance
from tests.kernels.test_rope import check_pool
from treadle.isa.isa import Isa
from treadle.kernels.attention.hadamard import points
from treadle.kernels.attention.indexer import Choose, IndexScores, IndexStore
from treadle.kernels.attention.merge_splits import Merge
from treadle.kernels.attention.paged import Attention
from treadle.kernels.attention.work_item import LOWEST
from treadle.kernels.run_state import PAGE, PART, numbered

N_CTX = 256
WORDS = N_CTX // PAGE


def parts_of(batch: Any = BATCH) -> np.ndarray:
    made = []
    token = 0
    for sequence in batch:
        made.append((token, sequence.n, sequence.history, 0, 0, 0))
        token += sequence.n
    return np.array(made, PART)


@pytest.mark.parametrize("isa", rows.DISTINCT, ids=rows.name)
@pytest.mark.parametrize("spec", INDEX_STORES, ids=registry.name)
def test_index_store(spec: IndexStore, isa: Isa, memory: Memory, rng: np.random.Generator) -> None:
    n = 5
    page = spec.page
    layer_off = 64
    page_bytes = layer_off + 2 * page.layer_bytes
    angles = rng.uniform(0, 100, (n, spec.rope_dims // 2))
    table = np.stack([np.cos(angles), np.sin(angles)], 1).astype(np.float32)
    slots = np.array([2 * PAGE + 3, 0, PAGE - 1, 3 * PAGE + 31, PAGE + 7])
    run = Run(n, ropes={spec.table: table}, slots={spec.pool: slots})
    width = spec.n_head * spec.head_dim
    q = rng.standard_normal((n, width + 3)).astype(np.float32)
    key = rng.standard_normal((n, spec.head_dim + 6)).astype(np.float32)
    args: dict[str, Any] = {"page_bytes": page_bytes, "layer_off": layer_off}
    args |= {"k_stride": key.shape[1], "k_column": 5}
    if spec.n_head:
        args["stride"] = q.shape[1]
    if spec.back:
        turn = rng.uniform(0, 6, spec.rope_dims // 2)
        args["back"] = np.concatenate([np.cos(turn), np.sin(turn)]).astype(np.float32)
    expected = q.astype(np.float64)
    pool_ref = np.full(4 * page_bytes, 0xFF, np.uint8)
    spec.run_ref(spec.args(q=expected, key=key, pool=pool_ref, **args), run)
    for front in (False, True):
        given = {**args, "key": memory.copy(key, name="key", front=front)}
        given |= {"back": memory.copy(args["back"], name="back")} if spec.back else {}
        made = memory.copy(q, name="q", front=front)
        pool = memory.array(len(pool_ref), name="pool", front=front)
        given |= {"pool": pool, **({"q": made} if spec.n_head else {})}
        call(spec, isa, memory, given, run, n)
        relative = 20 * U32
        if page.keys.fmt.rotated:
            m = points(spec.head_dim)
            relative = np.sqrt(m) * (relative + (np.log2(m) + 2) * U32)
        assert_close(made, expected, 2 * np.abs(expected).max() * relative, spec.name)
        check_pool(spec, page, pool, pool_ref, slots, (page_bytes, layer_off), relative)


@pytest.mark.parametrize("isa", rows.DISTINCT, ids=rows.name)
@pytest.mark.parametrize("spec", INDEX_SCORES, ids=registry.name)
def test_scores(spec: IndexScores, isa: Isa, memory: Memory, rng: np.random.Generator) -> None:
    """A score is a chain of D products, and of as many sums as there are heads."""
    tiles: Any = replace(spec, tokens=4)
    cache = cache_of(tiles.page)
    n = sum(sequence.n for sequence in BATCH)
    stride = spec.n_head * spec.head_dim + 7
    x = rng.standard_normal((n, stride)).astype(np.float32)
    weights = rng.standard_normal((n, spec.n_head + 5)).astype(np.float32)
    args: dict[str, Any] = {"stride": stride, "scores_stride": N_CTX, **cache.places}
    args |= {"weights_stride": weights.shape[1], "weights_column": 2} if spec.weighted else {}
    for few in (0, 1):
        run, _ = build_run(tiles, cache, few=bool(few))
        expected = np.full((n, spec.planes, N_CTX), np.nan)
        given = {**args, "few": few, "weights": weights}
        twin = spec.args(qkv=x, pool=cache.pool, scores=expected.reshape(-1), **given)
        spec.run_ref(twin, run)
        scores = memory.array(expected.shape, np.float32, name="scores")
        given |= {"qkv": memory.copy(x), "pool": memory.copy(cache.pool), "scores": scores}
        given |= {"weights": memory.copy(weights)} if spec.weighted else {}
        count = run[numbered("n_attn_few" if few else "n_attn_items", spec.pool)]
        call(spec, isa, memory, given, run, count)
        there = ~np.isnan(expected)
        assert (np.isnan(scores) == ~there).all()
        assert (np.isneginf(scores[there]) == np.isneginf(expected[there])).all()
        finite = np.isfinite(expected)
        key = float(np.nanmax(np.abs(np.concatenate(keys_of(tiles, cache)))))
        most = np.abs(x).sum(-1).max() * key * spec.scale
        heads = 1 if spec.apart else spec.n_head * np.abs(weights).max()
        allowed = (spec.head_dim + spec.n_head + 4) * U32 * most * heads
        assert np.abs(scores[finite] - expected[finite]).max() <= allowed


def keys_of(spec: Any, cache: Cache) -> list[np.ndarray]:
    pages = cache.pool.reshape(-1, cache.page_bytes)[:, cache.layer_off :]
    return [spec.page.read_ref(page)[0] for page in pages.reshape(-1, spec.page.head_bytes)]


@pytest.mark.parametrize("isa", rows.DISTINCT, ids=rows.name)
@pytest.mark.parametrize("spec", CHOICES, ids=registry.name)
def test_choose(spec: Choose, isa: Isa, memory: Memory, rng: np.random.Generator) -> None:
    """With scores that many keys share, zeros of both signs, and infinities."""
    n = sum(sequence.n for sequence in BATCH)
    run = Run(n, parts=parts_of())
    shape = (n, spec.planes, N_CTX)
    for some in (rng.standard_normal(shape), rng.integers(-2, 3, shape) * 0.5):
        x = some.astype(np.float32)
        x[..., 7] = -np.inf
        x[..., 11] = np.inf
        args = {"scores_stride": N_CTX, "chosen_stride": WORDS}
        expected = np.zeros((n * spec.planes, WORDS), np.uint32)
        spec.run_ref(spec.args(scores=x.reshape(-1), chosen=expected.reshape(-1), **args), run)
        chosen = memory.array(expected.shape, np.uint32, name="chosen")
        given = {**args, "scores": memory.copy(x), "chosen": chosen}
        call(spec, isa, memory, given, run, n * spec.planes)
        written = chosen != 0xFFFFFFFF
        assert (chosen[written] == expected[written]).all()
        for part in run.parts:
            for t in range(int(part["n_tokens"])):
                own = int(part["position"]) + t
                row = (int(part["token"]) + t) * spec.planes
                mine = chosen[row, : own // PAGE + 1]
                assert (mine == expected[row, : own // PAGE + 1]).all()
                bits = np.unpackbits(mine.view(np.uint8), bitorder="little")
                units = int(spec.units(own + 1))
                assert not bits[own + 1 :].any()
                if spec.unit == 1:
                    assert bits.sum() == min(units, spec.top)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("spec", "isa"), [*product(ATTENTIONS_CHOSEN, rows.DISTINCT)], ids=lambda value: value.name
)
def test_attention_to_chosen_keys(
    spec: Attention, isa: Isa, memory: Memory, rng: np.random.Generator
) -> None:
    """Every query sees some key; whole spans that no query sees are skipped. Of a split history,
    a part without a key has the same partial results in the kernel and its twin.
    """
    cache = cache_of(spec.page)
    n = sum(sequence.n for sequence in BATCH)
    width = spec.n_head * spec.head_dim
    x = rng.standard_normal((n, width)).astype(np.float32) * spec.head_dim**-0.5
    bits = rng.random((n, spec.chosen, N_CTX)) < 0.2
    bits[..., 0] = True
    bits[:, :, 2 * PAGE : 4 * PAGE] = False
    words = np.packbits(bits, bitorder="little").view(np.uint32).reshape(n * spec.chosen, WORDS)
    run, _ = build_run(spec, cache, split=False)
    args: dict[str, Any] = {"stride": width, "few": 0, "chosen_stride": WORDS, **cache.places}
    args["out_stride"] = spec.n_head * spec.dims_v
    expected = np.full((n, args["out_stride"]), np.nan)
    given = spec.args(qkv=x, pool=cache.pool, out=expected, chosen=words.reshape(-1), **args)
    spec.run_ref(given, run)
    out = memory.array(expected.shape, np.float32, name="out")
    made = {"qkv": memory.copy(x), "pool": memory.copy(cache.pool), "out": out}
    made["chosen"] = memory.copy(words)
    call(spec, isa, memory, {**args, **made}, run, run["n_attn_items"] * spec.n_groups)
    assert_close(out, expected, tolerance(spec, x, cache), spec.name)

    run, n_partials = build_run(spec, cache)
    size = n_partials * spec.partial_values
    exact = np.full(size, np.nan)
    twin = spec.args(**{**vars(given), "out": expected.copy(), "partials": exact})
    spec.run_ref(twin, run)
    made["partials"] = memory.array(size, np.float32, name="partials")
    call(spec, isa, memory, {**args, **made}, run, run["n_attn_items"] * spec.n_groups)
    found, parts = (a.reshape(-1, spec.dims_v + 2) for a in (made["partials"], exact))
    empty = parts[:, -1] == 0
    assert empty.any()
    assert (found[empty] == parts[empty].astype(np.float32)).all()
    assert (found[empty][:, :-2] == 0).all()
    assert (found[empty][:, -2] == np.float32(LOWEST)).all()
    merge = Merge(spec.n_groups, spec.heads, spec.tokens, spec.dims_v, spec.pool, spec.sinks)
    joined = {"partials": made["partials"], "out": out, "out_stride": args["out_stride"]}
    n_merges = run[numbered("n_attn_merges", spec.pool)] * merge.n_groups
    call(merge, isa, memory, joined, run, n_merges)
    assert_close(out, expected, tolerance(spec, x, cache), spec.name)
