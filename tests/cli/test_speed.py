"""What a run costs, counted by the plan and its kernels: weights once, history by what is seen."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest

from treadle.cli.commands.bench import Test as BenchTest
from treadle.cli.speed import PassCost, alike, kind_of
from treadle.kernels.attention.paged import Attention
from treadle.kernels.elementwise.elementwise import Norm
from treadle.kernels.matmul.gemm import Gemm
from treadle.kernels.spec import Grid, Spec
from treadle.plan.plan import ANY, Step

PEAKS = {"bandwidth": 1e9, "int8": 1e9, "f32": 1e9}


def step(spec: Spec, n_bytes: int = 0, n_flops: int = 0, count: str = "n_tokens") -> Step:
    return Step("L0", spec, {}, Grid(1, count), n_bytes=n_bytes, n_flops=n_flops)


@pytest.mark.parametrize("window", [0, 5, 64])
@pytest.mark.parametrize(("before", "n"), [(0, 1), (0, 9), (63, 1), (63, 2), (70, 40), (3, 3)])
@pytest.mark.parametrize(("kv", "key_bytes"), [("f16", 2 * 32), ("f32", 4 * 32), ("q8_0", 32 + 4)])
def test_attention_reads_what_its_queries_see(
    window: int, before: int, n: int, kv: str, key_bytes: int
) -> None:
    """Counted one key at a time: 6 query heads of 32 dims, of which 3 share a key's."""
    spec = Attention(kv, 6, 2, 32, 1, window)
    seen = [
        {key for key in range(position + 1) if not window or key > position - window}
        for position in range(before, before + n)
    ]
    n_bytes = len(set().union(*seen)) * 2 * 2 * key_bytes  # a key and a value in each of 2 heads
    n_ops = sum(map(len, seen)) * 6 * 32 * 2 * 2  # a product and a sum with each
    assert spec.history(before, n) == (n_bytes, n_ops)
    assert step(spec).cost([(before, n)]) == (n_bytes, n_ops)


def test_other_kernels_have_no_history() -> None:
    assert Norm("f32", 64, 1, 1e-5).history(1000, 5) == (0, 0)


def test_weights_are_read_once_a_run_and_history_once_a_sequence() -> None:
    spec = Attention("f16", 2, 2, 32, 1)
    product = step(Norm("q8", 64, 1, 1e-5), n_bytes=1000, n_flops=7)
    parts = [(10, 1), (20, 1), (0, 5)]
    assert product.cost(parts) == (1000, 7 * 7)
    attention = [spec.history(*part) for part in parts]
    assert step(spec).cost(parts) == (sum(a[0] for a in attention), sum(a[1] for a in attention))


def test_reading_has_a_share_of_the_stream_too() -> None:
    peaks = {**PEAKS, "stream": 5e8}
    work = PassCost.of(
        [step(Norm("q8", 64, 1, 1e-5), n_bytes=1000, n_flops=7)], [([(0, 1)], 1)], peaks
    )
    assert work.shares(1e-5) == pytest.approx({"bandwidth": 0.1, "stream": 0.2, "f32": 0.0007})
    assert work.bound == "bandwidth"


def test_peaks_of_caches_have_no_stream() -> None:
    caches = {"caches": 2e9, "f32": 1e9}
    assert alike([{"bandwidth": 1e9, "stream": 9e8, "f32": 1e9}, caches]) == [
        {"caches": 1e9, "f32": 1e9},
        caches,
    ]


def test_logits_that_nobody_wants_cost_nothing() -> None:
    output = step(Norm("q8", 64, 1, 1e-5), n_bytes=1000, n_flops=7, count="n_outputs")
    assert output.cost([(0, 512)], 0) == (0, 0)
    assert output.cost([(0, 512)], 1) == (1000, 7)
    assert output.cost([(0, 1)] * 8, 8) == (1000, 56)


@pytest.mark.parametrize("n", [1, 5, 9, 40, 512])
def test_experts_of_few_rows_and_of_many_share_the_work(n: int) -> None:
    """Both steps name all that there is; what is expected of each, against random choices."""
    rng = np.random.default_rng(1)
    n_expert = 20
    few = range(1, 9)
    whole = replace(step(Norm("q8", 64, 1, 1e-5), n_bytes=10**9, n_flops=10**9), read_share=0.1)
    parts = [
        replace(whole, rows_per_expert=rows_per_expert)
        for rows_per_expert in (few, range(few.stop, ANY.stop))
    ]
    sizes = rng.binomial(n, 0.1, (4000, n_expert))
    met = np.isin(sizes, few)
    expected = met.mean(), (sizes * met).sum() / sizes.sum()
    found = [part.cost([(0, n)]) for part in parts]
    n_bytes, n_ops = whole.cost([(0, n)])
    assert (found[0][0] / 1e9, found[0][1] / n_ops) == pytest.approx(expected, abs=0.01)
    assert sum(each[0] for each in found) == pytest.approx(n_bytes, abs=2)
    assert sum(each[1] for each in found) == pytest.approx(n_ops, rel=1e-9)


def test_what_works_on_matrix_registers_is_bound_by_them() -> None:
    """Attention too, where vectors work in f32; peaks without them are an older table's."""
    names = [replace(Attention("f16", 2, 2, 32, 32), matrix=on).name for on in (False, True)]
    assert [kind_of(name, PEAKS | {"bf16": 9e9}) for name in names] == ["f32", "bf16"]
    assert [kind_of(name, PEAKS) for name in names] == ["f32", "f32"]
    assert kind_of(Gemm("Q8_0", "q8", 64, 2, 8).name, PEAKS | {"bf16": 9e9}) == "int8"


def test_a_long_prompts_work() -> None:
    """In runs of 4, of which the last alone gives logits; every run reads the weights."""
    attention = Attention("f16", 2, 2, 32, 1)
    layer = step(Norm("q8", 64, 1, 1e-5), n_bytes=1000, n_flops=7)
    output = step(Norm("q8", 64, 1, 1e-5), n_bytes=500, n_flops=3, count="n_outputs")
    runs = BenchTest("pp", 10, 6).runs(4)
    work = PassCost.of([layer, step(attention), output], runs, PEAKS)
    histories = [attention.history(6, 4), attention.history(10, 4), attention.history(14, 2)]
    assert work.n_bytes == 3 * 1000 + 500 + sum(h[0] for h in histories)
    assert work.ops == 10 * 7 + 3 + sum(h[1] for h in histories)


def test_decoding_in_a_window_costs_the_same_at_every_depth() -> None:
    spec = step(Attention("f16", 2, 2, 32, 1, 100))
    shallow, deep, deepest = (
        PassCost.of([spec], BenchTest("tg", 4, depth).runs(512), PEAKS) for depth in (50, 100, 9000)
    )
    assert shallow.n_bytes < deep.n_bytes == deepest.n_bytes
