"""The check finds what is wrong, and names it: each test injects one fault."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import treadle
from tests.conftest import WriteTiny
from treadle.devices.cpu.device import Cpu
from treadle.jit.language import Builder, Isa
from treadle.kernels.activations import ACTIVATIONS
from treadle.kernels.elementwise.elementwise import Norm
from treadle.kernels.matmul.gemv import Gemv
from treadle.kernels.spec import Frame, Spec
from treadle.selftest.model_check import CheckReport, check_kernels, check_model
from treadle.selftest.thread_check import check_threads

pytestmark = pytest.mark.slow  # kernels are compiled anew in each
SMALL: dict[str, Any] = {"context": 80, "threads": 2, "n_sequences": 4}


def kernels_of(path: Path) -> CheckReport:
    report = CheckReport({}, {}, quick=True)
    with treadle.load(path, **SMALL) as model:
        check_kernels(model, report)
    return report


@pytest.fixture
def path(tiny: WriteTiny) -> Path:
    return tiny("llama", "F32")


def test_nothing_is_wrong(path: Path) -> None:
    with treadle.load(path, **SMALL) as model:
        report = check_model(model, quick=True)
    assert report.failures == []
    assert report.passed
    assert all(each.n_values for each in report.kernels)
    assert report.threads is not None
    assert report.threads.counts[:2] == (1, 2)
    assert report.text is not None
    assert (len(report.text.ids), report.text.known) == (12, False)
    assert report.text.apart < 1e-3  # of F32 weights, and pages of f16


Fault = Callable[[Any, Builder, Isa, Frame], None]


def _half_of_its_items(build: Fault) -> Fault:
    """The kernel leaves out the second half of what it is given."""

    def faulty(self: Any, k: Builder, isa: Isa, frame: Frame) -> None:
        frame.end = frame.begin + (frame.end - frame.begin + 1) // 2
        build(self, k, isa, frame)

    return faulty


@pytest.mark.parametrize(("spec", "op"), [(Norm, "norm"), (Gemv, "gemv")])
def test_a_kernel_that_leaves_items_out(
    spec: type[Spec], op: str, path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(spec, "build", _half_of_its_items(spec.build))
    found = kernels_of(path)
    wrong = {each.kernel for each in found.kernels if not each.passed}
    assert wrong
    assert {name.partition("_")[0] for name in wrong} == {op}
    assert not found.passed


def test_an_activation_off_by_a_thousandth(path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The kernels that have it are named, and no other."""
    silu = ACTIVATIONS["silu"]
    off = replace(silu, emit=lambda k, x: silu.emit(k, x) * (1 + 2.0**-10))
    monkeypatch.setitem(ACTIVATIONS, "silu", off)
    found = kernels_of(path)
    assert any("silu" in each.kernel for each in found.kernels)
    assert all(each.passed == ("silu" not in each.kernel) for each in found.kernels)


class Faulty(Cpu):
    """A machine whose arithmetic is wrong in one place: ``spoil`` changes a step's result."""

    spoil: Callable[[Any, Any, int, int], None]

    def _run(self, program: Any, steps: range, times: list[float] | None, stoppable: bool) -> bool:
        for step in steps:
            super()._run(program, range(step, step + 1), times, False)
            type(self).spoil(self, program, step, self.n_threads)
        return True

    def ready(self, plan: Any, arena: Any, inputs: Any) -> Any:
        program: Any = super().ready(plan, arena, inputs)
        program.plan = plan
        program.arena = arena
        return program


@pytest.fixture
def spoiled(monkeypatch: pytest.MonkeyPatch) -> Callable[[Any], None]:
    """Let every CPU device be a Faulty one with this ``spoil``."""

    def use(spoil: Any) -> None:
        monkeypatch.setattr(Faulty, "spoil", staticmethod(spoil), raising=False)
        monkeypatch.setattr("treadle.devices.cpu.device.Cpu", Faulty)

    return use


def test_a_fault_in_a_later_layer_alone_is_in_the_text(
    path: Path, spoiled: Callable[[Any], None]
) -> None:
    def spoil(device: Cpu, program: Any, step: int, n_threads: int) -> None:
        of = program.plan.steps[step]
        if of.label == "L1.ffn.down":
            (y,) = of.writes
            at = program.plan.offsets[y]
            program.arena.bytes[at : at + 32].view(np.float32)[:] = 3.0

    spoiled(spoil)
    with treadle.load(path, **SMALL) as model:
        report = check_model(model, quick=True)
    # The first layer's steps stand for those of all layers, which have the same kernels.
    assert all(each.passed for each in report.kernels)
    assert report.text is not None
    assert report.text.problem
    assert "differ" in report.text.problem or "token" in report.text.problem
    assert report.as_dict()["verdict"] == "failed"


def test_the_first_wrong_value_is_told(path: Path, spoiled: Callable[[Any], None]) -> None:
    def spoil(device: Cpu, program: Any, step: int, n_threads: int) -> None:
        of = program.plan.steps[step]
        if of.label == "L0.ffn.down":
            (y,) = of.writes
            at = program.plan.offsets[y] + 4 * 5
            program.arena.bytes[at : at + 4].view(np.float32)[:] = 1e3

    spoiled(spoil)
    found = kernels_of(path)
    wrong = [each for each in found.kernels if not each.passed]
    assert {each.label for each in wrong} == {"L0.ffn.down"}
    for each in wrong:
        assert each.n_wrong == 1
        assert each.first_wrong is not None
        assert each.first_wrong.where == "y: row 0, column 5"
        assert each.first_wrong.found == 1e3
        assert abs(each.first_wrong.expected) < 100
    assert wrong[0].kernel in found.failures[0]
    assert "y: row 0, column 5: 1000, expected" in found.failures[0]


def test_bits_that_depend_on_threads(path: Path, spoiled: Callable[[Any], None]) -> None:
    """The lowest bit of one logit, on two threads."""

    def spoil(device: Cpu, program: Any, step: int, n_threads: int) -> None:
        of = program.plan.steps[step]
        if of.label == "output" and n_threads == 2:
            (y,) = of.writes
            at = program.plan.offsets[y] + 4 * 7
            program.arena.bytes[at : at + 4].view(np.uint32)[:] ^= 1

    spoiled(spoil)
    with treadle.load(path, **SMALL) as model:
        problem = check_threads(model, quick=True).problem
    assert problem.startswith("2 threads give other bits than 1: the prompt's result, value 7: ")


def test_a_model_with_states(tiny: WriteTiny) -> None:
    report = kernels_of(tiny("mamba2", "F32"))
    assert report.failures == []
    assert any(each.kernel.startswith("mamba2") for each in report.kernels)


def test_a_recurrence_that_leaves_items_out(
    tiny: WriteTiny, monkeypatch: pytest.MonkeyPatch
) -> None:
    from treadle.kernels.recurrent.gates import Rates

    monkeypatch.setattr(Rates, "build", _half_of_its_items(Rates.build))
    wrong = {each.kernel for each in kernels_of(tiny("mamba2", "F32")).kernels if not each.passed}
    assert {name.partition("_")[0] for name in wrong} == {"rates"}


def test_a_kernel_that_is_not_compiled(path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    from treadle.errors import CompileError

    def build(self: Norm, k: Builder, isa: Isa, frame: Frame) -> None:
        raise CompileError("norm: LLVM does not know this")

    with treadle.load(path, **SMALL) as model:
        monkeypatch.setattr(Norm, "build", build)
        monkeypatch.setenv("TREADLE_COMPILE_PROCESSES", "1")
        report = check_model(model, quick=True)
    assert "kernels: norm: LLVM does not know this" in report.failures
    assert not report.passed
