from __future__ import annotations

import io
import signal
import stat
from collections.abc import Iterator
from pathlib import Path

import pytest
from prompt_toolkit.application import create_app_session
from prompt_toolkit.input import PipeInput, create_pipe_input
from prompt_toolkit.output import DummyOutput

from treadle.cli.ui import terminal
from treadle.cli.ui.terminal import Editor, KeyboardGuard, PipedLines, history_file, open_lines


@pytest.fixture
def state(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("XDG_STATE_HOME", str(tmp_path))
    return tmp_path


@pytest.fixture
def keyboard(state: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[PipeInput]:
    monkeypatch.setattr("prompt_toolkit.output.create_output", lambda stdout: DummyOutput())
    with create_pipe_input() as keys, create_app_session(input=keys, output=DummyOutput()):
        yield keys


def typed(keyboard: PipeInput, keys: str) -> str:
    keyboard.send_text(keys)
    return Editor(["undo", "retry"], KeyboardGuard()).read()


@pytest.mark.parametrize(
    ("keys", "entry"),
    [
        ("hello\r", "hello"),
        ("one\x1b\rtwo\r", "one\ntwo"),  # Alt-Enter
        ("one\\\rtwo\r", "one\ntwo"),  # a backslash, Enter
        ("\x1b[200~one\ntwo\nthree\x1b[201~\r", "one\ntwo\nthree"),  # a paste
        ("helo\x1b[Dl\r", "hello"),  # the left arrow
    ],
)
def test_keys(keyboard: PipeInput, keys: str, entry: str) -> None:
    assert typed(keyboard, keys) == entry


def test_history_goes_from_one_program_to_the_next(keyboard: PipeInput, state: Path) -> None:
    assert typed(keyboard, "first\r") == "first"
    assert typed(keyboard, "\x1b[A\r") == "first"  # the up arrow, in another editor
    path = state / "treadle" / "chat_history"
    assert "first" in path.read_text()
    assert stat.S_IMODE(path.stat().st_mode) == 0o600


def test_ctrl_d_and_ctrl_c(keyboard: PipeInput) -> None:
    with pytest.raises(EOFError):
        typed(keyboard, "\x04")
    with pytest.raises(KeyboardInterrupt):
        typed(keyboard, "half a line\x03")


def test_a_folder_that_cannot_be_written_costs_only_the_history(
    state: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (state / "treadle").touch()
    assert history_file() is None
    monkeypatch.delenv("XDG_STATE_HOME")
    monkeypatch.setenv("HOME", str(state / "home"))
    assert history_file() == state / "home" / ".local" / "state" / "treadle" / "chat_history"


def test_a_home_that_nobody_knows(state: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def unknown() -> Path:
        raise RuntimeError("Could not determine home directory.")

    monkeypatch.delenv("XDG_STATE_HOME")
    monkeypatch.setattr(Path, "home", unknown)
    assert history_file() is None


def test_a_terminal_without_escapes_gets_none(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("TERM", "dumb")
    monkeypatch.setattr("sys.stdin", io.StringIO("one\\\ntwo\n\nend\\"))
    lines = open_lines(["undo"], KeyboardGuard())
    assert [lines.read() for _ in range(3)] == ["one\ntwo", "", "end\n"]
    with pytest.raises(EOFError):
        lines.read()
    assert capsys.readouterr() == ("", ">   > >   > ")


def test_lines_of_a_pipe() -> None:
    lines = PipedLines(["one\n", "two\\\n", "\\\n", "three\r\n", "\n", "end\\"])
    assert [lines.read() for _ in range(4)] == ["one", "two\n\nthree", "", "end"]
    with pytest.raises(EOFError):
        lines.read()


def test_the_editor_is_only_imported_when_it_is_used() -> None:
    assert not hasattr(terminal, "PromptSession")


def test_without_a_terminal_the_keyboard_is_left_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    usual = signal.getsignal(signal.SIGTSTP)
    with open("/dev/null") as nothing:
        for stream in (io.StringIO(), nothing):  # no descriptor; no terminal
            monkeypatch.setattr("sys.stdin", stream)
            with KeyboardGuard() as keys, keys.lent(shown=True):
                assert signal.getsignal(signal.SIGTSTP) is usual
