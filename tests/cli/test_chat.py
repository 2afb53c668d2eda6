from __future__ import annotations

import json
from pathlib import Path
from typing import Any, cast

import pytest

from tests.cli.conftest import Run
from tests.cli.fake import FakeGeneration, FakeModel
from treadle.cli.commands.chat import Chat, note
from treadle.cli.conversation import Conversation
from treadle.errors import FileError, TemplateError


class Script:
    """Entries given beforehand; an exception among them is raised."""

    def __init__(self, *entries: str | type[BaseException]) -> None:
        self.entries = list(entries)
        self.n_discarded = 0

    def read(self) -> str:
        if not self.entries:
            raise EOFError
        entry = self.entries.pop(0)
        if isinstance(entry, str):
            return entry
        raise entry

    def discard(self) -> None:
        self.n_discarded += 1


def test_lines_of_a_pipe_are_messages(run: Run, model: FakeModel, gguf: str) -> None:
    ran = run("chat", gguf, "--system", "Be brief.", stdin="hi\nfirst\\\nsecond\n\n/undo\n")
    assert ran.code == 0
    assert ran.out == "the quick brown fox\n" * 2
    assert "4 tokens, 12.0 tokens/s; prompt 10, 20.0 tokens/s; context 15 of 64" in ran.err
    assert "undone; 2 messages" in ran.err
    asked = [call[1] for call in model.calls if call[0] == "chat"]
    assert [message["content"] for message in asked[1]] == [
        "Be brief.",
        "hi",
        "the quick brown fox",
        "first\nsecond",
    ]


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
    ran = run("chat", gguf, "--load", "", stdin="ho\n")
    assert (ran.code, "an empty name" in ran.err) == (1, True)
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
    assert "Ctrl-D exits." in captured.err
    assert "last answer: 2 tokens" in captured.err


def test_a_damaged_picture_does_not_end_the_chat(
    model: FakeModel, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """Attaching reads only its header, so the damage is found when the message is sent."""
    answered = model.chat

    def refuse(messages: list[dict[str, Any]], **settings: Any) -> Any:
        if messages[-1]["content"] == "hi":
            raise FileError("damaged: cut", path="cat.png")
        return answered(messages, **settings)

    monkeypatch.setattr(model, "chat", refuse)
    conversation = Conversation()
    Chat(cast(Any, model), conversation).run(Script("hi", "ho"), interactive=True)
    assert "cat.png: damaged: cut" in capsys.readouterr().err
    assert [message["content"] for message in conversation.messages] == ["ho", model.text]


def test_ctrl_c_before_the_first_word_takes_the_message_back(model: FakeModel) -> None:
    model.interrupt_at = 0
    conversation = Conversation()
    Chat(cast(Any, model), conversation).run(Script("hi"), interactive=True)
    assert conversation.messages == []


def test_ctrl_c_takes_the_bar_of_compiling_off_the_screen(model: FakeModel) -> None:
    class Bar:
        n_closed = 0

        def close(self) -> None:
            self.n_closed += 1

    bar = Bar()
    model.interrupt_at = 0
    Chat(cast(Any, model), Conversation(), cast(Any, bar)).run(Script("hi"), interactive=True)
    assert bar.n_closed == 1


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
    assert ran.err.count("treadle: error: ") == 1
    assert "discarded. /undo or /clear frees some of it, /set when_full drop removes" in ran.err


@pytest.mark.parametrize(
    ("when", "remedy"), [("refuse", "/undo or /clear"), ("drop", "The next message drops")]
)
def test_an_answer_that_fills_the_context(
    run: Run, model: FakeModel, gguf: str, when: str, remedy: str
) -> None:
    model.n_ctx = 4
    ran = run("chat", gguf, "--when-full", when, stdin="hi\n")
    assert ran.out == "the quick\n"
    assert f"the context is full: the answer is cut off here. {remedy}" in ran.err


def asked(model: FakeModel) -> list[list[str]]:
    """What the model was asked, each time that it answered."""
    calls = [call for call in model.calls if call[0] == "chat"]
    return [[message["content"] for message in call[1]] for call in calls]


FOX = "the quick brown fox"  # 19 of the fake's tokens


def test_a_full_context_drops_the_oldest_turns(run: Run, model: FakeModel, gguf: str) -> None:
    """160 tokens, a quarter is 40: the fifth message makes 140 of them used, so that half of the
    context is freed: two turns remain of four.
    """
    model.n_ctx = 160
    lines = [f"question {i}:" for i in range(5)]
    ran = run("chat", gguf, "--when-full", "drop", "--system", "Be brief.", stdin="\n".join(lines))
    assert (ran.code, ran.out) == (0, f"{FOX}\n" * 5)
    assert ran.err.count("the context is full: the oldest 4 messages were removed") == 1
    assert ["Be brief.", lines[2], FOX, lines[3], FOX, lines[4]] in asked(model)
    assert "prompt 79," in ran.err.splitlines()[-1]  # that one: 80 tokens, of which one was cached
    assert asked(model)[3] == [
        "Be brief.",
        lines[0],
        FOX,
        lines[1],
        FOX,
        lines[2],
        FOX,
        lines[3],
    ]


def test_dropping_can_be_asked_for_live_and_keeps_what_is_saved(
    run: Run, model: FakeModel, gguf: str, tmp_path: Path
) -> None:
    model.n_ctx = 64
    record = tmp_path / "talk.json"
    lines = ["a" * 20, "b" * 20, "c" * 20, "/set when-full drop", "d" * 20, "e" * 20]
    ran = run("chat", gguf, stdin="\n".join([*lines, f"/save {record}"]))
    assert ran.out == f"{FOX}\n" * 4
    assert ran.err.count("tokens do not fit") == 1
    assert ran.err.count("messages were removed") == 2
    said = [message["content"] for message in json.loads(record.read_text())["messages"]]
    assert said == [word for c in "abde" for word in (c * 20, FOX)]


def test_one_message_that_is_too_long_drops_nothing(run: Run, model: FakeModel, gguf: str) -> None:
    model.n_ctx = 64
    ran = run("chat", gguf, "--when-full", "drop", stdin=f"hi\n{'x' * 70}\nho\n")
    assert ran.out == f"{FOX}\n" * 2
    assert "dropped" not in ran.err
    assert asked(model)[-1] == ["hi", FOX, "ho"]


def test_an_answer_cut_by_n_is_said(run: Run, model: FakeModel, gguf: str) -> None:
    assert "the answer is cut off at 2 tokens" in run("chat", gguf, "-n", "2", stdin="hi\n").err


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


def test_the_packaged_model_is_said_not_to_chat(run: Run, model: FakeModel) -> None:
    ran = run("chat", stdin="hello\n")
    assert (ran.code, ran.out) == (2, "")
    assert ran.err.startswith(
        "treadle: error: name a MODEL: the one that ships with treadle completes"
    )
    assert "treadle chat hf:" in ran.err
    assert "treadle run " in ran.err
    assert model.calls == []


def test_a_built_in_form_is_named_once(run: Run, model: FakeModel, gguf: str) -> None:
    assert "template" not in run("chat", gguf, stdin="hi\n").err
    model.template.builtin = "plain"
    err = run("chat", gguf, stdin="hi\nho\n").err
    assert err.count("story.gguf has no chat template: the built-in form 'plain' is used\n") == 1


def test_settings_reach_the_answers(run: Run, model: FakeModel, gguf: str, tmp_path: Path) -> None:
    grammar = tmp_path / "a.gbnf"
    grammar.write_text('root ::= "a"')
    lines = ["hi", "/set temperature 0.2", "/set stop x", "/set grammar none", "ho"]
    ran = run(
        "chat",
        gguf,
        "--stop",
        "END",
        "--grammar",
        str(grammar),
        "--temp",
        "0.5",
        stdin="\n".join(lines),
    )
    assert ran.code == 0
    first, second = (call[2] for call in model.calls if call[0] == "chat")
    assert (first["stop"], first["grammar"]) == (("END",), 'root ::= "a"')
    assert (second["stop"], second["grammar"]) == (("x",), None)
    assert [s["sampling"].temperature for s in (first, second)] == [0.5, 0.2]
    schema = ["--json-schema", str(grammar), "--grammar", str(grammar)]
    assert run("chat", gguf, *schema, stdin="hi\n").code == 2


@pytest.mark.parametrize("where", ["option", "command"])
def test_a_grammar_that_is_broken(run: Run, data: Path, tmp_path: Path, where: str) -> None:
    """At once, not at the first message; the settings stay as they were."""
    stories = str(data / "models" / "stories260K.gguf")
    path = tmp_path / "bad.gbnf"
    path.write_text('root ::= "a')
    if where == "option":
        ran = run("chat", stories, "--grammar", str(path), stdin="hi\n")
        assert (ran.code, ran.out) == (1, "")
    else:
        ran = run("chat", stories, "-n", "2", stdin=f"/set grammar {path}\nhi\n")
        assert (ran.code, len(ran.out) > 1) == (1, True)
    assert f"treadle: error: {path}: grammar, line 1" in ran.err


def test_a_setting_that_does_not_fit_the_vocabulary(run: Run, data: Path) -> None:
    stories = str(data / "models" / "stories260K.gguf")
    ran = run("chat", stories, "--logit-bias", "99999+1", stdin="hi\n")
    assert (ran.code, ran.out) == (2, "")


@pytest.mark.parametrize("line", ["/save /", "/load absent.json", "/rety", "/set temprature 1"])
def test_a_pipe_with_a_command_that_fails_exits_1(
    run: Run, model: FakeModel, gguf: str, line: str
) -> None:
    ran = run("chat", gguf, stdin=f"{line}\nhi\n")
    assert (ran.code, ran.out) == (1, f"{FOX}\n")  # the rest was done
    assert ran.err.startswith("treadle: error: ")


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
    assert capsys.readouterr().err.count("the message was discarded") == 2
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
