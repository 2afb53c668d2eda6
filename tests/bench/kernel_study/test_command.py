"""The study's command: tables, JSON, pictures of made-up counts and times; what is refused."""

from __future__ import annotations

import json
import xml.etree.ElementTree as ET
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest

from bench.kernel_study import clock, command, emulator, sweep
from bench.kernel_study.command import main
from bench.kernel_study.rows import VecDotF16
from bench.kernel_study.sweep import Kernel, SweepResult
from treadle.isa.portable import PORTABLE

QEMU = ("--emulator", "qemu")
NAMES = [kernel.name for kernel in sweep.KERNELS]
Run = Callable[..., "Ran"]


@dataclass(frozen=True)
class Ran:
    """What the command did."""

    code: int
    out: str
    err: str


@pytest.fixture
def run(capsys: pytest.CaptureFixture[str]) -> Run:
    """Run the command in this process."""

    def run_command(*args: str) -> Ran:
        with pytest.raises(SystemExit) as left:
            main(args)
        captured = capsys.readouterr()
        assert isinstance(left.value.code, int)
        return Ran(left.value.code, captured.out, captured.err)

    return run_command


@pytest.fixture
def programs(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A folder with an emulator of the test's own, and none on PATH."""
    folder = tmp_path / "bin"
    folder.mkdir()
    (folder / "qemu-riscv64").touch()
    monkeypatch.setenv("TREADLE_EMULATORS", str(tmp_path))
    monkeypatch.setenv("PATH", str(folder))
    return folder


@pytest.fixture
def counted(programs: Path, monkeypatch: pytest.MonkeyPatch) -> list[tuple[Any, ...]]:
    """What is asked for; the first setting takes most, and the others less and less."""
    asked: list[tuple[Any, ...]] = []

    def emulate(
        kernel: Kernel, vlen: int, lengths: tuple[int, ...], qemu: str, mca: str | None
    ) -> Iterator[SweepResult]:
        asked.append((kernel.name, vlen, lengths, qemu, mca))
        for i, spec in enumerate(kernel.specs):
            cycles = {"X60": 2000 - i, "P670": None} if mca else {}
            wrong = dict.fromkeys((128, 256))
            yield SweepResult(kernel.name, spec, 1024, 1024, wrong, 1000 - i, 0, cycles)

    monkeypatch.setattr(sweep, "emulate", emulate)
    return asked


def test_a_table_for_each_kernel(counted: list[tuple[Any, ...]], run: Run, programs: Path) -> None:
    done = run(*QEMU)
    assert done.code == 0, done.err
    assert [row[0] for row in counted] == NAMES
    assert counted[0][1:] == (256, sweep.LENGTHS, str(programs / "qemu-riscv64"), None)
    assert "llvm-mca is not installed, so cycles are missing" in done.err
    assert "isa rv64gcv, vlen 256, emulator qemu" in done.out
    line = next(line for line in done.out.splitlines() if line.startswith("LMUL 4 x 2, barrier"))
    assert " ".join(line.split()) == "LMUL 4 x 2, barrier 128 256 986 1.04 0 333 best"
    assert "cycles" not in done.out


def test_cycles_where_there_is_a_model(
    counted: list[tuple[Any, ...]], run: Run, programs: Path
) -> None:
    """A core that llvm-mca does not know has no column."""
    (programs / "llvm-mca").touch()
    done = run("vec_dot_f16", *QEMU, "--vlen", "512")
    assert done.code == 0, done.err
    assert [row[:2] for row in counted] == [("vec_dot_f16", 512)]
    assert counted[0][4] == str(programs / "llvm-mca")
    assert "X60 cycles" in done.out
    assert "P670" not in done.out
    (first,) = (line for line in done.out.splitlines() if line.startswith("LMUL 1 x 1 "))
    assert first.split()[-4:] == ["2000", "0.5", "1250", "375"]


def test_json(counted: list[tuple[Any, ...]], run: Run) -> None:
    said = json.loads(run("vec_dot_f16", *QEMU, "--json").out)
    assert (said["isa"], said["vlen"]) == ("rv64gcv", 256)
    first = said["settings"][0]
    assert first["fields"] == {"lmul": 1, "unroll": 1, "barrier": False}
    assert (first["instructions"], first["published_hot_ns"], first["best"]) == (1000, 375, False)
    assert sum(row["best"] for row in said["settings"]) == 1


def test_picture(counted: list[tuple[Any, ...]], run: Run, tmp_path: Path) -> None:
    path = tmp_path / "out.svg"
    assert run(*QEMU, "--plot", str(path)).code == 0
    text = "".join(ET.parse(path).getroot().itertext())
    assert all(f"{name}, " in text for name in NAMES)
    assert "LMUL 4 x 2, barrier: 986" in text
    assert "nan" not in text.lower().split()


def test_a_file_that_is_no_chart_is_kept(
    counted: list[tuple[Any, ...]], run: Run, tmp_path: Path
) -> None:
    notes = tmp_path / "notes"
    notes.write_text("notes")
    done = run(*QEMU, "--plot", str(notes))
    assert (done.code, notes.read_text(), counted) == (1, "notes", [])
    assert "is not a chart by treadle" in done.err


def test_a_wrong_kernel_fails(
    programs: Path, run: Run, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    def emulate(kernel: Kernel, *_: object) -> Iterator[SweepResult]:
        wrong = {128: None, 256: "out[3] is 1, not 2"}
        yield SweepResult(kernel.name, VecDotF16(), 1024, 1024, wrong, 10, 0)

    monkeypatch.setattr(sweep, "emulate", emulate)
    done = run("vec_dot_f16", *QEMU, "--plot", str(tmp_path / "out.svg"))
    assert done.code == 1
    assert "vec_dot_f16 computes wrong results at VLEN 256: out[3] is 1, not 2" in done.err
    assert "WRONG; right at 128" in done.out
    assert "best" not in done.out


def test_times_on_this_machine(run: Run, monkeypatch: pytest.MonkeyPatch) -> None:
    def measure(kernel: Kernel, isa: Any, repeat: int) -> list[SweepResult]:
        made = SweepResult(kernel.name, kernel.specs[0], 1024, 1024, {256: None})
        made.hot_ns = 291.25
        made.cold_ns = 1300.5
        made.best = True
        return [made]

    monkeypatch.setattr(clock, "measure", measure)
    done = run("vec_dot_f16", "--isa", "native")
    assert done.code == 0, done.err
    heads, line = done.out.splitlines()[-2:]
    assert heads.split("  ")[0] == "setting"
    assert line.split()[-4:] == ["291.2", "1300.5", "375", "best"]
    assert "instructions" not in heads


def test_hardware_that_is_none_is_refused(run: Run, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(command, "row_in_use", lambda: PORTABLE)
    done = run("--isa", "rv64gcv")
    assert done.code == 2
    assert "--emulator qemu counts rv64gcv's instructions" in done.err


def test_an_absent_emulator_is_told(
    run: Run, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("TREADLE_EMULATORS", str(tmp_path))
    monkeypatch.setenv("PATH", str(tmp_path))
    done = run(*QEMU)
    assert done.code == 1
    assert "qemu-riscv64 is absent" in done.err
    with pytest.raises(emulator.EmulatorError):
        emulator.find("qemu-riscv64")


@pytest.mark.parametrize(
    ("args", "why"),
    [
        (("--isa", "native", "--vlen", "256"), "--vlen needs --emulator"),
        (("--isa", "native", "--emulator", "qemu"), "--emulator needs --isa rv64gcv"),
        (("gemm", *QEMU), "'gemm' is not one of 'vec_dot_f16'"),
    ],
)
def test_options_that_do_not_fit(args: tuple[str, ...], why: str, run: Run) -> None:
    done = run(*args)
    assert done.code == 2
    assert why in done.err
