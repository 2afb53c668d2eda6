"""What CPUID answers, by machine code."""

from __future__ import annotations

import platform
import sys

import pytest

from treadle.system import SYSTEM, cpuid

pytestmark = pytest.mark.skipif(
    platform.machine() != "x86_64" or sys.platform != "linux", reason="x86-64 on Linux"
)


def test_it_describes_this_cpu() -> None:
    text = cpuid.cpuid_text(SYSTEM.load_code)
    vendor = "".join(
        bytes.fromhex(f"{int(text.split()[i], 16):08x}")[::-1].decode() for i in (0, 2, 1)
    )
    with open("/proc/cpuinfo") as file:
        lines = (line.partition(":") for line in file.read().split("\n\n")[0].splitlines())
    about = {name.strip(): value.strip() for name, _, value in lines}
    assert vendor == about["vendor_id"]
    ecx, edx = (int(word, 16) for word in text.split()[4:6])
    flags = about["flags"].split()
    for bit, name in ((25, "sse"), (26, "sse2"), (15, "cmov")):
        assert (name in flags) == bool(edx >> bit & 1)
    for bit, name in ((12, "fma"), (28, "avx"), (23, "popcnt")):
        assert (name in flags) == bool(ecx >> bit & 1)


def test_another_answer_is_another_cpu(monkeypatch: pytest.MonkeyPatch) -> None:
    """As under valgrind, where /proc/cpuinfo is that of the CPU below."""
    here = SYSTEM.cpu_description()
    assert here is not None
    assert here == SYSTEM.cpu_description()
    monkeypatch.setattr(cpuid, "CODE", cpuid.CODE.replace(b"\x0f\xa2", b"\x31\xdb"))  # xor ebx, ebx
    assert SYSTEM.cpu_description() not in (here, None)


def test_code_that_cannot_be_loaded() -> None:
    assert cpuid.cpuid_text(lambda code, n_fixed: None) == ""
