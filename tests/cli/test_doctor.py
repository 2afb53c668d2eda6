from __future__ import annotations

import json
from types import SimpleNamespace

import pytest

import treadle.runtime
from tests.cli.conftest import Run

REPORT = {
    "cpu": {"name": "A Processor\x1b", "features": ["avx2", "fma"], "hybrid": False},
    "threads": 2,
    "fallbacks": [],
    "notes": ["the cgroup allows 2 of the 8 processors"],
    "bandwidth": None,
}


@pytest.fixture(autouse=True)
def machine(monkeypatch: pytest.MonkeyPatch) -> None:
    fake = SimpleNamespace(describe=lambda progress: REPORT)
    monkeypatch.setattr(treadle.runtime, "machine", fake, raising=False)


def test_the_report(run: Run) -> None:
    ran = run("doctor")
    assert (ran.code, ran.err) == (0, "")
    assert ran.out.splitlines() == [
        "cpu",
        "  name      A Processor\\x1b",
        "  features  avx2, fma",
        "  hybrid    no",
        "threads    2",
        "fallbacks  none",
        "notes",
        "  the cgroup allows 2 of the 8 processors",
        "bandwidth  none",
    ]


def test_json(run: Run) -> None:
    assert json.loads(run("doctor", "--json").out) == REPORT
