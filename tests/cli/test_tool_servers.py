"""``--mcp``: tools in ``treadle chat``, each call allowed by the user; options and their errors."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from tests.cli.conftest import Run
from tests.cli.fake import FakeGeneration, FakeModel
from tests.mcp.fake import FakeServers
from treadle.chat.tools import OutputPiece, ToolCall
from treadle.cli import tool_servers
from treadle.cli.tool_servers import ToolServerOptions, shortened
from treadle.errors import ContextFullError
from treadle.mcp.toolbox import REFUSED


class FakeReply(FakeGeneration):
    """An answer of words, and calls of tools behind them."""

    def __init__(self, text: str, *names: str) -> None:
        super().__init__([text], [1], 512, 0.0)
        self.calls = [ToolCall(f"c{i}", name, '{"n": 1}') for i, name in enumerate(names)]

    def parts(self) -> Iterator[OutputPiece]:
        for piece in self:
            yield OutputPiece("content", piece)
        for i, call in enumerate(self.calls):
            yield OutputPiece("call", "", call._replace(arguments=""), i)
            yield OutputPiece("arguments", call.arguments, None, i)


@pytest.fixture
def asked(model: FakeModel, monkeypatch: pytest.MonkeyPatch) -> list[Any]:
    """What the model is asked. It calls ``s__echo`` twice in turns, then answers."""
    servers = FakeServers(s=["echo"])
    asked: list[Any] = []

    def chat(messages: Any, **settings: Any) -> FakeReply:
        asked.append((list(messages), settings.get("tools")))
        n = sum(message["role"] == "tool" for message in messages)
        return FakeReply("Done.") if n % 2 == 0 and n else FakeReply("Well. ", "s__echo")

    monkeypatch.setattr(model, "chat", chat, raising=False)
    monkeypatch.setattr(ToolServerOptions, "open", lambda self: servers.toolbox(rounds=3))
    return asked


@pytest.mark.parametrize(
    ("lines", "results"),
    [
        ("hi\ny\nn\n", ["echo {'n': 1}", REFUSED]),
        ("hi\nalways\n", ["echo {'n': 1}", "echo {'n': 1}"]),
        ("hi\n", [REFUSED, REFUSED]),  # the end of input allows nothing
    ],
)
def test_each_call_is_allowed(
    lines: str, results: list[str], asked: list[Any], run: Run, gguf: str
) -> None:
    ran = run("chat", gguf, stdin=lines)
    assert (ran.code, ran.out) == (0, "Well. \nWell. \nDone.\n")
    messages, tools = asked[-1]
    assert tools[0]["function"]["name"] == "s__echo"
    assert [m["content"] for m in messages if m["role"] == "tool"] == results
    assert messages[1]["tool_calls"][0]["function"]["arguments"] == '{"n": 1}'
    assert 'run s__echo {"n": 1}? y(es), n(o), a(lways)' in ran.err
    assert ran.err.count("run s__echo") == (1 if "always" in lines else 2)


@pytest.mark.usefixtures("asked")
def test_the_last_answer_cannot_call(
    model: FakeModel, run: Run, gguf: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """After as many answers as the bounds allow."""
    choices: list[Any] = []

    def chat(messages: Any, **settings: Any) -> FakeReply:
        choices.append(settings.get("tool_choice"))
        return FakeReply("Done.") if choices[-1] == "none" else FakeReply("Well. ", "s__echo")

    monkeypatch.setattr(model, "chat", chat)
    ran = run("chat", gguf, stdin="hi\nalways\nagain\n")
    assert choices == [None, None, "none"] * 2
    assert (ran.code, ran.out) == (0, "Well. \nWell. \nDone.\n" * 2)


@pytest.mark.usefixtures("asked")
def test_a_message_is_discarded_with_its_calls(
    model: FakeModel, run: Run, gguf: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    roles: list[list[str]] = []

    def chat(messages: Any, **settings: Any) -> FakeReply:
        roles.append([message["role"] for message in messages])
        if roles[-1][-1] == "tool":
            raise ContextFullError("the result is too long")
        return FakeReply("Well. ", "s__echo")

    monkeypatch.setattr(model, "chat", chat)
    ran = run("chat", gguf, stdin="hi\nalways\nagain\n")
    assert roles == [["user"], ["user", "assistant", "tool"]] * 2
    assert ran.err.count("The message was discarded") == 2


def test_a_conversation_with_calls_is_saved(
    asked: list[Any], run: Run, gguf: str, tmp_path: Path
) -> None:
    file = tmp_path / "talk.json"
    run("chat", gguf, stdin=f"hi\na\n/save {file}\n")
    kept = json.loads(file.read_text())["messages"]
    assert [m["role"] for m in kept] == ["user", "assistant", "tool", "assistant", "tool",
                                         "assistant"]  # fmt: skip
    run("chat", gguf, "--load", str(file), stdin="again\n")
    assert asked[-1][0][: len(kept)] == kept


def test_options(run: Run, gguf: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    file = tmp_path / "mcp.json"
    ran = run("chat", gguf, "--mcp", str(file), stdin="")
    assert (ran.code, "mcp.json: No such file" in ran.err) == (1, True)
    file.write_text('{"mcpServers": {}}')
    monkeypatch.setattr(tool_servers, "find_spec", lambda name: None)
    ran = run("chat", gguf, "--mcp", str(file), stdin="")
    assert (ran.code, "pip install 'treadle[mcp]'" in ran.err) == (1, True)
    assert run("chat", gguf, "--mcp-timeout", "0", stdin="").code == 2


def test_what_is_shown_of_a_call() -> None:
    assert shortened("a\n  b\x1b") == "a b\\x1b"
    assert shortened("x" * 500) == "x" * 400 + "..."
