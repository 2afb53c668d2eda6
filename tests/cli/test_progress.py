from __future__ import annotations

import io

import pytest

from treadle.cli.ui import progress
from treadle.cli.ui.progress import ProgressBar


class Terminal(io.StringIO):
    def isatty(self) -> bool:
        return True


def put_up_terminal(monkeypatch: pytest.MonkeyPatch, patience_s: float) -> Terminal:
    """Replace standard error (not in a fixture: pytest sets it anew between fixture and test)."""
    stderr = Terminal()
    monkeypatch.setattr("sys.stderr", stderr)
    monkeypatch.setenv("TERM", "xterm")
    monkeypatch.setattr(progress, "PATIENCE_S", patience_s)
    return stderr


def test_a_bar_on_a_terminal_comes_and_goes(monkeypatch: pytest.MonkeyPatch) -> None:
    terminal = put_up_terminal(monkeypatch, 0.0)
    with ProgressBar() as bar:
        bar("compile", 0, 40)
        bar("compile", 12, 40)
        bar("compile", 40, 40)
        assert "compiling kernels" in terminal.getvalue()
        assert terminal.getvalue().endswith("\x1b[2K")  # the line is cleared
        bar("downloading a.gguf", 1, 2_000_000)
        assert "2.0 MB" in terminal.getvalue()


def test_short_work_shows_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    terminal = put_up_terminal(monkeypatch, 3600.0)
    with ProgressBar() as bar:
        bar("compiling kernels", 0, 2)
        bar("compiling kernels", 1, 2)
        bar("compiling kernels", 2, 2)
    assert terminal.getvalue() == ""


def test_nothing_in_a_pipe(capsys: pytest.CaptureFixture[str]) -> None:
    with ProgressBar() as bar:
        bar("compiling kernels", 0, 2)
        bar("compiling kernels", 2, 2)
    captured = capsys.readouterr()
    assert (captured.out, captured.err) == ("", "")
