"""What is said where there is no emulator, and what the linker of objects refuses."""

from __future__ import annotations

from pathlib import Path

import pytest

from bench.kernel_study import elf
from tests.emulated import guest
from tests.emulated.rows import EMULATED
from treadle.jit.compile import emit_object

OUTSIDE = """
declare void @elsewhere()
define void @f() nounwind {
  call void @elsewhere()
  ret void
}"""


@pytest.mark.parametrize(("ci", "outcome"), [("", "Skipped"), ("true", "Failed")])
def test_an_absent_emulator_is_told(
    ci: str, outcome: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(guest, "FOLDER", tmp_path)
    monkeypatch.setenv("PATH", str(tmp_path))
    monkeypatch.setenv("CI", ci)
    row = EMULATED["portable_riscv64"]
    with pytest.raises(BaseException, match=r"qemu-riscv64 is absent: tools/fetch_emu") as told:
        row.guest()
    assert told.typename == outcome


@pytest.mark.parametrize("name", ["portable_aarch64", "portable_riscv64"])
def test_a_function_that_is_nowhere_is_named(name: str) -> None:
    with pytest.raises(KeyError, match="elsewhere is defined nowhere"):
        elf.place(emit_object(OUTSIDE, EMULATED[name].isa), 0x1000)


def test_a_target_out_of_reach_is_refused() -> None:
    with pytest.raises(AssertionError, match="is too far for 26 bits"):
        elf.place(
            emit_object(OUTSIDE, EMULATED["portable_aarch64"].isa), 0x1000, {"elsewhere": 1 << 40}
        )
