"""The studied kernels in qemu: right at every VLEN, and counted exactly."""

from __future__ import annotations

from dataclasses import dataclass, replace

import numpy as np
import pytest

from bench.kernel_study.emulator import Emulator, EmulatorError
from bench.kernel_study.rows import ScaleRow, VecDotF16
from bench.kernel_study.sweep import (
    KERNELS,
    LENGTHS,
    Kernel,
    emulate,
    emulated_cpu,
    numbers,
    rv64gcv,
)
from tests.emulated.rows import EMULATED
from treadle.isa.isa import Isa
from treadle.jit.language import Builder, Val


@pytest.fixture
def qemu() -> str:
    """Its path; the test is skipped without it, and fails under CI."""
    return EMULATED["rvv128"].guest().command[0]


@pytest.mark.parametrize("kernel", KERNELS, ids=lambda kernel: kernel.name)
def test_right_at_every_length(kernel: Kernel, qemu: str) -> None:
    """The largest setting of each kernel."""
    spec = max(kernel.specs, key=lambda s: (s.products(rv64gcv(256), 1024), s.setting))
    (found,) = emulate(replace(kernel, specs=(spec,)), 256, LENGTHS, qemu, None)
    assert found.wrong == dict.fromkeys(LENGTHS)
    assert found.instructions
    assert found.spills is not None


def test_the_count_is_that_of_single_steps(qemu: str) -> None:
    """With one instruction a block every execution is a line of the log."""
    spec = VecDotF16(2, 2)
    isa = rv64gcv(256)
    cpu = emulated_cpu(256)
    case = spec.case(isa, 1024, np.random.default_rng(0))
    single = Emulator(qemu, cpu, ("-one-insn-per-tb",))
    counts = [
        machine.run(spec, isa, case.arrays, numbers(case), count=True).instructions
        for machine in (Emulator(qemu, cpu), single)
    ]
    assert counts[0] == counts[1]
    # 16 rounds of 13 instructions, and what is before and behind them.
    assert counts[0] is not None
    assert 16 * 13 < counts[0] < 16 * 13 + 100


def test_the_best_has_fewest_instructions_of_the_published_settings(qemu: str) -> None:
    """More registers a vector: fewer instructions, at any VLEN."""
    specs = tuple(VecDotF16(lmul, 2) for lmul in (1, 2, 4))
    counts = [f.instructions for f in emulate(Kernel("", specs), 256, (), qemu, None)]
    assert None not in counts
    assert counts == sorted(counts, key=lambda n: -(n or 0))


@dataclass(frozen=True)
class OneTooMany(ScaleRow):
    """Writes a vector behind the buffer."""

    def body(self, k: Builder, isa: Isa, x: Val, y: Val, out: Val, n: Val) -> None:
        super().body(k, isa, x, y, out, n + self.lanes(isa))


@dataclass(frozen=True)
class OneTooFew(ScaleRow):
    """Leaves the last vector alone."""

    def body(self, k: Builder, isa: Isa, x: Val, y: Val, out: Val, n: Val) -> None:
        super().body(k, isa, x, y, out, n - self.lanes(isa))


@pytest.mark.parametrize(
    ("spec", "why"), [(OneTooMany(), "outside every buffer"), (OneTooFew(), "not ")]
)
def test_a_wrong_kernel_is_told(spec: ScaleRow, why: str, qemu: str) -> None:
    (found,) = emulate(Kernel("scale_f16", (spec,)), 256, (), qemu, None)
    assert why in str(found.wrong[256])
    assert not found.is_right


def test_a_cpu_without_the_vectors_is_told(qemu: str) -> None:
    spec = ScaleRow()
    isa = rv64gcv(256)
    case = spec.case(isa, 1024, np.random.default_rng(0))
    with pytest.raises(EmulatorError, match="status -4"):
        Emulator(qemu, "rv64,v=false").run(spec, isa, case.arrays, numbers(case))
