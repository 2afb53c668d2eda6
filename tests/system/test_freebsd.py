"""What FreeBSD tells, where ``test_elsewhere.py`` does not come by: fakes of its calls."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest

from treadle.isa import choose
from treadle.system import freebsd
from treadle.system.freebsd import FreeBSD

HWCAP = 25
HWCAP2 = 26


def telling(words: dict[int, int]) -> Any:
    """libc's elf_aux_info, of an auxiliary vector with these entries."""

    def elf_aux_info(entry: Any, found: Any, n_bytes: Any) -> int:
        assert n_bytes.value == 8
        if entry.value not in words:
            return 2  # ENOENT
        found._obj.value = words[entry.value]
        return 0

    return SimpleNamespace(elf_aux_info=elf_aux_info)


@pytest.mark.parametrize(
    ("words", "row"),
    [
        ({HWCAP: 0xFF}, "neon"),
        ({HWCAP: 0x10FFFF, HWCAP2: 0}, "neon_dotprod"),
        ({HWCAP: 0x10FFFF, HWCAP2: 0x6000}, "neon_bf16"),
        ({}, "portable"),
    ],
)
def test_an_arm_core_gets_its_row(
    words: dict[int, int], row: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("platform.machine", lambda: "arm64")
    monkeypatch.setattr(freebsd, "LIBC", telling(words))
    assert choose(frozenset(FreeBSD().cpu_features())).name == row


def test_x86_is_llvms(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("platform.machine", lambda: "amd64")
    monkeypatch.setattr(freebsd, "LIBC", None)
    assert FreeBSD().cpu_features() == set()


def test_without_a_set_of_processors_all_may_be_used(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(freebsd, "LIBC", SimpleNamespace(cpuset_getaffinity=lambda *_: -1))
    monkeypatch.setattr("os.cpu_count", lambda: 3)
    assert FreeBSD().affinity() == [0, 1, 2]
