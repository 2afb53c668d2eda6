"""Trials of real kernels on small shapes: what is right passes, what is wrong does not, and the
memory that is read is the memory that was meant.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from itertools import count, cycle
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from tests.kernels import rows
from tests.kernels.quick_code import emit_quickly
from treadle.errors import CacheError, CompileError, UnsupportedError
from treadle.formats import FORMATS, Format, by_name
from treadle.formats.mlx import mlx
from treadle.isa.isa import Isa
from treadle.jit import cache
from treadle.kernels.matmul import select
from treadle.kernels.matmul.gemm import Gemm
from treadle.kernels.matmul.gemv import Gemv
from treadle.kernels.matmul.matmul import Matmul
from treadle.kernels.matmul.matrix import MatrixGemm, RegisterTile
from treadle.kernels.matmul.select_activation import has_matrix_act
from treadle.kernels.matmul.sizes import COLUMNS
from treadle.kernels.matmul.tile import MatmulTile
from treadle.profiling import trial as trial_module
from treadle.profiling.trial import KernelTrial

READ = [*(fmt for fmt in FORMATS.values() if fmt.codes or fmt.load), mlx(4, 64, "BF16")]
BEST = rows.ALL[-1]
F32, Q8_0 = by_name("F32"), by_name("Q8_0")
COPIES = 5


@pytest.fixture(autouse=True)
def small_caches(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(trial_module, "buffer_bytes", lambda: 4 * COPIES * 70 * 256)
    monkeypatch.setattr(trial_module, "LEAST_OPS", 0)


@contextmanager
def trial_of(
    fmt: Format, isa: Isa = BEST, k: int = 256, m: int = 70, **more: Any
) -> Iterator[KernelTrial]:
    made = KernelTrial(fmt, isa, k, m, 9, more.pop("n_threads", 2), **more)
    try:
        yield made
    finally:
        made.close()


ROWS = [*rows.ALL, rows.MADE_UP]
# Kernels of each format on each row are compared with their twins in tests/kernels/test_matmul.py,
# and tests/kernels/test_choice.py has what is chosen. A trial knows of a format and of a row what
# it asks each of: a format meets one row, a row a third of the formats or more.
SHIPPED = [(fmt, ROWS[i % len(ROWS)]) for i, fmt in enumerate(READ)]
SHIPPED += [(F32, row) for row in ROWS[1:]]  # the first meets the first
SHIPPED += [(Q8_0, row) for row in ROWS if (Q8_0, row) not in SHIPPED]


@pytest.mark.slow
@pytest.mark.parametrize(("fmt", "isa"), SHIPPED, ids=lambda made: made.name)
def test_what_is_shipped_is_right(fmt: Format, isa: Isa, monkeypatch: pytest.MonkeyPatch) -> None:
    """A trial keeps no kernel, so each is compiled anew: here without what makes it fast."""
    monkeypatch.setattr("treadle.jit.compile.emit_object", emit_quickly)
    with trial_of(fmt, isa) as trial:
        for spec, n in [
            (select.gemm(fmt, isa, 256), 9),
            (select.gemm(fmt, isa, 256), 2),
            (select.gemm(fmt, isa, 256, matrix=False), 9),
            (select.gemv(fmt, isa, 256, 1), 1),
            (select.gemv(fmt, isa, 256, 4), 4),
        ]:
            assert trial.compile(spec) is None
            assert trial.check(spec, n) is None
            for cold in (False, True):
                assert trial.seconds(spec, n, cold, 2) > 0
        assert trial.n_bytes == 70 * fmt.row_bytes(256)
        assert trial.n_ops(9) == 2 * 256 * 70 * 9


class Lazy:
    """Leaves out the last strip that it is given."""

    op = "lazy"

    def build(self, k: Any, isa: Any, frame: Any) -> None:
        frame.end = frame.end - 1
        super().build(k, isa, frame)  # type: ignore[misc]  # of the gemm beside it


Results = Iterator[tuple[int, int, Any]]


class Slip:
    """Adds a hundredth to every result; to those of weights that are rounded to bf16, which may
    miss a little more, a quarter.
    """

    op = "slip"

    def build(self, k: Any, isa: Any, frame: Any) -> None:
        with pytest.MonkeyPatch.context() as patch:
            for tile, by in ((MatmulTile, 0.01), (RegisterTile, 0.25)):
                patch.setattr(tile, "results", slipped(tile.results, by))
            super().build(k, isa, frame)  # type: ignore[misc]


def slipped(results: Callable[..., Results], by: float) -> Callable[..., Results]:
    def off(self: Any) -> Results:
        return ((row, token, v + by) for row, token, v in results(self))

    return off


@pytest.mark.slow
@pytest.mark.parametrize("kind", [Lazy, Slip])
@pytest.mark.parametrize("isa", [rows.VECTORS[-1], rows.MATRICES[-1]], ids=rows.name)
@pytest.mark.parametrize("fmt", [F32, Q8_0], ids=lambda fmt: fmt.name)
def test_a_wrong_kernel_is_found_out(kind: type, isa: Isa, fmt: Format) -> None:
    right = select.gemm(fmt, isa, 256)
    assert isinstance(right, MatrixGemm) == has_matrix_act(fmt, isa)
    wrong = type("Wrong", (kind, type(right)), {})(fmt.name, right.act, 256, right.mr, right.nr)
    with trial_of(fmt, isa) as trial:
        assert trial.compile(right) is None
        assert trial.check(right, 9) is None
        assert trial.compile(wrong) is None
        problem = trial.check(wrong, 9)
        assert problem is not None
        assert "results are wrong, the first at token 0" in problem
        assert trial.check(right, 9) is None


def test_one_wrong_quant_is_found_out() -> None:
    """The tolerance is that of rounding: a quant that is off by one shows."""
    spec = select.gemv(Q8_0, BEST, 256, 1)
    with trial_of(Q8_0) as trial:
        assert trial.compile(spec) is None
        assert trial.check(spec, 1) is None
        quant = trial.n_bytes - 1
        trial._copies.bytes[quant] += 1
        assert "1 of 70 results are wrong" in (trial.check(spec, 1) or "")


def test_what_llvm_refuses_is_told(monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(text: str, isa: Isa) -> bytes:
        raise CompileError("too odd")

    monkeypatch.setattr("treadle.jit.compile.emit_object", refuse)
    with trial_of(F32) as trial:
        assert trial.compile(select.gemm(F32, BEST, 256)) == "too odd"


def test_a_trials_kernels_are_not_kept(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TREADLE_CACHE", str(tmp_path / "kernels"))
    spec = Gemm("F32", "f32", 256, 1, 7)
    with trial_of(F32) as trial:
        assert trial.compile(spec) is None
        assert trial.check(spec, 9) is None
    assert spec.name not in {entry.name for entry in cache.entries()}


def test_where_compiling_is_forbidden(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TREADLE_NO_COMPILE", "1")
    with trial_of(F32) as trial, pytest.raises(CacheError, match="forbids compiling"):
        trial.compile(Gemm("F32", "f32", 256, 1, 7))


def test_rows_that_no_block_fits() -> None:
    with pytest.raises(UnsupportedError, match="these have 100 weights"):
        KernelTrial(Q8_0, BEST, 100, 64, 9, 1)


class Watched(KernelTrial):
    """Notes which copies each run reads."""

    def __init__(self, *args: Any, **more: Any) -> None:
        self.orders: list[list[int]] = []
        super().__init__(*args, **more)

    def _run(self, spec: Matmul, n: int, order: list[int]) -> float:
        self.orders.append(order)
        return super()._run(spec, n, order)


def test_cold_weights_are_never_those_of_a_moment_ago(monkeypatch: pytest.MonkeyPatch) -> None:
    """Every copy is read before one is read again, across calls; hot is always the same one."""
    spec = select.gemv(F32, BEST, 256, 1)
    trial = Watched(F32, BEST, 256, 70, 9, 1)
    assert trial.compile(spec) is None
    trial.seconds(spec, 1, False, 3)
    assert trial.orders == [[0]] * 4  # one to warm up
    trial.orders.clear()
    for runs in (3, 4):
        trial.seconds(spec, 1, True, runs)
    assert trial.orders == [[i % COPIES] for i in range(7)]
    every = trial._copies.bytes.reshape(COPIES, -1)
    assert (every[:, : trial.n_bytes] == trial.weights).all()
    trial.orders.clear()
    monkeypatch.setattr(trial_module, "LEAST_OPS", 2 * trial.n_ops(1))
    trial.seconds(spec, 1, True, 2)
    assert trial.orders == [[2, 3], [4, 0]]
    monkeypatch.setattr(trial_module, "LEAST_OPS", 1 << 40)  # no more than all of them in a run
    trial.orders.clear()
    trial.seconds(spec, 1, True, 1)
    assert trial.orders == [[1, 2, 3, 4, 0]]
    trial.close()


def test_the_least_time_counts_for_one_product(monkeypatch: pytest.MonkeyPatch) -> None:
    """Of runs of 4 products that take 8, 6, 10 seconds, the second gives 1.5."""
    lengths = iter([99.0, 8.0, 6.0, 10.0])  # the first is to warm up
    now = 0.0
    calls = count()

    def clock() -> float:
        nonlocal now
        now += next(lengths) if next(calls) % 2 else 0.5
        return now

    spec = select.gemv(F32, BEST, 256, 1)
    with trial_of(F32, n_threads=1, clock=clock) as trial:
        monkeypatch.setattr(trial_module, "LEAST_OPS", 4 * trial.n_ops(1))
        assert trial.compile(spec) is None
        assert trial.seconds(spec, 1, False, 3) == 1.5


def test_what_the_threads_got_of_the_processors(monkeypatch: pytest.MonkeyPatch) -> None:
    with trial_of(F32, n_threads=2) as trial:
        assert trial.cpu_share == 1.0
        walls, cpus = cycle([0.0, 1.0]), cycle([0.0, 0.5])  # 1 s of two threads, which got 0.5
        spec = select.gemv(F32, BEST, 256, 1)
        assert trial.compile(spec) is None
        with monkeypatch.context() as patch:
            patch.setattr("time.perf_counter", lambda: next(walls))
            patch.setattr("time.process_time", lambda: next(cpus))
            trial.seconds(spec, 1, False, 3)
        assert trial.cpu_share == 0.25


def test_a_tiny_product_is_not_run_a_million_times(monkeypatch: pytest.MonkeyPatch) -> None:
    """LEAST_OPS of it, or as many copies as no cache holds, took minutes for each shape."""
    monkeypatch.setattr(trial_module, "LEAST_OPS", 1 << 30)
    monkeypatch.setattr(trial_module, "buffer_bytes", lambda: 1 << 24)
    with trial_of(Q8_0, k=32, m=8) as trial:
        spec = select.gemv(Q8_0, BEST, 32, 1)
        assert trial.compile(spec) is None
        run = trial._run
        ran = []

        def note(spec: Matmul, n: int, order: list[int]) -> float:
            ran.append(len(order))
            return run(spec, n, order)

        monkeypatch.setattr(trial, "_run", note)
        assert trial.seconds(spec, 1, True, 1) > 0
        assert ran == [trial_module.MOST_STEPS]


def test_the_team_grows_with_its_scratch() -> None:
    """A wide panel after a narrow one."""
    with trial_of(F32) as trial:
        for spec in (Gemv("F32", "f32", 256, 1, 1), Gemm("F32", "f32", 256, 1, 2)):
            assert trial.compile(spec) is None
            assert trial.check(spec, spec.nr) is None
        wide = Gemm("F32", "f32", 256, COLUMNS // BEST.lanes // 2, 2)
        assert trial.compile(wide) is None
        assert trial.check(wide, 2) is None
        assert trial._team is not None
        assert trial._team.scratch >= wide.scratch(BEST.lanes)
    assert trial._team is None


def test_twins_agree_whatever_the_tile() -> None:
    """One twin serves all tiles: their layouts hold the same values."""
    with trial_of(Q8_0) as trial:
        first = trial._twin(Gemm("Q8_0", "q8", 256, 1, 2), 9)[0]
        trial._twins.clear()
        other = trial._twin(Gemm("Q8_0", "q8", 256, 1, 5), 9)[0]
        np.testing.assert_array_equal(first, other)
