"""The studied kernels on this machine: right, and timed hot and cold by a clock of the test's."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import ClassVar

import numpy as np
import pytest

from bench.kernel_study import clock
from bench.kernel_study.rows import ScaleRow
from bench.kernel_study.spec import Study
from bench.kernel_study.sweep import KERNELS, Kernel, problem
from treadle.isa.isa import Isa
from treadle.jit.language import Builder, Val
from treadle.profiling.report import row_in_use

ENDS = [(kernel, spec) for kernel in KERNELS for spec in (kernel.specs[0], kernel.specs[-1])]


def ticking(*times: float) -> clock.Clock:
    """Each call after the first is one of ``times`` later; then a second each."""
    left = list(times)
    now = [0.0]

    def tell() -> float:
        now[0] += left.pop(0) if left else 1.0
        return now[0]

    return tell


@pytest.mark.parametrize(("kernel", "spec"), ENDS, ids=lambda v: getattr(v, "name", ""))
def test_right_here(kernel: Kernel, spec: Study) -> None:
    small = replace(kernel, specs=(spec,))
    (found,) = clock.measure(small, row_in_use(), 1, cold_bytes=1 << 16, clock=ticking())
    assert found.wrong == {row_in_use().vector_bits: None}
    assert found.best
    assert found.hot_ns is not None
    assert found.cold_ns is not None


def test_a_sample_is_long_enough_for_a_slow_clock() -> None:
    """Repetitions double until a sample takes 2 ms; the time is that of one."""
    kernel = Kernel("scale_f16", (ScaleRow(),), 1024)
    # Samples of 1.5 and 2.5 ms: so two repetitions; then the least of 5 and 4 ms. Cold: 32 copies.
    hot = [0.0, 1.5e-3, 0.0, 2.5e-3, 0.0, 5e-3, 0.0, 4e-3]
    n_bytes = 32 * (2048 + 2 + 2)
    said = ticking(*hot, 0.0, 64e-6, 0.0, 32e-6)
    (found,) = clock.measure(kernel, row_in_use(), 2, cold_bytes=n_bytes, clock=said)
    assert found.hot_ns == pytest.approx(2e6)
    assert found.cold_ns == pytest.approx(1000)


@dataclass(frozen=True)
class Forgetful(ScaleRow):
    """Leaves the last vector alone."""

    op: ClassVar[str] = "forgetful"

    def body(self, k: Builder, isa: Isa, x: Val, y: Val, out: Val, n: Val) -> None:
        super().body(k, isa, x, y, out, n - self.lanes(isa))


def test_a_wrong_kernel_is_told_and_never_best() -> None:
    kernel = Kernel("scale_f16", (Forgetful(), ScaleRow()), 1024)
    wrong, right = clock.measure(kernel, row_in_use(), 1, cold_bytes=1 << 16, clock=ticking())
    (why,) = wrong.wrong.values()
    assert why is not None
    assert why.startswith("out[")
    assert not wrong.best
    assert right.best


def test_a_cold_repetition_has_memory_of_its_own() -> None:
    """All copies are written to, each once."""
    spec = ScaleRow()
    isa = row_in_use()
    case = spec.case(isa, 1024, np.random.default_rng(0))
    seen = []

    def run(slots: int, state: None, begin: int, end: int, scratch: None) -> None:
        seen.append((begin, end, np.ctypeslib.as_array(_words(slots), (7,)).copy()))

    clock._cold(run, spec, case, 1, 10 * 2052, ticking())
    steps = dict(zip(spec.args.kinds, seen[0][2].tolist(), strict=True))
    assert seen[0][:2] == (0, 10)
    assert steps["out_step"] == 2048
    assert steps["x_step"] == 2


def _words(address: int) -> object:
    import ctypes

    return ctypes.cast(address, ctypes.POINTER(ctypes.c_int64))


def test_nan_is_wrong() -> None:
    case = ScaleRow().case(row_in_use(), 1024, np.random.default_rng(0))
    after = {"out": np.full(1024, np.nan, np.float16)}
    assert str(problem(case, after)).startswith("out[0] is nan")
