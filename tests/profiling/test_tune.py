"""Sweeps decided by a stand-in for the clock: who is tried, how often, and who wins."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterator
from dataclasses import replace
from itertools import pairwise, product
from zlib import crc32

import pytest

from treadle.formats import by_name
from treadle.isa import ROWS
from treadle.kernels.matmul import select
from treadle.kernels.matmul.gemm import Gemm
from treadle.kernels.matmul.gemv import Gemv
from treadle.kernels.matmul.matmul import Matmul
from treadle.kernels.matmul.select import SHIPPED, TunedTable, fits
from treadle.kernels.matmul.strips import StripGemm
from treadle.kernels.run_state import GEMV_TOKENS
from treadle.profiling.tune import (
    CROSSOVER,
    GAIN,
    KEPT,
    ROUNDS,
    Sweep,
    Variant,
    measure_crossover,
    sweep,
    swept_fields,
    tune,
)

VNNI = ROWS["avx512_vnni"]
AVX2 = ROWS["avx2"]
AMX = ROWS["amx_bf16"]
assert AMX.matrix
TWO_PARTS = replace(AMX, matrix=replace(AMX.matrix, parts=2))  # where an F32 is too long for it
Q8_0 = by_name("Q8_0")
K = 2048
N = 512

Cost = Callable[[Matmul, int], float]


def quiet(title: str, done: int, total: int) -> None:
    pass


class FakeTimer:
    """Seconds from a formula; ``broken`` kernels give wrong results, ``refused`` ones no code."""

    def __init__(self, cold: Cost, hot: Cost = lambda spec, n: 1.0) -> None:
        self.costs = {True: cold, False: hot}
        self.broken: list[Matmul] = []
        self.refused: list[Matmul] = []
        self.compiled: list[Matmul] = []
        self.checked: list[tuple[Matmul, int]] = []
        self.timed: list[tuple[Matmul, bool, int]] = []

    def compile(self, spec: Matmul) -> str | None:
        self.compiled.append(spec)
        return "LLVM refuses it" if spec in self.refused else None

    def check(self, spec: Matmul, n: int) -> str | None:
        assert spec in self.compiled
        self.checked.append((spec, n))
        return "1 of 9 results are wrong" if spec in self.broken else None

    def seconds(self, spec: Matmul, n: int, cold: bool, runs: int) -> float:
        assert (spec, n) in self.checked
        self.timed.append((spec, cold, runs))
        return self.costs[cold](spec, n)


def wanting(**wanted: int) -> Cost:
    """A kernel is the faster the nearer its fields are to these."""

    def cost(spec: Matmul, n: int) -> float:
        return 1.0 + sum(float(abs(getattr(spec, name) - v)) for name, v in wanted.items())

    return cost


def sweep_gemm(timer: FakeTimer, *, runs: int = 6) -> Sweep:
    return sweep(timer, select.gemm(Q8_0, VNNI, K), VNNI, N, runs=runs, progress=quiet)


def fields_of(found: Sweep) -> dict[str, int]:
    return dict(found.best.fields)


def test_the_quickest_cold_kernel_wins() -> None:
    found = sweep_gemm(FakeTimer(wanting(mr=1, nr=6), hot=wanting(mr=4, nr=4)))
    assert found.best.spec == Gemm("Q8_0", "q8", K, 1, 6, **rest(found.best))
    assert found.best.cold_s == 1.0
    assert found.gain == pytest.approx(1 + 1 + 2)  # shipped are 2 and 8
    assert [v.best for v in found.variants].count(True) == 1
    assert [v.shipped for v in found.variants].count(True) == 1


def rest(variant: Variant) -> dict[str, bool]:
    """The swept fields beside the tile, where the spec has some."""
    return {name: v for name, v in variant.fields.items() if name not in ("mr", "nr")}  # type: ignore[misc]


def test_of_two_equally_quick_the_hotter_wins() -> None:
    found = sweep_gemm(FakeTimer(wanting(nr=6), hot=wanting(mr=4)))
    assert (fields_of(found)["mr"], fields_of(found)["nr"]) == (4, 6)


@pytest.mark.parametrize(("times", "wins"), [(1.0, False), (GAIN, False), (GAIN + 0.01, True)])
def test_the_shipped_kernel_stays_unless_it_is_beaten(times: float, wins: bool) -> None:
    shipped = select.gemm(Q8_0, VNNI, K)

    def cost(spec: Matmul, n: int) -> float:
        return times if spec == shipped else 1.0

    found = sweep_gemm(FakeTimer(cost))
    assert (found.best.spec != shipped) == wins
    assert found.gain == pytest.approx(times if wins else 1.0)


def test_a_wrong_kernel_never_wins() -> None:
    """However quick it is; nor is it timed."""
    everything = [v.spec for v in sweep_gemm(FakeTimer(wanting(mr=1, nr=6))).variants]
    timer = FakeTimer(wanting(mr=1, nr=6))
    quickest = timer.broken = [s for s in everything if (s.mr, s.nr) == (1, 6)]
    second = timer.refused = [s for s in everything if (s.mr, s.nr) == (1, 5)]
    assert quickest
    assert second
    found = sweep_gemm(timer)
    assert (fields_of(found)["mr"], fields_of(found)["nr"]) in ((2, 6), (1, 7))
    met = [v for v in found.variants if v.spec in (*quickest, *second)]
    assert {(v.spec.mr, v.spec.nr) for v in met} == {(1, 6), (1, 5)}
    for variant in met:
        spec = variant.spec
        assert variant.problem in ("1 of 9 results are wrong", "LLVM refuses it")
        assert variant not in found.sound
        assert spec not in [timed[0] for timed in timer.timed]


def test_a_shipped_kernel_that_is_wrong_loses_too() -> None:
    timer = FakeTimer(lambda spec, n: 5.0)
    timer.broken = [select.gemm(Q8_0, VNNI, K)]
    found = sweep_gemm(timer)
    assert found.best.spec not in timer.broken
    assert found.gain is None


def test_if_all_are_wrong_nothing_is_kept() -> None:
    timer = FakeTimer(lambda spec, n: 1.0)
    everything = [v.spec for v in sweep_gemm(timer).variants]
    everything += [select.gemv(Q8_0, VNNI, K, n) for n in GEMV_TOKENS]
    timer.broken = everything
    sweeps, crossed, table = tune(timer, Q8_0, VNNI, K, N, ["gemm"], runs=3)
    assert not sweeps[0].sound
    assert sweeps[0].best.shipped
    assert (table, crossed) == (SHIPPED, None)


def test_every_tile_that_fits_is_tried_once_and_the_others_are_counted() -> None:
    for isa in (VNNI, AVX2):
        timer = FakeTimer(wanting(mr=1, nr=6))
        shipped = select.gemm(Q8_0, isa, K)
        found = sweep(timer, shipped, isa, N, runs=3, progress=quiet)
        specs = [v.spec for v in found.variants]
        assert len({s.name for s in specs}) == len(specs)
        assert shipped in specs
        assert all(fits(spec, isa) for spec in specs)
        tile = select.TUNING_CANDIDATES["gemm"][0]
        every = {(mr, nr) for mr in tile["mr"] for nr in tile["nr"]} | {(shipped.mr, shipped.nr)}
        tried = {(s.mr, s.nr) for s in specs}
        assert found.left_out == len(every - tried) > 0
        assert timer.compiled == [s for s, _ in timer.checked]
        assert Counter(timer.compiled) == Counter(specs)


def test_runs_are_spread_over_rounds() -> None:
    """Each variant's runs are many, hot and cold alike, and never all in a row."""
    timer = FakeTimer(wanting(mr=1, nr=6))
    found = sweep_gemm(timer, runs=8)
    final = [s for s, _, _ in timer.timed[-2 * ROUNDS * (KEPT + 1) :]]
    for variant in found.variants:
        times = 2 if variant.spec in final else 1
        for cold in (False, True):
            mine = [runs for s, c, runs in timer.timed if s == variant.spec and c == cold]
            assert sum(mine) == 8 * times
            assert len(mine) == ROUNDS * times
    order = [s for s, cold, _ in timer.timed if cold]
    assert all(a != b for a, b in pairwise(order))
    timer = FakeTimer(wanting(mr=1, nr=6))
    sweep_gemm(timer, runs=1)
    assert {runs for _, _, runs in timer.timed} == {1}


def test_a_slow_moment_costs_nobody_the_minimum() -> None:
    calls: Counter[str] = Counter()

    def cost(spec: Matmul, n: int) -> float:
        calls[spec.name] += 1
        return wanting(mr=1, nr=6)(spec, n) * (100 if calls[spec.name] == 1 else 1)

    found = sweep_gemm(FakeTimer(cost))
    assert (fields_of(found)["mr"], fields_of(found)["nr"]) == (1, 6)
    assert found.best.cold_s == 1.0


def test_the_final_finds_out_who_was_only_lucky() -> None:
    """The best and the shipped run again; what they did before still counts for them all."""
    near = wanting(mr=1, nr=6)
    # No two take the same time: whoever is third would be a matter of order.
    timer = FakeTimer(lambda spec, n: near(spec, n) + crc32(spec.name.encode()) * 2.0**-40)
    found = sweep_gemm(timer, runs=3)
    finalists = Counter(s.name for s, cold, _ in timer.timed if cold)
    twice = {name for name, times in finalists.items() if times == 2 * ROUNDS}
    assert {v.spec.name for v in found.sound[:KEPT]} <= twice
    assert next(v for v in found.variants if v.shipped).spec.name in twice


def test_later_stages_start_from_the_best_tiles() -> None:
    """So a field that changes which tile is best is seen."""

    def cost(spec: Matmul, n: int) -> float:
        assert isinstance(spec, Gemm)
        near = wanting(mr=1, nr=6, fence=8)(spec, n) + abs(spec.kc - 1024) / 1024
        tile = (spec.mr, spec.nr)
        return near - 2 if tile == (1, 5) and spec.fence == 8 else near

    found = sweep_gemm(FakeTimer(cost))
    assert fields_of(found) == {"mr": 1, "nr": 5, "fence": 8, "kc": 1024}
    assert found.best.name == "mr 1 nr 5 fence 8 kc 1024"
    specs = [v.spec for v in found.variants]
    assert len({s.name for s in specs}) == len(specs)
    short = sweep(
        FakeTimer(wanting(mr=1)), select.gemm(Q8_0, VNNI, 512), VNNI, N, runs=1, progress=quiet
    )
    assert {v.fields["kc"] for v in short.variants} == {0}  # 512 and more are all of K


def test_the_fields_that_are_swept() -> None:
    assert set(swept_fields(Gemv("F32", "f32", K, 4, 1))) == {"ahead", "mr"}
    assert set(swept_fields(Gemm("F32", "f32", K, 2, 6))) == {"mr", "nr", "fence", "kc"}
    timer = FakeTimer(wanting(mr=16, ahead=2048))
    found = sweep(timer, select.gemv(Q8_0, VNNI, K, 1), VNNI, 1, runs=1, progress=quiet)
    assert fields_of(found) == {"ahead": 2048, "mr": 16}


# -- the crossover --------------------------------------------------------------------------------


def crossing(gemv_wins_up_to: int) -> Cost:
    def cost(spec: Matmul, n: int) -> float:
        return float(n) if spec.op == "gemv" else gemv_wins_up_to + 0.5

    return cost


@pytest.mark.parametrize(
    ("wins", "tokens"), [(0, 1), (1, 1), (2, 2), (3, 2), (4, 4), (9, 8), (99, CROSSOVER[-1])]
)
def test_gemv_is_for_as_many_tokens_as_it_wins_at(wins: int, tokens: int) -> None:
    found = measure_crossover(
        FakeTimer(crossing(wins)), Q8_0, VNNI, K, SHIPPED, runs=3, progress=quiet
    )
    assert found.tokens == tokens
    assert found.gemv_s == {n: float(n) for n in CROSSOVER}
    assert found.gemm_s == dict.fromkeys(CROSSOVER, wins + 0.5)


def test_one_lucky_number_is_no_crossover() -> None:
    """Where gemv loses at 4 it is not for 8, whatever it does there."""

    def cost(spec: Matmul, n: int) -> float:
        return {2: 1.0, 4: 3.0, 8: 1.0, 16: 1.0}[n] if spec.op == "gemv" else 2.0

    found = measure_crossover(FakeTimer(cost), Q8_0, VNNI, K, SHIPPED, runs=1, progress=quiet)
    assert found.tokens == 2


@pytest.mark.parametrize(("wins", "vectors"), [(0, 0), (1, 0), (2, 2), (9, 8), (99, CROSSOVER[-1])])
def test_vectors_are_for_as_many_tokens_as_they_win_at(wins: int, vectors: int) -> None:
    """Against matrix registers, where there are any and they serve the format."""

    def cost(spec: Matmul, n: int) -> float:
        return {"gemv": 0.1, "gemm": float(n), "matrix": wins + 0.5}[select.family(spec)]

    found = measure_crossover(FakeTimer(cost), Q8_0, AMX, K, SHIPPED, runs=1, progress=quiet)
    assert (found.tokens, found.vector_tokens) == (CROSSOVER[-1], vectors)
    assert found.matrix_s == dict.fromkeys(CROSSOVER, wins + 0.5)
    for fmt, isa in ((by_name("F32"), TWO_PARTS), (Q8_0, VNNI)):
        other = measure_crossover(
            FakeTimer(crossing(4)), fmt, isa, K, SHIPPED, runs=1, progress=quiet
        )
        assert (other.vector_tokens, other.matrix_s) == (None, {})


def test_a_wrong_gemv_has_no_crossover() -> None:
    timer = FakeTimer(crossing(99))
    timer.broken = [select.gemv(Q8_0, VNNI, K, 4)]
    assert measure_crossover(timer, Q8_0, VNNI, K, SHIPPED, runs=1, progress=quiet).tokens == 2


# -- all of it ------------------------------------------------------------------------------------


def test_what_is_found_is_what_plans_then_use() -> None:
    def cost(spec: Matmul, n: int) -> float:
        if spec.op == "gemm":
            return wanting(mr=4, nr=6)(spec, n) * n
        return abs(spec.mr - 16 // spec.nr) + n / 3 + (100 if n > 2 else 0)

    told: list[tuple[str, int, int]] = []
    sweeps, crossed, table = tune(
        FakeTimer(cost), Q8_0, VNNI, K, N, runs=3, progress=lambda *now: told.append(now)
    )
    wanted = [("gemm", N), *(("gemv", n) for n in GEMV_TOKENS)]
    assert [(s.kernel, s.tokens) for s in sweeps] == wanted
    assert crossed is not None
    assert (crossed.tokens, table.gemv_tokens) == (2, {"Q8_0": 2})
    spec = select.matmul(Q8_0, VNNI, K, 512, table)
    assert (spec.mr, spec.nr) == (4, 6)
    assert select.matmul(Q8_0, VNNI, K, 1, table).mr == 16
    assert select.matmul(Q8_0, VNNI, K, 2, table).mr == 8
    assert select.matmul(Q8_0, VNNI, K, 4, table).op == "gemm"
    assert all(0 <= done <= total for _, done, total in told)
    assert {title.partition(":")[0] for title, _, _ in told} == {
        "tuning gemm Q8_0, 512 tokens",
        *(f"tuning gemv Q8_0, {n} tokens" for n in GEMV_TOKENS),
        *(f"comparing Q8_0, {n} tokens" for n in CROSSOVER),
    }


def test_one_kernel_alone() -> None:
    timer = FakeTimer(wanting(mr=1))
    sweeps, crossed, table = tune(timer, Q8_0, VNNI, K, N, ["gemv"], runs=1)
    assert {s.kernel for s in sweeps} == {"gemv"}
    assert (crossed, dict(table.gemm), dict(table.gemv_tokens)) == (None, {}, {})


def test_matrix_registers_are_swept_where_they_serve() -> None:
    """Beside the vectors, whose kernels small batches keep."""
    timer = FakeTimer(wanting(mr=2))
    sweeps, crossed, table = tune(timer, Q8_0, AMX, K, N, runs=1)
    wanted = [("gemm", N), ("matrix", N), *(("gemv", n) for n in GEMV_TOKENS)]
    assert [(s.kernel, s.tokens) for s in sweeps] == wanted
    parts = [kc for kc in select.TUNING_CANDIDATES["matrix"][0]["kc"] if kc < K]
    assert [v.name for v in sweeps[1].variants] == [
        f"mr {mr} kc {kc}" for mr, kc in product((2, 4, 8, 16), parts)
    ]
    assert table.matrix["Q8_0"]["mr"] == 2
    assert crossed is not None
    many = select.matmul(Q8_0, AMX, K, N, table)
    assert (select.family(many), many.mr) == ("matrix", 2)
    few = {select.family(s) for s, n in timer.checked if n in CROSSOVER and s.op == "gemm"}
    assert few == {"gemm", "matrix"}
    assert table.vector_tokens == {"Q8_0": crossed.vector_tokens}
    for fmt, isa in ((by_name("F32"), TWO_PARTS), (Q8_0, VNNI)):
        assert tune(timer, fmt, isa, K, N, ["matrix"], runs=1) == ([], None, SHIPPED)


def test_the_crossover_alone_uses_what_was_tuned_before() -> None:
    timer = FakeTimer(crossing(4))
    before = TunedTable({"Q8_0": {"mr": 1, "nr": 6}}, {("Q8_0", 2): {"mr": 16}})
    sweeps, crossed, table = tune(timer, Q8_0, VNNI, K, N, ["crossover"], table=before, runs=1)
    assert (sweeps, table) == ([], TunedTable(gemv_tokens={"Q8_0": 4}))
    assert crossed is not None
    shapes = {(s.op, s.mr, s.nr) for s in timer.compiled}
    assert ("gemm", 1, 6) in shapes
    assert ("gemv", 16, 2) in shapes
    tiles = [s for s in timer.compiled if s.op == "gemm" and not isinstance(s, StripGemm)]
    assert {s.nr for s in tiles} == {6}


def names(variants: list[Variant]) -> Iterator[str]:
    return (v.name for v in variants)


def test_variants_are_listed_by_their_fields() -> None:
    found = sweep_gemm(FakeTimer(wanting(mr=1, nr=6)))
    shapes = [tuple(v.fields.values()) for v in found.variants]
    assert shapes == sorted(shapes)
    assert next(names(found.variants)).startswith("mr 1 nr 2")
