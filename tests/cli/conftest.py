"""Fixtures for the commands: a model without weights, and the command line itself."""

from __future__ import annotations

import io
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest

import treadle
from tests.cli.fake import FakeModel
from treadle.cli import main


@dataclass(frozen=True)
class Ran:
    """What a command did."""

    code: int
    out: str
    err: str


Run = Callable[..., Ran]


@pytest.fixture
def model(monkeypatch: pytest.MonkeyPatch) -> FakeModel:
    """The model that every command loads."""
    fake = FakeModel()

    def load(path: Path | None, **settings: Any) -> FakeModel:
        fake.path = path or fake.path
        settings.pop("progress")
        fake.calls.append(("load", path and str(path), settings))
        return fake

    monkeypatch.setattr(treadle, "load", load, raising=False)
    return fake


@pytest.fixture
def gguf(tmp_path: Path) -> str:
    """The path of a file that can be named as MODEL; the fake model never opens it."""
    path = tmp_path / "story.gguf"
    path.write_bytes(b"GGUF")
    return str(path)


@pytest.fixture
def run(capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> Run:
    """Run the command line in this process."""

    def run_command(*args: str, stdin: str | bytes = "") -> Ran:
        octets = stdin if isinstance(stdin, bytes) else stdin.encode()
        monkeypatch.setattr("sys.stdin", io.TextIOWrapper(io.BytesIO(octets), "utf-8"))
        code = main(list(args))
        captured = capsys.readouterr()
        return Ran(code, captured.out, captured.err)

    return run_command


@pytest.fixture
def terminal(monkeypatch: pytest.MonkeyPatch) -> int:
    """Standard output is a terminal of so many columns."""
    monkeypatch.setenv("COLUMNS", "80")
    monkeypatch.setenv("NO_COLOR", "1")
    monkeypatch.setattr("treadle.cli.ui.table.terminal_width", lambda: 80)
    return 80
