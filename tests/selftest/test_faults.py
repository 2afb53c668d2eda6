"""The check finds what is wrong, and names it: each test injects one fault."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

import treadle
from tests.conftest import WriteTiny
from tests.selftest.checks import SMALL, kernels_of
from treadle.jit.language import Builder, Isa
from treadle.kernels.activations import ACTIVATIONS
from treadle.kernels.elementwise.elementwise import Norm
from treadle.kernels.matmul.gemv import Gemv
from treadle.kernels.spec import Frame, Spec
from treadle.selftest.model_check import check_model

# Kernels are compiled anew in each.
pytestmark = [pytest.mark.slow, pytest.mark.usefixtures("own_cache")]

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
