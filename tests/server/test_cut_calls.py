"""Answers with calls that the limit of tokens cuts: whole, they say what their streams come to, for
every row, in every protocol. ``tests/chat/tools/test_scanner.py`` cuts each row's text at every
character.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from typing import Any

import pytest
from jiter import from_json

import treadle
from tests.chat.tools.families import ARGUMENTS, BEFORE, FAMILIES, TOOLS, row
from tests.server.conftest import running
from tests.server.direct import DirectClient
from tests.server.test_openai import post, stream
from tests.server.test_responses import named
from treadle.chat.template.template import ChatTemplate
from treadle.chat.tools import TemplateDialect, ToolCallFormat
from treadle.server.app import build_app
from treadle.server.requests.request_stream import OutputStream
from treadle.server.requests.service import Service

CHAT = "/v1/chat/completions"
RESPONSES = "/v1/responses"
MESSAGES = "/v1/messages"
HI: list[Any] = [{"role": "user", "content": "hi"}]
Said = tuple[str, Any]  # "text" or a tool's name; the text, or arguments
Found = tuple[list[Said], list[Said], str]  # whole; streamed; why it ends


@pytest.fixture(scope="module")
def served(model: treadle.Model) -> Iterator[tuple[Service, DirectClient]]:
    with running(model) as service, DirectClient(build_app(service)) as client:
        yield service, client


class Scribe:
    """Stands for the engine's thread: writes ``ids`` into every text. Of a stream one at a time; of
    a whole answer all at once, which it must not show.
    """

    def __init__(self) -> None:
        self.ids: list[int] = []

    def add(self, outputs: Iterable[OutputStream]) -> None:
        """See EngineThread."""
        for output in outputs:
            self._write(output, iter(self.ids))

    def _write(self, output: OutputStream, ids: Iterator[int]) -> None:
        output.answer.push(next(ids, None))
        while not output.stream.is_streamed and not output.answer.done:
            output.answer.push(next(ids, None))
        output.stream.wakeup.notify()
        if not output.answer.done:
            output.stream.loop.call_soon(self._write, output, ids)


def chat(client: DirectClient, n: int, *, forced: bool) -> Found:
    """What an answer of at most ``n`` tokens says."""
    functions = [{"name": name, "parameters": schema} for name, schema in TOOLS.items()]
    body: dict[str, Any] = {"messages": HI, "max_tokens": n}
    body["tools"] = [{"type": "function", "function": function} for function in functions]
    body["tool_choice"] = "required" if forced else "auto"
    choice = post(client, CHAT, **body)["choices"][0]
    message = choice["message"]
    whole: list[Said] = [("text", message["content"])] if message["content"] else []
    for call in message.get("tool_calls", []):
        whole.append((call["function"]["name"], call["function"]["arguments"]))
    *chunks, _ = stream(client, CHAT, **body)
    told: list[Said] = []
    content = ""
    for chunk in chunks:
        delta = chunk["choices"][0]["delta"]
        content += delta.get("content") or ""
        for call in delta.get("tool_calls", []):
            if "id" in call:
                told.append((call["function"]["name"], ""))
            else:
                told[-1] = told[-1][0], told[-1][1] + call["function"]["arguments"]
    assert chunks[-1]["choices"][0]["finish_reason"] == choice["finish_reason"]
    told = [("text", content), *told] if content else told
    return whole, told, choice["finish_reason"]


def responses(client: DirectClient, n: int, *, forced: bool) -> Found:
    """See ``chat``."""
    body: dict[str, Any] = {"input": "hi", "max_output_tokens": n}
    body["tools"] = [
        {"type": "function", "name": name, "parameters": schema} for name, schema in TOOLS.items()
    ]
    body["tool_choice"] = "required" if forced else "auto"

    def said(item: Any) -> Said:
        if item["type"] == "function_call":
            return item["name"], item["arguments"]
        return "text", item["content"][0]["text"]

    found = post(client, RESPONSES, **body)
    events = named(client.post(RESPONSES, json={**body, "stream": True}).text)
    told: list[Said] = []
    for name, data in events:
        if name == "response.output_item.added":
            told.append((data["item"].get("name", "text"), ""))
        elif name.endswith(".delta"):
            told[-1] = told[-1][0], told[-1][1] + data["delta"]
    last = events[-1][1]["response"]
    assert [said(item) for item in last["output"]] == told
    assert last["status"] == found["status"]
    return [said(item) for item in found["output"]], told, found["status"]


def messages(client: DirectClient, n: int, *, forced: bool) -> Found:
    """See ``chat``. Inputs are objects; of a stream, what Anthropic's client reads."""
    body: dict[str, Any] = {"messages": HI, "max_tokens": n}
    body["tools"] = [{"name": name, "input_schema": schema} for name, schema in TOOLS.items()]
    body["tool_choice"] = {"type": "any" if forced else "auto"}
    found = post(client, MESSAGES, **body)
    whole = [(b.get("name", "text"), b.get("input", b.get("text"))) for b in found["content"]]
    events = named(client.post(MESSAGES, json={**body, "stream": True}).text)
    told: list[Said] = []
    for name, data in events:
        if name == "content_block_start":
            told.append((data["content_block"].get("name", "text"), ""))
        elif name == "content_block_delta":
            delta = data["delta"]
            text = delta.get("text", delta.get("partial_json"))
            told[-1] = told[-1][0], told[-1][1] + text
        elif name == "message_delta":
            assert data["delta"]["stop_reason"] == found["stop_reason"]

    def read(name: str, text: str) -> Said:
        if name == "text":
            return name, text
        return name, from_json(text.encode(), partial_mode=True) if text else {}

    return whole, [read(name, text) for name, text in told], found["stop_reason"]


WAYS = [(chat, False), (chat, True), (responses, False), (messages, True)]


def limits(name: str, ask: Callable[..., Found], forced: bool, n: int) -> list[int]:
    """Where an answer of ``n`` tokens is cut: at every eighth limit a free one in chat; the other
    ways share out as many, by rows in other turns, and each way has the answer's end and the whole.
    All read what one scanner gives, whose own tests cut each row everywhere, so what goes wrong for
    a protocol shows in other rows, too. Every limit in every way takes sixteen times as long.
    """
    way = WAYS.index((ask, forced))

    def turn(i: int) -> int:
        """Which way meets a limit; none of them: 4."""
        eighth, i = divmod(i + len(name), 8)
        return {0: 0, 4: 1 + eighth % 3}.get(i, 4)

    return [i for i in range(1, n + 2) if i >= n or turn(i) == way]


ENDS = {
    chat: ("length", "tool_calls"),
    responses: ("incomplete", "completed"),
    messages: ("max_tokens", "tool_use"),
}


def stand_for(
    scribe: Scribe,
    service: Service,
    own: ToolCallFormat,
    begun: str,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """The scribe writes the answers of a model that speaks as a row has it."""
    template = ChatTemplate(f"{{% for m in messages %}}{{{{ m.content }}}}{{% endfor %}}{begun}")
    dialect = TemplateDialect(row=own, channels=own.channels, writes_calls=True, shows_tools=True)
    monkeypatch.setitem(service.model.__dict__, "template", template)
    monkeypatch.setitem(service.__dict__, "dialect", dialect)
    monkeypatch.setattr(service.engine, "add", scribe.add)
    monkeypatch.setattr(service.engine, "wake", lambda: None)  # it has nothing to do


@pytest.mark.slow
@pytest.mark.parametrize(("ask", "forced"), WAYS)
@pytest.mark.parametrize("name", FAMILIES)
def test_at_any_limit(
    name: str,
    ask: Callable[..., Found],
    forced: bool,
    served: tuple[Service, DirectClient],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    (service, client), own, scribe = served, row(name), Scribe()
    before = "" if forced else BEFORE.get(name, "so " if own.trigger else "")
    several = ask is chat and bool(FAMILIES[name].several)  # how calls follow is not a protocol's
    text = before + (FAMILIES[name].several if several else FAMILIES[name].f)
    begun = own.open if own.content else ""  # the prompt begins a call
    stand_for(scribe, service, own, begun, monkeypatch)
    # <|end|> ends the packaged vocabulary's texts. Here it is a mark, so it must be spelt.
    scribe.ids = service.model.tokenizer.encode_plain(text.removeprefix(begun), start=False)
    marks = (own.sign, own.channels.end if own.channels else "")
    seen = list[Said]()
    for n in limits(name, ask, forced, len(scribe.ids)):
        if service.model.tokenizer.decode(scribe.ids[:n], start=False).endswith("\ufffd"):
            continue  # within a character of a mark, which is one token where it is used
        whole, told, end = ask(client, n, forced=forced)
        assert whole == told, n
        assert end == ENDS[ask][n > len(scribe.ids)], n
        for kind, said in whole:
            if kind == "text" and own.trigger:  # a beginning of a mark may be text
                mark = "" if said == "so" else said.removeprefix("so ")
                assert not forced
                assert not mark or any(m.startswith(mark) and m != mark for m in marks)
        kinds = [kind for kind, _ in whole if kind != "text"]
        assert kinds[: len(seen)] == [kind for kind, _ in seen], n
        seen = [part for part in whole if part[0] != "text"]
    assert [kind for kind, _ in seen] == ["f", "g"][: 1 + several]
    assert (seen[0][1] if ask is messages else from_json(seen[0][1].encode())) == ARGUMENTS


@pytest.mark.parametrize("ask", [chat, responses, messages])
@pytest.mark.parametrize(
    ("name", "text", "told"),
    [
        ("hermes", "so <tool", [("text", "so <tool")]),
        ("hermes", 'so <tool_call>\n{"name": "f"', [("text", "so "), ("f", "")]),
        ("json", '{"name": "f", "para', [("f", "")]),
        ("json", '{"name": "nob', [("text", '{"name": "nob')]),
        ("tags", "<tool_call>\n<function=f>", [("f", "")]),
        ("python", "so <|tool_call", [("text", "so <|tool_call")]),
        ("kimi", "so <|tool_calls_sect", [("text", "so <|tool_calls_sect")]),
        ("solar", "<", []),
    ],
)
def test_what_is_held_back_is_told_at_the_end(
    name: str,
    text: str,
    told: list[Said],
    ask: Callable[..., Found],
    served: tuple[Service, DirectClient],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """What may have been the beginning of a mark or of a call, which nothing follows."""
    (service, client), scribe = served, Scribe()
    stand_for(scribe, service, row(name), "", monkeypatch)
    scribe.ids = service.model.tokenizer.encode_plain(text, start=False)
    inputs = [(kind, {} if ask is messages and kind == "f" else said) for kind, said in told]
    assert ask(client, len(scribe.ids), forced=False) == (inputs, inputs, ENDS[ask][0])
