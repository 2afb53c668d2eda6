from __future__ import annotations

import json
from pathlib import Path
from typing import Any, cast

import pytest

from tests.cli.conftest import Run
from tests.cli.fake import FakeGeneration, FakeModel
from treadle.cli.chat import Chat, note
from treadle.cli.conversation import Conversation
from treadle.errors import TemplateError


class Script:
    """Entries given beforehand; an exception among them is raised."""

    def __init__(self, *entries: str | type[BaseException]) -> None:
        self.entries = list(entries)

    def read(self) -> str:
        if not self.entries:
            raise EOFError
        entry = self.entries.pop(0)
        if isinstance(entry, str):
            return entry
        raise entry


def test_lines_of_a_pipe_are_messages(run: Run, model: FakeModel, gguf: str) -> None:
    ran = run("chat", gguf, "--system", "Be brief.", stdin="hi\nfirst\\\nsecond\n\n/undo\n")
    assert ran.code == 0
    assert ran.out == "the quick brown fox\n" * 2
    assert "4 tokens, 12.0 tokens/s; read 10, 20.0 tokens/s; context 15 of 64" in ran.err
    assert "undone; 2 messages" in ran.err
    asked = [call[1] for call in model.calls if call[0] == "chat"]
    assert [message["content"] for message in asked[1]] == [
        "Be brief.", "hi", "the quick brown fox", "first\nsecond",
    ]  # fmt: skip


def test_one_session_serves_all_turns(run: Run, model: FakeModel, gguf: str) -> None:
    run("chat", gguf, "-n", "2", "--temp", "0", stdin="hi\nho\n")
    settings = [call[2] for call in model.calls if call[0] == "chat"]
    assert settings[0]["session"] is settings[1]["session"]
    assert settings[0]["max_tokens"] == 2
    assert settings[0]["sampling"].greedy


def test_a_saved_conversation_goes_on(
    run: Run, model: FakeModel, gguf: str, tmp_path: Path
) -> None:
    record = tmp_path / "talk.json"
    run("chat", gguf, stdin=f"hi\n/save {record}\n")
    assert len(json.loads(record.read_text())["messages"]) == 2
    model.calls.clear()
    run("chat", gguf, "--load", str(record), stdin="ho\n")
    asked = next(call[1] for call in model.calls if call[0] == "chat")
    assert [message["content"] for message in asked] == ["hi", "the quick brown fox", "ho"]


def test_a_saved_conversation_that_is_not_there_is_an_error(
    run: Run, model: FakeModel, gguf: str
) -> None:
    ran = run("chat", gguf, "--load", "absent.json", stdin="ho\n")
    assert (ran.code, ran.out) == (1, "")
    assert ran.err == "treadle: error: absent.json: No such file or directory\n"


def test_ctrl_c_stops_the_answer_and_not_the_program(
    model: FakeModel, capsys: pytest.CaptureFixture[str]
) -> None:
    model.interrupt_at = 2
    conversation = Conversation()
    Chat(cast(Any, model), conversation).run(
        Script("hi", KeyboardInterrupt, "/stats"), interactive=True
    )
    captured = capsys.readouterr()
    assert captured.out == "the quick\n"
    assert conversation.messages[-1] == {"role": "assistant", "content": "the quick"}
    assert "Ctrl-D leaves." in captured.err
    assert "last answer: 2 tokens" in captured.err


def test_ctrl_c_before_the_first_word_takes_the_message_back(model: FakeModel) -> None:
    model.interrupt_at = 0
    conversation = Conversation()
    Chat(cast(Any, model), conversation).run(Script("hi"), interactive=True)
    assert conversation.messages == []


def test_ctrl_c_ends_a_chat_that_nobody_types(run: Run, model: FakeModel, gguf: str) -> None:
    model.interrupt_at = 1
    ran = run("chat", gguf, stdin="hi\nho\n")
    assert (ran.code, ran.out) == (130, "the")


def test_a_full_context_is_said_and_the_message_taken_back(
    run: Run, model: FakeModel, gguf: str
) -> None:
    model.n_ctx = 40
    ran = run("chat", gguf, stdin=f"hi\n{'x' * 50}\nho\n")
    assert ran.code == 0
    assert ran.out == "the quick brown fox\n" * 2
    assert "71 tokens do not fit in a context of 40" in ran.err
    assert "/undo" in ran.err


def test_an_answer_that_fills_the_context(run: Run, model: FakeModel, gguf: str) -> None:
    model.n_ctx = 4
    ran = run("chat", gguf, stdin="hi\n")
    assert ran.out == "the quick\n"
    assert "the context is full" in ran.err


def test_a_template_that_refuses_does_not_end_the_chat(
    run: Run, model: FakeModel, gguf: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    def refuse(*args: object, **settings: object) -> None:
        raise TemplateError("roles must alternate")

    monkeypatch.setattr(FakeModel, "chat", refuse)
    ran = run("chat", gguf, stdin="hi\nho\n")
    assert (ran.code, ran.out) == (1, "")  # nothing was answered at all
    assert ran.err == "treadle: error: roles must alternate\n" * 2
    assert run("chat", gguf, stdin="/help\n").code == 0


def test_prefill_is_shown_as_part_of_the_answer(run: Run, model: FakeModel, gguf: str) -> None:
    assert run("chat", gguf, stdin="/prefill So, \nhi\n").out == "So,the quick brown fox\n"


def test_leaving_ends_it(run: Run, model: FakeModel, gguf: str) -> None:
    assert run("chat", gguf, stdin="/quit\nhi\n").out == ""


def test_a_failed_retry_costs_no_answer(
    model: FakeModel, capsys: pytest.CaptureFixture[str]
) -> None:
    conversation = Conversation()
    chat = Chat(cast(Any, model), conversation)
    chat.run(Script("hi"), interactive=True)
    before = list(conversation.messages)
    model.interrupt_at = 0
    chat.run(Script("/retry", "/swap"), interactive=True)
    assert capsys.readouterr().err.count("the conversation is as it was before") == 2
    model.n_ctx = 1
    chat.run(Script("/retry", "/swap"), interactive=True)
    assert conversation.messages == before


def test_the_last_token_takes_no_room(run: Run, model: FakeModel, gguf: str) -> None:
    def over(self: FakeModel, ids: list[int], settings: object) -> FakeGeneration:
        return FakeGeneration(["a", "b", "c"], ids, self.n_ctx + 1, 0.0)

    model.n_ctx = 4
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(FakeModel, "answer", over)
        assert "context 4 of 4\n" in run("chat", gguf, stdin="hi\n").err


@pytest.mark.parametrize("name", ["NO_COLOR", "TERM"])
def test_remarks_are_plain_where_escapes_are_not_wanted(
    name: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.delenv("NO_COLOR", raising=False)
    monkeypatch.setenv("TERM", "xterm")
    monkeypatch.setattr("sys.stderr.isatty", lambda: True)
    note("hello")
    monkeypatch.setenv(name, "dumb")
    note("hello")
    assert capsys.readouterr().err == "\x1b[2mhello\x1b[0m\nhello\n"


def test_bytes_that_are_no_text_do_not_end_the_chat(run: Run, model: FakeModel, gguf: str) -> None:
    ran = run("chat", gguf, stdin=b"hi \xff\nho\n")
    assert (ran.code, ran.out) == (0, "the quick brown fox\n" * 2)
    asked = next(call[1] for call in model.calls if call[0] == "chat")
    assert asked[0]["content"] == "hi \ufffd"
