"""Attention and Merge against their numpy twins: several sequences, windows, ragged tiles,
histories cut into parts.

Tolerance. A score is a chain of D products: |dS| <= gamma_(D+4) max_j sum|q||k_j| =: s. A weight
e**(S - m) is then off by a factor within 1 +- (s + 2 u |S - m| + 4 u), so that an output, a
weighted mean of n values, is off by at most 2 (s + 2 u max|S - m| + 4 u + gamma_n) max|v|. On
matrix registers a factor is two bf16, to 2**-18 of it, and of two low parts the product, again
below 2**-18, is left out; each sum has three times as many terms. Words: with numbers off by 1/2
where lengths are LIMIT, a score is off by at most (sqrt(D) + D / 4 / LIMIT) |q||k| / LIMIT. A span
of n keys has weights off by 1/2 where they are LIMIT together, and values by 1/2 where the largest
is LIMIT: a mean is off by at most (n + 1) / 2 / LIMIT max|v|.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import cache as cache_of_calls
from functools import cached_property
from itertools import pairwise, product
from typing import Any

import numpy as np
import pytest

from tests.kernels import registry, rows
from tests.kernels.harness import U32, Memory, Run, assert_close, call
from tests.kernels.pairwise import covering, parametrized
from tests.kernels.registry import (
    ATTENTIONS,
    ATTENTIONS_MATRIX,
    ATTENTIONS_TURNED,
    ATTENTIONS_WORDS,
)
from treadle.isa.isa import Isa
from treadle.jit.kernel import trace
from treadle.kernels.attention.int16_tile import LIMIT
from treadle.kernels.attention.merge_splits import Merge
from treadle.kernels.attention.page_layout import KV_FORMATS, PageLayout
from treadle.kernels.attention.paged import Attention
from treadle.kernels.attention.relative_bias import row_values
from treadle.kernels.attention.relative_logits import relative_values
from treadle.kernels.attention.work_item import SPAN, alibi_slopes
from treadle.kernels.run_state import ITEM, MERGE, PAGE, numbered

PART = 64  # keys of a part, here: small, so that short histories are cut too


@dataclass(frozen=True)
class Sequence:
    """``n`` new tokens behind ``history`` cached ones; ``split``: its keys are cut into parts."""

    history: int
    n: int
    split: bool = False


BATCH = (Sequence(0, 9), Sequence(70, 5, split=True), Sequence(31, 1), Sequence(150, 1, split=True))


class Cache:
    """Pages of random keys and values; what no token has written stays 0xFF, NaN wherever it is a
    float.
    """

    def __init__(self, page: PageLayout, rng: np.random.Generator) -> None:
        self.page = page
        self.layer_off = 128
        self.page_bytes = self.layer_off + page.layer_bytes
        self.places = {"page_bytes": self.page_bytes, "layer_off": self.layer_off}
        self.pages: list[np.ndarray] = []
        counts = [-(-(s.history + s.n) // PAGE) for s in BATCH]
        self.pool = np.full(sum(counts) * self.page_bytes, 0xFF, np.uint8)
        order = rng.permutation(sum(counts))
        for sequence, count in zip(BATCH, counts, strict=True):
            mine = order[:count]
            order = order[count:]
            self.pages.append(mine)
            for t in range(sequence.history + sequence.n):
                for head in range(page.n_head_kv):
                    home = page.head_ref(
                        self.pool, mine[t // PAGE], self.page_bytes, self.layer_off, head
                    )
                    key, value = (rng.standard_normal(n) for n in (page.head_dim, page.head_dim_v))
                    page.write_ref(home, t % PAGE, key, value)
        self.pool.flags.writeable = False

    @cached_property
    def largest(self) -> tuple[float, float, float]:
        """The largest magnitudes of keys and of values, and the longest key."""
        made = [0.0, 0.0]
        longest = 0.0
        heads = self.pool.reshape(-1, self.page_bytes)[:, self.layer_off :]
        for home in heads.reshape(-1, self.page.head_bytes):
            for i, x in enumerate(self.page.read_ref(home)):
                if i == 0:
                    longest = np.fmax(longest, np.fmax.reduce(np.linalg.norm(x, axis=1)))
                if not np.isnan(x).all():
                    made[i] = max(made[i], float(np.nanmax(np.abs(x))))
        return made[0], made[1], float(longest)


@cache_of_calls
def cache_of(page: PageLayout) -> Cache:
    """One for all kernels that read such pages: Python writes them token by token."""
    return Cache(page, np.random.default_rng(list(repr(page).encode())))


def build_run(
    spec: Attention, cache: Cache, *, split: bool = True, few: bool = False
) -> tuple[Run, int]:
    """The work items of BATCH, in the list for few tokens or in the other, which is then empty; and
    the number of partial results.
    """
    items: list[Any] = []
    merges: list[Any] = []
    token = n_partials = 0
    for sequence, pages in zip(BATCH, cache.pages, strict=True):
        for first in range(0, sequence.n, spec.tokens):
            n = min(spec.tokens, sequence.n - first)
            position = sequence.history + first
            begin = max(0, position - spec.window + 1) if spec.window else 0
            end = position + n
            if not spec.causal:
                end = min(sequence.history + sequence.n, end - 1 + (spec.window or sequence.n))
            sees = 0
            if spec.spans and sequence.n > 1:  # all its new tokens are one picture
                end = sequence.history + sequence.n
                sees = end - 1
            cuts = [begin, *range(begin // PART * PART + PART, end, PART), end]
            parts = list(pairwise(cuts))
            if not (split and sequence.split):
                parts = [(begin, end)]
            at = n_partials if len(parts) > 1 else -1
            if at >= 0:
                merges.append(np.array((token + first, n, at, len(parts)), MERGE)[()])
                n_partials += len(parts)
            for i, (b, e) in enumerate(parts):
                record = (token + first, n, position, b, e, 0, at + i if at >= 0 else -1, sees)
                items.append((np.array(record, ITEM)[()], pages))
        token += sequence.n
    run = Run(token, items={spec.pool: []}, few={spec.pool: []}, merges={spec.pool: merges})
    (run.few if few else run.items)[spec.pool] = items
    return run, n_partials


def sinks_of(spec: Attention, rng: np.random.Generator) -> np.ndarray:
    """A score of each head, one that outweighs all others, and one that is nothing beside them."""
    sinks = rng.standard_normal(spec.n_head).astype(np.float32)
    sinks[:2] = 300.0, -300.0
    return sinks


def distances_of(spec: Attention, rng: np.random.Generator) -> np.ndarray:
    """A number of each head for each distance; past the reach equal ones."""
    end = spec.reach + PAGE
    n_head = spec.n_head
    made = rng.standard_normal((n_head, row_values(spec.reach))).astype(np.float32)
    made[:, : end - spec.reach] = made[:, :1]
    made[:, end + spec.reach :] = made[:, -1:]
    return made * 4


def rel_logits_of(spec: Attention, rng: np.random.Generator) -> np.ndarray:
    """A number of each query for each distance; past the reach none."""
    n = sum(sequence.n for sequence in BATCH)
    made = np.zeros((n, spec.n_head, relative_values(spec.rel_extent)), np.float32)
    made[..., PAGE:-PAGE] = 4 * rng.standard_normal((n, spec.n_head, spec.rel_extent))
    return made


def tolerance(spec: Attention, q: np.ndarray, cache: Cache) -> float:
    """The bound above for the whole batch, with the largest |k| and |v| of all."""
    largest_key, largest_value, longest_key = cache.largest
    if spec.page.keys.fmt.minimum:  # codes times the scale, up to twice as large, and the minimum
        largest_key *= 3
    largest_product = float(np.abs(q).reshape(-1, spec.head_dim).sum(-1).max()) * largest_key
    terms, halves = (3, 3 * 2.0**-18) if spec.matrix else (1, 0.0)
    score = ((terms * spec.head_dim + 4) * U32 + halves) * largest_product
    longest = max(s.history + s.n for s in BATCH)
    if spec.alibi:
        score += 4 * U32 * float(alibi_slopes(spec.n_head, spec.alibi).max()) * longest
    if (
        spec.reach or spec.rel_extent
    ):  # of a number below 6 * 4: the rounding of LOG2_E, and of the sum
        score += 2 * U32 * 6 * 4
    if spec.words:
        length = float(np.linalg.norm(q.reshape(-1, spec.head_dim), axis=1).max()) * longest_key
        score += (spec.head_dim**0.5 / LIMIT + spec.head_dim / 4 / LIMIT**2) * length
        halves = (SPAN * PAGE + 1) / 4 / LIMIT
    n = terms * longest
    return 2 * (score + 2 * U32 * 2 * largest_product + 4 * U32 + n * U32 + halves) * largest_value


def test_slopes_of_heads() -> None:
    """Those of the paper, and of its authors' code for twelve heads."""
    powers = [-1.0, -2.0, -3.0, -4.0, -5.0, -6.0, -7.0, -8.0]
    assert np.array_equal(np.log2(alibi_slopes(8, 8.0)), powers)
    twelve = [*powers, -0.5, -1.5, -2.5, -3.5]
    assert np.allclose(np.log2(alibi_slopes(12, 8.0)), twelve, rtol=1e-15)
    assert np.array_equal(np.log2(alibi_slopes(1, 4.0)), [-4.0])


def same_words() -> list[list[Isa]]:
    """Rows by the dot product of words that they have: those of a list have the same kernels."""
    kinds: dict[object, list[Isa]] = {}
    for row in rows.WORDS:
        kinds.setdefault((row.dot_words, row.vector_bits), []).append(row)
    return list(kinds.values())


def attention_cases() -> list[tuple[Attention, Isa]]:
    """Every option on every row; how pages of a kind are read, by each kind of attention."""
    ways: tuple[list[tuple[Attention, Isa]], ...] = (
        [*product([*ATTENTIONS, *ATTENTIONS_TURNED], rows.DISTINCT)],
        [*product(ATTENTIONS_MATRIX, rows.MATRICES)],
        [
            (spec, same[turn % len(same)])  # in turns
            for turn, spec in enumerate(ATTENTIONS_WORDS)
            for same in same_words()
        ],
    )
    return [case for way in ways for case in covering(way, together=("kv", "latent"))]


@pytest.mark.slow
@parametrized(attention_cases())
def test_attention(spec: Attention, isa: Isa, memory: Memory, rng: np.random.Generator) -> None:
    cache = cache_of(spec.page)
    n = sum(sequence.n for sequence in BATCH)
    width = spec.n_head * spec.head_dim
    out_width = spec.n_head * spec.dims_v
    stride = width + 7
    out_stride = out_width + 3
    x = rng.standard_normal((n, stride)).astype(np.float32) * spec.head_dim**-0.5
    x[:, width:] = np.nan
    args: dict[str, Any] = {"stride": stride, "out_stride": out_stride, **cache.places}
    sinks = sinks_of(spec, rng)
    args["sinks"] = memory.copy(sinks, name="sinks")
    args["distances"] = memory.copy(distances_of(spec, rng), name="distances")
    args["rel_logits"] = memory.copy(rel_logits_of(spec, rng), name="rel_logits")

    # The twin does not split; that splitting changes nothing is what is tested.
    whole, _ = build_run(spec, cache, split=False)
    expected = np.full((n, out_stride), np.nan)
    spec.run_ref(spec.args(qkv=x, pool=cache.pool, out=expected, few=0, **args), whole)
    allowed = tolerance(spec, x[:, :width], cache)

    merge = Merge(spec.n_groups, spec.heads, spec.tokens, spec.dims_v, spec.pool, spec.sinks)
    for front in (False, True):
        run, n_partials = build_run(spec, cache, few=front)
        qkv = memory.copy(x, name="qkv", front=front)
        pool = memory.copy(cache.pool, name="pool", front=front)
        out = memory.array((n, out_stride), np.float32, name="out", front=front)
        partials = memory.array(
            n_partials * spec.partial_values, np.float32, name="partials", front=front
        )
        count = "n_attn_few" if front else "n_attn_items"
        n_items = run[numbered(count, spec.pool)] * spec.n_groups
        parts = {"partials": partials, "out": out}
        args["few"] = int(front)
        call(spec, isa, memory, {**args, **parts, "qkv": qkv, "pool": pool}, run, n_items)
        n_merges = run[numbered("n_attn_merges", spec.pool)] * merge.n_groups
        joined = {**parts, "out_stride": out_stride, "sinks": args["sinks"]}
        call(merge, isa, memory, joined, run, n_merges)
        assert_close(out[:, :out_width], expected[:, :out_width], allowed, spec.name)
        assert np.isnan(out[:, out_width:]).all()
        assert (pool == cache.pool).all()


def test_rows_with_the_same_dots_have_the_same_ir() -> None:
    for same in same_words():
        for spec in ATTENTIONS_WORDS[::4] if len(same) > 1 else ():
            assert len({trace(spec, isa) for isa in same}) == 1, spec.name


@pytest.mark.slow
@pytest.mark.parametrize(
    "spec", [ATTENTIONS[i] for i in (0, 5, 7, 10, -9, -7, -2)], ids=registry.name
)
def test_twins_agree_split_or_not(spec: Attention, rng: np.random.Generator) -> None:
    cache = cache_of(spec.page)
    n_tokens = sum(s.n for s in BATCH)
    width = spec.n_head * spec.dims_v
    x = rng.standard_normal((n_tokens, spec.n_head * spec.head_dim))
    outs = []
    for split in (False, True):
        run, n_partials = build_run(spec, cache, split=split)
        out = np.full((n_tokens, width), np.nan)
        partials = np.full(n_partials * spec.partial_values, np.nan)
        parts = {"out": out, "partials": partials, "out_stride": width}
        parts["sinks"] = sinks_of(spec, np.random.default_rng(3))
        parts["distances"] = distances_of(spec, np.random.default_rng(3))
        parts["rel_logits"] = rel_logits_of(spec, np.random.default_rng(4))
        given = spec.args(qkv=x, pool=cache.pool, stride=x.shape[1], few=0, **parts, **cache.places)
        spec.run_ref(given, run)
        merge = Merge(spec.n_groups, spec.heads, spec.tokens, spec.dims_v, spec.pool, spec.sinks)
        merge.run_ref(merge.args(**parts), run)
        outs.append(out)
    assert_close(outs[1], outs[0], 1e-12, spec.name)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("spec", "isa"),
    [
        (ATTENTIONS[0], rows.DISTINCT[-1]),
        (ATTENTIONS_MATRIX[0], rows.MATRICES[-1]),
        *((ATTENTIONS_WORDS[0], isa) for isa in rows.WORDS[-1:]),
    ],
    ids=lambda value: value.name,
)
def test_large_scores_do_not_overflow(
    spec: Attention, isa: Isa, memory: Memory, rng: np.random.Generator
) -> None:
    """Scores of +-1e4 differ by far more than e**x can hold: one key takes all the weight."""
    cache = cache_of(spec.page)
    run, _ = build_run(spec, cache, split=False)
    width = spec.n_head * spec.head_dim
    x = (rng.standard_normal((run.n_tokens, width)) * 1000).astype(np.float32)
    args = {"stride": width, "out_stride": width, "few": 0, **cache.places}
    expected = np.empty((run.n_tokens, width))
    out = memory.array((run.n_tokens, width), np.float32)
    spec.run_ref(spec.args(qkv=x, pool=cache.pool, out=expected, **args), run)
    buffers = {"qkv": memory.copy(x), "pool": memory.copy(cache.pool), "out": out}
    n_items = run["n_attn_items"] * spec.n_groups
    call(spec, isa, memory, {**args, **buffers}, run, n_items)
    assert_close(out, expected, tolerance(spec, x, cache), spec.name)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("kv", "latent", "isa"),
    [
        pytest.param(kv, latent, isa, id=f"{kv}{'-latent' * latent}-{isa.name}")
        for latent in (False, True)
        for i, kv in enumerate(KV_FORMATS)
        for j, isa in enumerate(rows.DISTINCT)
        # Of two ways to lay a format's pages out each row meets one, in turns.
        if len(rows.DISTINCT) == 1 or (i + j + latent) % 2 == 0
    ],
)
def test_bits_are_a_rows_own(
    kv: str, latent: bool, isa: Isa, memory: Memory, rng: np.random.Generator
) -> None:
    """Which queries share a tile decides which keys are walked that a query does not see, and where
    the walk begins: neither may change a bit of its result. Pages before that are not there.

    Values of 1.5 times a power of two make every other product a tie between two floats, which
    anything added to it before would decide.
    """
    spec = Attention(kv, 4, 2, 32, 4, 150, pool=1)
    if latent:
        spec = Attention(kv, 4, 1, 64, 4, 150, pool=1, head_dim_v=32, latent=True)
    history = 210
    n = 60
    page_bytes = spec.page.layer_bytes
    pool = np.zeros(-(-(history + n) // PAGE) * page_bytes, np.uint8)
    for t, head in product(range(history + n), range(spec.n_head_kv)):
        home = spec.page.head_ref(pool, t // PAGE, page_bytes, 0, head)
        key, value = rng.standard_normal((2, spec.head_dim)).astype(np.float32)
        value = 1.5 * np.exp2(np.rint(value)) * np.sign(value)
        key[: spec.dims_v] = value[: spec.dims_v] if latent else key[: spec.dims_v]
        spec.page.write_ref(home, t % PAGE, key, value[: spec.dims_v])
    width = spec.n_head * spec.head_dim
    out_width = spec.n_head * spec.dims_v
    x = rng.standard_normal((n, width)).astype(np.float32) * spec.head_dim**-0.5
    outs = []
    for cuts in ([*range(0, n, 4)], [0, *range(1, n, 4)], [0, *range(3, n, 4)], [*range(n)]):
        items: list[Any] = []
        for first, last in pairwise([*cuts, n]):
            position = history + first
            begin = max(0, position - spec.window + 1)
            pages = np.arange(len(pool) // page_bytes)
            pages[: begin // PAGE] = -(1 << 40)
            record = (first, last - first, position, begin, history + last, 0, -1, 0)
            items.append((np.array(record, ITEM)[()], pages))
        run = Run(n_tokens=n, items={1: items})
        out = memory.array((n, out_width), np.float32)
        args = {"qkv": memory.copy(x), "pool": memory.copy(pool), "out": out, "stride": width}
        args |= {"out_stride": out_width, "page_bytes": page_bytes, "layer_off": 0, "few": 0}
        call(spec, isa, memory, args, run, len(items) * spec.n_groups)
        outs.append(out)
    for out in outs[1:]:
        assert np.array_equal(out, outs[0])
