"""What an emulated CPU says of itself: to the system calls that treadle makes, in a guest, and to
``treadle doctor``, run there whole.
"""

from __future__ import annotations

import json
import os
import struct
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import pytest

from tests.emulated.foreign import run_python
from tests.emulated.guest import Guest
from tests.emulated.rows import EMULATED, SME, qemu
from treadle.isa import choose
from treadle.system import linux_cpu
from treadle.system.linux import Linux


@dataclass(frozen=True)
class Cpu:
    """One of qemu's: its architecture, what ``-cpu`` calls it, what it has and lacks (LLVM's
    names), and the row for it.
    """

    machine: str
    name: str
    has: str
    lacks: str
    row: str

    def guest(self) -> Guest:
        row = EMULATED[f"portable_{self.machine}"]
        return Guest([qemu(self.machine), "-cpu", self.name], row.isa)


def rv64(length: int, more: str = "") -> str:
    return f"rv64,v=true,vlen={length}{more}"


CPUS = [
    Cpu("aarch64", "cortex-a53", "neon", "dotprod fullfp16 sve", "neon"),
    Cpu("aarch64", "cortex-a76", "neon dotprod fullfp16", "i8mm bf16 sve", "neon_dotprod"),
    Cpu("aarch64", "neoverse-n1", "neon dotprod fullfp16", "i8mm bf16 sve", "neon_dotprod"),
    Cpu("aarch64", "neoverse-n2", "neon dotprod i8mm bf16 sve sve2", "sme", "neon_bf16"),
    Cpu("aarch64", SME, "neon dotprod i8mm bf16 sve sme svl512", "svl256", "neon_bf16"),
    Cpu("riscv64", "rv64,v=false", "", "v zvfh zvl128b", "portable"),
    Cpu("riscv64", rv64(128), "v vlen128 zvl128b", "zvfh zvl256b", "rvv128"),
    Cpu("riscv64", rv64(256, ",zvfh=true"), "v zvfh vlen256 zvl128b", "zvl512b", "rvv256_zvfh"),
    Cpu("riscv64", rv64(512), "v vlen512 zvl256b zvl512b", "zvfh zvl1024b", "rvv512"),
    Cpu("riscv64", rv64(1024, ",zvfh=true"), "v zvfh vlen1024 zvl512b", "", "rvv512_zvfh"),
]
ASKED = pytest.mark.parametrize("cpu", CPUS, ids=lambda cpu: cpu.name)

# With less to measure: an emulated peak says nothing, and vectors of 1024 bits are played byte by
# byte.
DOCTOR = """
from treadle.cli import main
from treadle.profiling import peaks

peaks.ROUNDS, peaks.BUFFER_BYTES = 10, (1 << 22, 1 << 22)
main(["doctor", "--json"])
"""
OPENAT = 56
READ = 63
PRCTL = 167
HWPROBE = 258
HERE = -100
CALL = """
define void @ask(ptr %answer, ptr %function, i64, i64, i64) nounwind {
  %got = call i64 %function()
  store i64 %got, ptr %answer
  ret void
}"""


def auxiliary(guest: Guest) -> dict[int, int]:
    """The auxiliary vector that the guest's system gave it."""
    path = guest.pages(4096)
    held = guest.pages(4096)
    path[:16] = np.frombuffer(b"/proc/self/auxv\0", np.uint8)
    fd = guest.system(OPENAT, HERE, path.ctypes.data, 0, 0)
    assert fd >= 0
    n_bytes = guest.system(READ, fd, held.ctypes.data, held.nbytes)
    return dict(struct.iter_unpack("<QQ", held[:n_bytes].tobytes()))


def hwprobe(guest: Guest) -> int | None:
    """As ``linux_cpu._hwprobe`` asks."""
    held = guest.pages(4096)
    pair = held[:16].view(np.uint64)
    pair[:] = linux_cpu.IMA_EXT_0, 0
    if guest.system(HWPROBE, held.ctypes.data, 1, 0, 0):
        return None
    return int(pair[1]) if pair[0] == linux_cpu.IMA_EXT_0 else None


def streaming_bits(guest: Guest) -> int:
    """As ``linux_cpu._streaming_bits`` asks."""
    return linux_cpu.bits_in(guest.system(PRCTL, linux_cpu.PR_SME_GET_VL, 0, 0))


def vector_bits(guest: Guest) -> int:
    """As ``linux_cpu._vector_bits`` asks."""
    code = guest.pages(4096)
    answer = guest.pages(4096)[:8].view(np.int64)
    code[: len(linux_cpu.VLENB)] = np.frombuffer(linux_cpu.VLENB, np.uint8)
    run = guest.function("ask", lambda: emit(guest))
    run(answer.ctypes.data, code.ctypes.data)
    return 8 * int(answer[0])


def emit(guest: Guest) -> bytes:
    from treadle.jit.compile import emit_object

    return emit_object(CALL, EMULATED[f"portable_{guest.arch}"].isa)


@ASKED
def test_features_are_those_of_the_cpu(cpu: Cpu, monkeypatch: pytest.MonkeyPatch) -> None:
    """By the calls of ``system/linux_cpu.py``, answered by the emulated system."""
    guest = cpu.guest()
    monkeypatch.setattr("platform.machine", lambda: cpu.machine)
    monkeypatch.setattr(linux_cpu, "_auxiliary", lambda n: auxiliary(guest).get(n, 0))
    monkeypatch.setattr(linux_cpu, "_streaming_bits", lambda: streaming_bits(guest))
    monkeypatch.setattr(linux_cpu, "_hwprobe", lambda: hwprobe(guest))
    monkeypatch.setattr(linux_cpu, "_vector_bits", lambda: vector_bits(guest))
    features = Linux().cpu_features()
    guest.close()
    assert features >= set(cpu.has.split())
    assert not features & set(cpu.lacks.split())
    assert choose(frozenset(features), None).name == cpu.row


@ASKED
def test_doctor(cpu: Cpu, tmp_path: Path) -> None:
    """Features, the row, cores and memory of this machine, and shares that are shares."""
    report = json.loads(run_python(cpu.machine, cpu.name, tmp_path / "cache", "-c", DOCTOR))
    told = report["cpu"]
    chosen = report["instruction_set"]
    assert told["architecture"] == cpu.machine
    known = {*told["used"], *told["unused"], *told["missing"]}
    assert {*told["used"], *told["unused"]} & known >= set(cpu.has.split()) & known
    assert set(told["missing"]) >= set(cpu.lacks.split()) & known
    assert chosen["chosen"] == cpu.row
    assert cpu.row in chosen["can_run"]
    n_here = len(os.sched_getaffinity(0))
    assert report["processors"]["allowed"] == n_here
    assert 1 <= report["threads"]["chosen"] <= n_here
    assert report["memory"]["total_bytes"] == os.sysconf("SC_PAGE_SIZE") * os.sysconf(
        "SC_PHYS_PAGES"
    )
    peaks = report["peaks"]
    assert 0 < peaks["processor_time_share"] <= 1
    assert min(peaks["q8_ops_s"], peaks["f32_ops_s"], peaks["read_bytes_s"]) > 0
    assert (peaks["bf16_ops_s"] is None) == (cpu.row != "neon_bf16")
