"""``treadle warm``: afterwards nothing is left to compile."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

import treadle
from tests.cli.conftest import Run
from tests.conftest import WriteTiny
from treadle.api.engine_plans import text_plans
from treadle.jit import cache, kernel


@pytest.fixture(autouse=True)
def folder(own_kernels: Path) -> Path:
    return own_kernels


@pytest.mark.slow
def test_every_plan_is_compiled(
    run: Run, tiny: WriteTiny, folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = str(tiny("llama", "F32"))
    given = (path, "--deterministic", "-c", "64", "-t", "2", "--json")  # few kernels
    ran = run("warm", *given)
    assert (ran.code, ran.err) == (0, "")
    report = json.loads(ran.out)
    with treadle.load(path, deterministic=True, context=64, threads=2) as model:
        specs = {spec.name for plan in text_plans(model) for spec in plan.lower().specs()}
        assert report.pop("isa") == model.isa.name
    assert specs <= {entry.name for entry in cache.entries()}
    assert report.pop("seconds") > 0.0
    n = report.pop("n_compiled")
    assert n >= len(specs)
    assert report == {"model": path, "n_cached": 0, "folder": str(folder)}

    monkeypatch.setattr(kernel, "_linked", {})
    monkeypatch.setenv("TREADLE_NO_COMPILE", "1")
    again = run("warm", *given[:-1])
    assert again.code == 0
    assert f"0 kernels compiled for {model.isa.name} in " in again.out
    assert f"{n} were there; they are in" in again.out


def test_nothing_can_be_stored(run: Run, tiny: WriteTiny, folder: Path) -> None:
    folder.mkdir()
    folder.chmod(0o777)
    ran = run("warm", str(tiny("llama", "F32")))
    assert (ran.code, ran.out) == (1, "")
    assert f"kernel cache {folder} is writable by other users" in ran.err


def test_options_that_exclude_each_other(run: Run, tmp_path: Path) -> None:
    ran = run("warm", "x.gguf", "--draft", "y.gguf", "--no-speculate")
    assert (ran.code, ran.out) == (2, "")
    assert "--no-speculate and --draft exclude each other" in ran.err
