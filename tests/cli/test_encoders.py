"""Commands about steps and speeds, of a model that writes no text and has learned 64 positions."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from tests.cli.conftest import Run
from treadle.cli.commands import plan

PEAKS = {"bandwidth": 1e9, "int8": 1e12, "bf16": 1e12, "f32": 1e11}


@pytest.fixture
def bert(data: Path) -> str:
    return str(data / "arch" / "bert.gguf")


def test_plan(run: Run, bert: str) -> None:
    """Of what it gives: vectors."""
    ran = run("plan", bert, "-p", "16")
    assert (ran.code, ran.err) == (0, "")
    assert "pool.unit" in ran.out


def test_profile(run: Run, bert: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Measurements like more room than it has: they take what there is."""
    monkeypatch.setattr(plan, "measured_peaks", lambda model, progress: PEAKS)
    ran = run("plan", bert, "-p", "16", "--profile", "--json")
    assert (ran.code, ran.err) == (0, "")
    made = json.loads(ran.out)
    assert made["steps"][-1]["label"] == "pool.unit"
    assert made["whole_s"] > 0
    ran = run("plan", bert, "-p", "16", "--profile", "-c", "65")
    assert ran.code == 1
    assert "context=65: the model has only 64 learned positions" in ran.err


def test_what_it_has_not(run: Run, bert: str) -> None:
    ran = run("plan", bert, "-p", "16", "-d", "4")
    assert ran.code == 2
    assert "with no tokens before it" in ran.err
    ran = run("bench", bert)
    assert ran.code == 1
    assert (
        "the model does not generate text: time its steps with "
        "`treadle plan MODEL -p 128 --profile`" in ran.err
    )
