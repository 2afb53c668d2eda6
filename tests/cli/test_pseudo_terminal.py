"""``treadle chat`` as a real process on a real (pseudo-)terminal, under a shell with jobs."""

from __future__ import annotations

import fcntl
import os
import re
import select
import signal
import struct
import subprocess
import sys
import termios
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
PROGRAM = """
import os, sys
from tests.cli.fake import FakeModel, install
from treadle.cli import run_process
words = " ".join(f"word{i}" for i in range(100_000))  # minutes
install(FakeModel(text=os.environ["FAKE_TEXT"] or words, n_ctx=10_000_000, pause_s=0.001))
run_process()
"""
PATIENCE_S = 120  # a machine may be busy; nothing waits so long that is not broken
ESCAPE = re.compile(r"\x1b(?:\[[0-9;?]*[ -/]*[@-~]|\][^\x07]*\x07)")


class Terminal:
    """A chat, what it has shown, and its keyboard."""

    def __init__(self, gguf: str, *options: str, text: str = "", term: str = "xterm") -> None:
        self.shown = ""
        # The other end stays open here, too: a terminal that nobody has open is an error to read.
        self.master, self.slave = os.openpty()
        self.resize(60)
        name = os.ttyname(self.slave)
        # The leader of a new session gets the first terminal that it opens.
        command = [sys.executable, "-m", "tests.cli.jobs", sys.executable, "-c", PROGRAM]
        self.process = subprocess.Popen(
            ["sh", "-c", f'exec "$@" <>{name} >&0 2>&0', "sh", *command, "chat", gguf, *options],
            cwd=ROOT,
            start_new_session=True,
            env=os.environ | {"FAKE_TEXT": text, "TERM": term, "PROMPT_TOOLKIT_NO_CPR": "1"},
        )

    def resize(self, columns: int) -> None:
        fcntl.ioctl(self.master, termios.TIOCSWINSZ, struct.pack("HHHH", 24, columns, 0, 0))

    def type(self, keys: str) -> None:
        os.write(self.master, keys.encode())

    def until(self, text: str) -> str:
        """What was shown up to the next ``text`` and with it, without escapes."""
        end = time.monotonic() + PATIENCE_S
        while text not in self.shown:
            ready, _, _ = select.select([self.master], [], [], max(end - time.monotonic(), 0))
            assert ready, f"never shown: {text!r} in {self.shown[:500]!r} ... {self.shown[-500:]!r}"
            shown = self.shown + os.read(self.master, 65536).decode("utf-8", "replace")
            self.shown = ESCAPE.sub("", shown).replace("\r\n", "\n")
        before, _, self.shown = self.shown.partition(text)
        return before + text

    def job(self) -> int:
        """The process group in front: the chat's own process leads it."""
        return os.tcgetpgrp(self.master)

    def close(self) -> None:
        if self.process.poll() is None:
            os.killpg(self.process.pid, signal.SIGKILL)
            self.process.wait()
        os.close(self.master)
        os.close(self.slave)


Open = Callable[..., Terminal]


@pytest.fixture
def chat(gguf: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Open]:
    monkeypatch.setenv("XDG_STATE_HOME", str(tmp_path))
    monkeypatch.delenv("NO_COLOR", raising=False)
    opened: list[Terminal] = []

    def start(*options: str, text: str = "", term: str = "xterm") -> Terminal:
        opened.append(Terminal(gguf, *options, text=text, term=term))
        opened[-1].until(">")
        return opened[-1]

    yield start
    for terminal in opened:
        terminal.close()


@pytest.mark.parametrize("term", ["xterm", "dumb"])
def test_keys_typed_meanwhile_are_shown_at_the_next_prompt(chat: Open, term: str) -> None:
    terminal = chat("-n", "400", term=term)
    terminal.type("hello\r")
    terminal.until("word20")
    terminal.type("MEANWHILE")
    assert "MEANWHILE" not in terminal.until("400 tokens,")
    if term == "dumb":  # which cannot draw what it was not shown; but it is read
        terminal.until(">")
        terminal.type("\r")
        terminal.until("400 tokens,")
        terminal.type("/save\r")
        terminal.until("/save needs a file name")
    else:
        terminal.until("MEANWHILE")
        terminal.type("\x15\x04")
        assert "ENDED 0 echo=True lines=True" in terminal.until("lines=True")


@pytest.mark.slow
@pytest.mark.parametrize("term", ["xterm", "dumb"])
@pytest.mark.parametrize("interrupt", [True, False])
def test_lines_that_came_at_once(chat: Open, term: str, interrupt: bool) -> None:
    """Without a mark of a paste each is a message; Ctrl-C drops those that wait."""
    terminal = chat("-n", "300000" if interrupt else "3", term=term)
    terminal.type("first\rsecond\r/set top_k 7\r")
    if interrupt:
        terminal.until("word20")
        terminal.type("\x03")
        terminal.until("tokens,")
        terminal.until(">")
        terminal.type("/stats\r")
        assert "1 answer: generated" in terminal.until("answer: generated")[-30:]
        terminal.type("/set top_k\r")
        assert "(default" not in terminal.until("top_k                 40")
    else:
        for _ in range(2):
            terminal.until("3 tokens,")
        terminal.until("top_k                 7")


def test_ctrl_z_in_an_answer(chat: Open) -> None:
    terminal = chat()
    terminal.type("hello\r")
    terminal.until("word20")
    terminal.type("\x1a")
    assert "STOPPED echo=True lines=True" in terminal.until("lines=True")
    terminal.type("fg\n")
    terminal.until("fg\n")
    terminal.until("word")  # the answer goes on
    first = int(terminal.until("\n").split()[0])
    terminal.until(f"word{first + 50}")
    terminal.type("HIDDEN")
    assert "HIDDEN" not in terminal.until(f"word{first + 500}")
    terminal.type("\x03")
    terminal.until("context")
    terminal.until(">")
    terminal.type("/quit\r")
    terminal.until("ENDED 0 echo=True lines=True")


def test_ctrl_z_at_the_prompt(chat: Open) -> None:
    terminal = chat("-n", "5")
    terminal.type("hel")
    terminal.until("hel")
    terminal.type("\x1a")
    assert "STOPPED echo=True lines=True" in terminal.until("lines=True")
    terminal.type("fg\n")
    terminal.until("hel")
    terminal.type("lo\r")
    terminal.until("word4\n")
    terminal.until(">")
    terminal.type("\x04")
    terminal.until("ENDED 0 echo=True lines=True")


@pytest.mark.slow
@pytest.mark.parametrize("answering", [True, False])
def test_sigterm_leaves_the_terminal_as_it_was(chat: Open, answering: bool) -> None:
    terminal = chat()
    if answering:
        terminal.type("hello\r")
        terminal.until("word20")
    os.kill(terminal.job(), signal.SIGTERM)
    terminal.until("ENDED 143 echo=True lines=True")


def test_ctrl_backslash_leaves_the_terminal_as_it_was(chat: Open) -> None:
    terminal = chat()
    terminal.type("hello\r")
    terminal.until("word20")
    terminal.type("\x1c")
    terminal.until(f"ENDED -{int(signal.SIGQUIT)} echo=True lines=True")


def test_an_error_nobody_expected_leaves_the_terminal_as_it_was(chat: Open) -> None:
    terminal = chat(text="word !bug")
    terminal.type("hello\r")
    terminal.until("ENDED 1 echo=True lines=True")


def test_words_wrap_at_spaces_after_a_resize_too(chat: Open) -> None:
    terminal = chat()
    terminal.type("hello\r")
    terminal.until("word0")
    lines = terminal.until("word300").split("\n")[1:-1]
    assert len(lines) > 20
    assert all(40 < len(line.rstrip()) <= 60 for line in lines)
    assert all(re.fullmatch(r"(word\d+ ?)+", line) for line in lines)
    terminal.until("\n")  # the rest of a line may be as short as one after the resize
    terminal.resize(30)
    before = (terminal.until("\n").rstrip() for _ in range(5000))  # what was written by then
    assert any(len(line) <= 30 for line in before)
    lines = [terminal.until("\n").rstrip() for _ in range(50)]
    assert all(15 < len(line) <= 30 for line in lines)


def test_control_characters_of_an_answer_do_nothing(chat: Open) -> None:
    terminal = chat(text="a\x1b]0;title\x07 b\x1b[2J c\rd")
    terminal.type("hello\r")
    assert terminal.until("d\n").endswith("a\\x1b]0;title\\x07 b\\x1b[2J c\\rd\n")


def test_markdown_where_it_is_asked_for(chat: Open) -> None:
    text = "# Title\n\nSome **bold** words.\n\n- one\n- two\n\n```python\nx = 1\n```\nThe end."
    terminal = chat(text=text)
    terminal.type("hello\r")
    assert "Some **bold** words." in terminal.until("The end.\n")
    terminal.until(">")
    terminal.type("/set markdown on\r")
    terminal.until("(default off)")
    terminal.type("hello\r")
    shown = terminal.until("The end.")
    assert "Some bold words." in shown
    assert " • one" in shown
    assert "```" not in shown
    assert " x = 1" in shown
