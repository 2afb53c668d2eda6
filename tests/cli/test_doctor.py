from __future__ import annotations

import json
from pathlib import Path

import pytest

from tests.cli.conftest import Run
from treadle.cli import doctor

REPORT = {
    "cpu": {"name": "A Processor\x1b", "features": ["avx2", "fma"], "missing": {}, "hybrid": False},
    "threads": 2,
    "kernel_cache": {"n_bytes": 2048, "kernels": 3},
    "peaks": {"read_bytes_s": 45e9, "q8_ops_s": 2.05e12, "processor_time_share": 0.5},
    "fallbacks": [],
    "notes": ["the cgroup allows 2 of the 8 processors"],
    "governor": None,
}


@pytest.fixture
def machine(monkeypatch: pytest.MonkeyPatch) -> list[str | None]:
    """The models that were asked about, on a machine that gives REPORT."""
    asked: list[str | None] = []

    def examine(model: str | None, progress: object) -> object:
        asked.append(model)
        return REPORT

    monkeypatch.setattr(doctor, "examine", examine)
    return asked


def test_the_report(run: Run, machine: list[str | None]) -> None:
    ran = run("doctor")
    assert (ran.code, ran.err) == (0, "")
    assert ran.out.splitlines() == [
        "cpu",
        "  name      A Processor\\x1b",
        "  features  avx2, fma",
        "  missing   none",
        "  hybrid    no",
        "threads       2",
        "kernel cache",
        "  n        2.0 KiB",
        "  kernels  3",
        "peaks",
        "  read            45.0 GB/s",
        "  q8              2.0 Top/s",
        "  processor time  50%",
        "fallbacks     none",
        "notes",
        "  the cgroup allows 2 of the 8 processors",
        "governor      none",
    ]


def test_json(run: Run, machine: list[str | None]) -> None:
    assert json.loads(run("doctor", "--json").out) == REPORT
    run("doctor", "model.gguf")
    assert machine == [None, "model.gguf"]


def test_a_real_machine_and_model(run: Run, data: Path) -> None:
    ran = run("doctor", str(data / "models" / "stories260K.gguf"), "--json")
    assert (ran.code, ran.err) == (0, "")
    report = json.loads(ran.out)
    assert report["threads"]["chosen"] >= 1
    assert report["peaks"]["f32_ops_s"] > 1e8
    assert report["peaks"]["read_bytes_s"] > 1e7
    assert report["model"]["size_bytes"] == 1185376
    assert 0 <= report["model"]["in_memory_bytes"] <= 1185376


def test_kernels_that_cannot_be_had(
    run: Run, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    from treadle.jit import kernel

    monkeypatch.setenv("TREADLE_CACHE", str(tmp_path))
    monkeypatch.setenv("TREADLE_NO_COMPILE", "1")
    monkeypatch.setattr(kernel, "_linked", {})
    ran = run("doctor", "--json")
    assert ran.code == 0
    report = json.loads(ran.out)
    assert "peaks" not in report
    assert "TREADLE_NO_COMPILE=1 forbids compiling" in report["warnings"][-1]


def test_a_model_that_is_not_there(run: Run, tmp_path: Path) -> None:
    ran = run("doctor", str(tmp_path / "absent.gguf"))
    assert (ran.code, ran.out) == (1, "")
    assert "no such file" in ran.err
