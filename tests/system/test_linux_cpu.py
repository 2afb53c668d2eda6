"""What Linux tells of Arm and RISC-V CPUs, as tables and text."""

from __future__ import annotations

import pytest

from treadle.errors import UnsupportedError
from treadle.isa import choose
from treadle.system import linux_cpu
from treadle.system.linux_cpu import AT_HWCAP, AT_HWCAP2, of_hwcaps, of_isa_line, of_length

# The words that Linux gives on them.
A53 = {AT_HWCAP: 0xFF, AT_HWCAP2: 0}
N1 = {AT_HWCAP: 0x10FFFF, AT_HWCAP2: 0}
N2 = {AT_HWCAP: 0xEFFFFFFF, AT_HWCAP2: 0x77BF}
X60 = """processor : 0
hart : 0
isa : rv64imafdcv_zicbom_zicboz_zba_zbb_zbs_zfh_zvfh_zvkt_sscofpmf
mmu : sv39
"""


@pytest.mark.parametrize(
    ("words", "row"),
    [(A53, "neon"), (N1, "neon_dotprod"), (N2, "neon_bf16"), ({16: 0, 26: 0}, "portable")],
)
def test_an_arm_core_gets_its_row(words: dict[int, int], row: str) -> None:
    assert choose(frozenset(of_hwcaps(words.__getitem__))).name == row


@pytest.mark.parametrize(("answer", "bits"), [(-22, 0), (-1, 0), (64, 512), (1 << 17 | 32, 256)])
def test_a_streaming_vectors_length(
    answer: int, bits: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Flags beside it, or an error; matrix registers only by name, and only of 512 bits."""
    monkeypatch.setattr(linux_cpu, "_auxiliary", {**N2, AT_HWCAP2: 0xFFFFFF}.__getitem__)
    monkeypatch.setattr(linux_cpu, "_streaming_bits", lambda: linux_cpu.bits_in(answer))
    found = frozenset(linux_cpu.of_arm())
    assert {name for name in found if name.startswith("svl")} == ({f"svl{bits}"} if bits else set())
    assert choose(found).name == "neon_bf16"
    if bits == 512:
        assert choose(found, "sme").matrix
    else:
        with pytest.raises(UnsupportedError, match="does not support svl512"):
            choose(found, "sme")


@pytest.mark.parametrize(
    ("length", "row"),
    [(64, "portable"), (128, "rvv128"), (256, "rvv256"), (512, "rvv512"), (1024, "rvv512")],
)
def test_a_length_gets_its_row(length: int, row: str) -> None:
    assert choose(frozenset({"v"} | of_length(length))).name == row
    if length >= 128:
        assert choose(frozenset({"v", "zvfh"} | of_length(length))).name == f"{row}_zvfh"


def test_code_for_registers_of_one_length_runs_on_no_others() -> None:
    for length in (512, 1024):
        with pytest.raises(UnsupportedError, match="does not support vlen256"):
            choose(frozenset({"v"} | of_length(length)), "rvv256")


def test_the_isa_line_of_old_kernels() -> None:
    assert of_isa_line(X60) == {"v", "zba", "zbb", "zbs", "zfh", "zvfh"}
    assert of_isa_line(X60.replace("imafdcv_", "imafdc_")) == {"zba", "zbb", "zbs", "zfh", "zvfh"}
    assert of_isa_line("processor : 0\n") == set()


def test_hwprobe_goes_before_the_isa_line(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(linux_cpu, "_cpuinfo", lambda: X60)
    monkeypatch.setattr(linux_cpu, "_vector_bits", lambda: 256)
    monkeypatch.setattr(linux_cpu, "_hwprobe", lambda: 1 << 2 | 1 << 3)
    assert linux_cpu.of_riscv() == {"v", "zba", "zvl128b", "zvl256b", "vlen256"}
    monkeypatch.setattr(linux_cpu, "_hwprobe", lambda: None)
    assert {"v", "zvfh", "zvl256b"} <= linux_cpu.of_riscv()
    assert "zvl512b" not in linux_cpu.of_riscv()


def test_a_cpu_without_vectors_is_not_asked_for_their_length(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Its register does not exist there: to read it is an illegal instruction."""
    monkeypatch.setattr(linux_cpu, "_hwprobe", lambda: 1 << 3)
    monkeypatch.setattr(linux_cpu, "_vector_bits", None)
    assert linux_cpu.of_riscv() == {"zba"}


def test_machines_that_llvm_knows_cost_no_call(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("platform.machine", lambda: "x86_64")
    monkeypatch.setattr("ctypes.CDLL", None)
    assert linux_cpu.features() == set()
