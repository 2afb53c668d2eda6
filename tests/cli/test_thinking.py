"""Reasoning in ``treadle chat``: folded to a line, or shown; never part of the answer."""

from __future__ import annotations

import json
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import pytest

from tests.cli.conftest import Run
from tests.cli.fake import FakeModel
from tests.cli.test_chat import Script
from treadle.cli.commands.chat import Chat
from treadle.cli.conversation import Conversation

THOUGHTFUL = SimpleNamespace(builtin=None, source="{{ '</think>' }}", tool_source="", preserve=None)
TEXT = "<think>\nfirst then second </think>\n\nforty two"


@pytest.fixture
def thinker(model: FakeModel) -> FakeModel:
    model.template = THOUGHTFUL
    model.text = TEXT
    return model


def test_reasoning_is_no_part_of_the_answer(
    run: Run, thinker: FakeModel, gguf: str, tmp_path: Path
) -> None:
    record = tmp_path / "talk.json"
    ran = run("chat", gguf, stdin=f"hi\n/save {record}\nho\n")
    assert (ran.code, ran.out) == (0, "forty two\n" * 2)
    assert ran.err.count("thought for 4 tokens\n") == 2
    assert "first" not in ran.err
    assert json.loads(record.read_text())["messages"][1]["content"] == "forty two"
    asked = [call[1] for call in thinker.calls if call[0] == "chat"]
    assert [message["content"] for message in asked[1]] == ["hi", "forty two", "ho"]


def test_a_prompt_may_have_opened_it(run: Run, thinker: FakeModel, gguf: str) -> None:
    thinker.text = "first </think> forty two"
    thinker.opening = "<assistant><think>\n"
    assert run("chat", gguf, stdin="hi\n").out == " forty two\n"


@pytest.mark.parametrize("how", ["option", "setting"])
def test_it_can_be_shown(how: str, run: Run, thinker: FakeModel, gguf: str) -> None:
    """Standard output has the answer alone, all the same."""
    if how == "option":
        ran = run("chat", gguf, "--show-reasoning", stdin="hi\n")
    else:
        ran = run("chat", gguf, stdin="/set show_reasoning on\nhi\n")
    assert ran.out == "forty two\n"
    assert "first then second \n" in ran.err
    assert "thought for" not in ran.err


def test_without_marks_in_the_template_nothing_is_reasoning(
    run: Run, thinker: FakeModel, gguf: str
) -> None:
    thinker.template = SimpleNamespace(builtin=None, source="", tool_source="", preserve=None)
    ran = run("chat", gguf, stdin="hi\n")
    assert ran.out == f"{TEXT}\n"
    assert "thought" not in ran.err


def test_marks_that_are_control_tokens_are_in_no_text(
    run: Run, thinker: FakeModel, gguf: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """So an answer that could not be told from reasoning is shown."""
    monkeypatch.setattr(FakeModel, "detokenize", lambda self, ids, special=False: "<think>")
    thinker.text = "forty two"
    assert run("chat", gguf, stdin="hi\n").out == "forty two\n"


def test_a_grammar_holds_from_the_first_token_on(
    run: Run, thinker: FakeModel, gguf: str, tmp_path: Path
) -> None:
    grammar = tmp_path / "g.gbnf"
    grammar.write_text('root ::= "x"')
    assert run("chat", gguf, "--grammar", str(grammar), stdin="hi\n").out == f"{TEXT}\n"


class Terminal:
    """Standard output and error on one terminal."""

    def __init__(self, patch: pytest.MonkeyPatch) -> None:
        patch.delenv("NO_COLOR", raising=False)
        patch.setenv("TERM", "xterm")
        for name in ("stdout", "stderr"):
            patch.setattr(f"sys.{name}.isatty", lambda: True)


def talk(model: FakeModel, *entries: Any) -> Conversation:
    conversation = Conversation()
    Chat(cast(Any, model), conversation).run(Script(*entries), interactive=True)
    return conversation


def test_a_terminal_counts_while_it_comes(
    thinker: FakeModel, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    Terminal(monkeypatch)
    talk(thinker, "hi")
    captured = capsys.readouterr()
    again = "\r\x1b[2K\x1b[2m"
    lines = [f"{again}thinking … {n} tokens\x1b[0m" for n in (2, 3)]
    assert "".join(lines) in captured.err
    assert f"{again}thought for 4 tokens\x1b[0m\n" in captured.err
    assert captured.out == "forty two\n"


def test_a_terminal_shows_it_dim(
    thinker: FakeModel, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    Terminal(monkeypatch)
    thinker.text = "<think>\nfirst \x1b[2J second </think>\n\nforty two"
    talk(thinker, "/set show_reasoning on", "hi")
    captured = capsys.readouterr()
    assert captured.out == "\x1b[2mfirst \\x1b[2J second\n\x1b[0m\nforty two\n"


def test_ctrl_c_while_it_thinks_takes_the_message_back(
    thinker: FakeModel, capsys: pytest.CaptureFixture[str]
) -> None:
    thinker.interrupt_at = 2
    assert talk(thinker, "hi").messages == []
    captured = capsys.readouterr()
    assert "thought for 2 tokens\nstopped" in captured.err


def test_ctrl_c_behind_it_keeps_what_was_said(thinker: FakeModel) -> None:
    thinker.interrupt_at = 3
    thinker.text = "<think>\na </think>\n\nforty two more"
    assert talk(thinker, "hi").messages[-1]["content"] == "forty two"
