"""``treadle check``: its table, its JSON, its exit codes."""

from __future__ import annotations

import getpass
import json
import re
import socket
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from tests.cli.conftest import Run
from tests.conftest import WriteTiny
from treadle.cli.commands import check
from treadle.selftest import model_check
from treadle.selftest.kernel_check import KernelCheck, WrongValue
from treadle.selftest.model_check import CheckReport
from treadle.selftest.texts import TextCheck
from treadle.selftest.thread_check import ThreadCheck

RIGHT = KernelCheck(
    "norm_q8_k64", "L0.attn.norm", "1 text, 1 token", 64, 0, 0.5, 1e-3, 2e-3, 0, None, 0.1
)
WRONG = replace(
    RIGHT,
    kernel="gemv_Q4_K_q8_k256",
    label="L0.attn.qkv",
    error=7.5,
    n_wrong=3,
    first_wrong=WrongValue("y: row 1, column 2", 1.5, 1.25, 1e-3),
)
HERE = {
    "cpu": "A Processor\x1b",
    "architecture": "x86_64",
    "isa": "avx2",
    "device": "cpu",
    "threads": 2,
    "system": "Linux",
    "system_release": "6",
    "python": "CPython 3",
    "treadle": "0",
}


def report(*kernels: KernelCheck, threads: str = "") -> CheckReport:
    made = CheckReport(dict(HERE), {}, quick=True, kernels=[*kernels], cut=["nothing much"])
    made.threads = ThreadCheck((1, 2), 8, threads)
    made.text = TextCheck((1, 2, 3), "a\x1bb", 0.001)
    return made


@pytest.fixture
def found(monkeypatch: pytest.MonkeyPatch) -> list[CheckReport]:
    """The report that the next check gives."""
    reports: list[CheckReport] = []
    monkeypatch.setattr(check, "examine", lambda *args, **named: reports[0])
    return reports


def test_a_machine_that_is_right(run: Run, found: list[CheckReport]) -> None:
    found.append(report(RIGHT, replace(RIGHT, error=0.75)))
    ran = run("check")
    assert (ran.code, ran.err) == (0, "")
    lines = ran.out.splitlines()
    assert lines[0].startswith("A Processor\\x1b, avx2, 2 threads, Linux 6")
    (row,) = (line.split() for line in lines if line.startswith("norm_q8_k64"))
    assert row[1:4] == ["L0.attn.norm", "2", "128"]  # the batches and values of both
    assert row[-2:] == ["0.750", "ok"]
    assert "kernels: 1 kernels in 2 steps of batches: all as their twins" in lines
    assert "threads: the same bits on 1, 2" in lines
    assert any(line.startswith("text: 3 tokens, as the twins") for line in lines)
    assert "\x1b" not in ran.out
    assert "left out: nothing much" in lines
    assert lines[-1].startswith("passed in ")


def test_a_wrong_kernel_is_named(run: Run, found: list[CheckReport]) -> None:
    found.append(report(RIGHT, WRONG, threads="2 threads give other bits than 1: ..."))
    ran = run("check")
    assert ran.code == 1
    assert "gemv_Q4_K_q8_k256" in ran.out
    assert "7.500  WRONG" in ran.out
    said = (
        "wrong: kernel gemv_Q4_K_q8_k256 (L0.attn.qkv, 1 text, 1 token) is wrong: 3 of 64 values, "
        "the first at y: row 1, column 2: 1.5, expected 1.25 within 0.001"
    )
    lines = ran.out.splitlines()
    assert said in lines
    assert "wrong: 2 threads give other bits than 1: ..." in lines
    assert any("treadle check --json report.json" in line for line in lines)
    assert any("set TREADLE_ISA=" in line for line in lines)
    assert lines[-1].startswith("failed, in ")


@pytest.mark.parametrize(
    ("kernel", "verdict", "code"), [(RIGHT, "passed", 0), (WRONG, "failed", 1)]
)
def test_json(
    kernel: KernelCheck, verdict: str, code: int, run: Run, found: list[CheckReport], tmp_path: Path
) -> None:
    found.append(report(kernel))
    ran = run("check", "--json")
    assert ran.code == code
    made = json.loads(ran.out)
    assert (made["format"], made["verdict"]) == (1, verdict)
    assert made["kernels"][0]["passed"] == (verdict == "passed")
    to = tmp_path / "report.json"
    ran = run("check", "--json", str(to))
    assert ran.code == code
    assert json.loads(to.read_text()) == made
    assert kernel.kernel in ran.out  # the table


def test_json_before_the_model_does_not_write_over_it(
    run: Run, found: list[CheckReport], gguf: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    asked: list[Any] = []

    def examine(model: str | None, *_: Any, **named: Any) -> CheckReport:
        asked.append(model)
        return report(RIGHT)

    monkeypatch.setattr(check, "examine", examine)
    before = Path(gguf).read_bytes()
    assert run("check", "--json", gguf).code == 0
    assert asked == [gguf]
    assert Path(gguf).read_bytes() == before
    ran = run("check", "--json", "report.txt", gguf)
    assert (ran.code, ran.out) == (2, "")
    assert "must end in .json" in ran.err


def test_a_report_that_cannot_be_written(run: Run, tmp_path: Path) -> None:
    """Before anything is checked."""
    ran = run("check", "--json", str(tmp_path / "none" / "report.json"))
    assert (ran.code, ran.out) == (1, "")
    assert "does not exist" in ran.err


def test_a_whole_report_names_nobody(run: Run, tiny: WriteTiny, tmp_path: Path) -> None:
    """Neither files nor users nor hosts; and all parts are there."""
    path = tiny("llama", "Q8_0")
    ran = run("check", str(path), "--quick", "--json", "-c", "80", "-t", "2", "-v")
    assert ran.code == 0
    made = json.loads(ran.out)
    assert made["verdict"] == "passed"
    assert {k["kernel"].partition("_")[0] for k in made["kernels"]} >= {"embed", "norm", "gemv"}
    assert made["threads"]["counts"][:2] == [1, 2]
    assert made["speeds"] is None
    names = path.name, str(tmp_path), socket.gethostname(), getpass.getuser(), str(Path.home())
    for name in names:
        assert not re.search(rf"(?<!\w){re.escape(name)}(?!\w)", ran.out), name
    assert any("gemv_Q8_0" in line for line in ran.err.splitlines())  # named before it ran


@pytest.mark.usefixtures("small_buffers")
def test_the_packaged_model_and_its_speeds(run: Run) -> None:
    ran = run("check", "--json", "-t", "2")
    assert ran.code == 0
    made = json.loads(ran.out)
    assert made["text"]["known"]
    assert [each["kind"] for each in made["speeds"]["runs"]] == ["prompt", "text"]
    assert all(each["tokens_s"] > 0 and each["kernels"] for each in made["speeds"]["runs"])
    assert {"q8", "f32"} <= made["speeds"]["peaks"].keys()


def test_ctrl_c(run: Run, tiny: WriteTiny, monkeypatch: pytest.MonkeyPatch) -> None:
    """In the middle of a plan: no report, and 130."""

    def steps(*args: Any) -> Any:
        raise KeyboardInterrupt

    monkeypatch.setattr(model_check, "check_steps", steps)
    ran = run("check", str(tiny("llama", "F32")), "--quick", "-c", "64", "-t", "1")
    assert (ran.code, ran.out) == (130, "")
