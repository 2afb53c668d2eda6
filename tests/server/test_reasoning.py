"""Reasoning and answers told apart in every protocol: whole, and streams of single tokens."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator
from typing import Any, NamedTuple

import pytest
from starlette.testclient import TestClient

import treadle
from tests.chat.tools.families import (
    FAMILIES,
    GPT_OSS,
    HERMES_TEMPLATE,
    OPEN,
    TEMPLATES,
    TOOLS,
    row,
)
from tests.server.conftest import running, talking, with_template
from tests.server.direct import DirectClient
from tests.server.test_cut_calls import Scribe
from tests.server.test_openai import post, stream
from tests.server.test_responses import named
from treadle.chat.template.template import ChatTemplate
from treadle.chat.tools import TemplateDialect
from treadle.chat.tools.formats import HARMONY, HERMES, THOUGHTS
from treadle.errors import TreadleError
from treadle.server.app import build_app
from treadle.server.protocols import anthropic, ollama
from treadle.server.protocols.openai import chat, responses
from treadle.server.requests.service import Service

HI: list[Any] = [{"role": "user", "content": "hi"}]
THINKS = HERMES_TEMPLATE + "{# </think> #}"


class Said(NamedTuple):
    """What an answer has, and why it ended."""

    reasoning: str
    content: str
    calls: list[str]
    end: str


def by_chat(client: Any, **more: Any) -> list[Said]:
    """The answer as a whole, and as a stream has it."""
    body: dict[str, Any] = {"messages": HI, **more}
    if "tools" in more:
        body["tools"] = [
            {"type": "function", "function": {"name": n, "parameters": s}}
            for n, s in more["tools"].items()
        ]
    choice = post(client, "/v1/chat/completions", **body)["choices"][0]
    said = choice["message"]
    calls = [call["function"]["name"] for call in said.get("tool_calls", [])]
    reasoning = said.get("reasoning_content", "")
    content = said["content"] or ""
    whole = Said(reasoning, content, calls, choice["finish_reason"])
    *chunks, _ = stream(client, "/v1/chat/completions", **body)
    deltas = [chunk["choices"][0]["delta"] for chunk in chunks]
    told = [c["function"] for d in deltas for c in d.get("tool_calls", []) if "id" in c]
    return [
        whole,
        Said(
            "".join(d.get("reasoning_content") or "" for d in deltas),
            "".join(d.get("content") or "" for d in deltas),
            [function["name"] for function in told],
            chunks[-1]["choices"][0]["finish_reason"],
        ),
    ]


def by_responses(client: Any, **more: Any) -> list[Said]:
    """See ``by_chat``."""
    body: dict[str, Any] = {"input": "hi", **more}
    if "tools" in more:
        body["tools"] = [
            {"type": "function", "name": n, "parameters": s} for n, s in more["tools"].items()
        ]
    events = named(client.post("/v1/responses", json={**body, "stream": True}).text)
    answers = post(client, "/v1/responses", **body), events[-1][1]["response"]
    found = []
    for answer in answers:
        items = answer["output"]
        texts = {
            kind: "".join(part["text"] for i in items if i["type"] == kind for part in i["content"])
            for kind in ("reasoning", "message")
        }
        calls = [item["name"] for item in items if item["type"] == "function_call"]
        end = "tool_calls" if calls else "stop"
        found.append(Said(texts["reasoning"], texts["message"], calls, end))
        assert answer["status"] == "completed"
    return found


def by_messages(client: Any, **more: Any) -> list[Said]:
    """See ``by_chat``."""
    body: dict[str, Any] = {"messages": HI, "max_tokens": 400, **more}
    if "tools" in more:
        body["tools"] = [{"name": n, "input_schema": s} for n, s in more["tools"].items()]
    ends = {"end_turn": "stop", "tool_use": "tool_calls"}

    def said(blocks: list[Any], end: str) -> Said:
        texts = {
            kind: "".join(block[kind] for block in blocks if block["type"] == kind)
            for kind in ("thinking", "text")
        }
        calls = [block["name"] for block in blocks if block["type"] == "tool_use"]
        return Said(texts["thinking"], texts["text"], calls, ends[end])

    answer = post(client, "/v1/messages", **body)
    blocks: list[Any] = []
    end = ""
    for name, data in named(client.post("/v1/messages", json={**body, "stream": True}).text):
        if name == "content_block_start":
            blocks.append(dict(data["content_block"]))
        elif name == "content_block_delta":
            for kind in ("thinking", "text"):
                blocks[-1][kind] = blocks[-1].get(kind, "") + data["delta"].get(kind, "")
        elif name == "message_delta":
            end = data["delta"]["stop_reason"]
    return [said(answer["content"], answer["stop_reason"]), said(blocks, end)]


def by_ollama(client: Any, **more: Any) -> list[Said]:
    """See ``by_chat``."""
    grammar = {"options": {"grammar": more.pop("grammar")}} if "grammar" in more else {}
    body: dict[str, Any] = {"messages": HI, **grammar, **more}
    if "tools" in more:
        body["tools"] = [
            {"type": "function", "function": {"name": n, "parameters": s}}
            for n, s in more["tools"].items()
        ]
    lines = client.post("/api/chat", json={**body, "stream": True}).text.splitlines()
    whole = post(client, "/api/chat", **body, stream=False)
    found = []
    for parts in ([whole["message"]], [json.loads(line)["message"] for line in lines]):
        texts = ["".join(part.get(key) or "" for part in parts) for key in ("thinking", "content")]
        made = [c["function"]["name"] for part in parts for c in part.get("tool_calls") or []]
        found.append(Said(texts[0], texts[1], made, "tool_calls" if made else "stop"))
    return found


PROTOCOLS = [by_chat, by_responses, by_messages, by_ollama]
THINK = TemplateDialect(thought=THOUGHTS[0], row=HERMES, writes_calls=True, shows_tools=True)
GEMMA = TemplateDialect(thought=THOUGHTS[2], row=row("gemma"), writes_calls=True, shows_tools=True)
GPT = TemplateDialect(
    thought=GPT_OSS.thought, channels=GPT_OSS, row=HARMONY, writes_calls=True, shows_tools=True
)
SOLAR = TemplateDialect(
    thought=OPEN.thought, channels=OPEN, row=row("solar"), writes_calls=True, shows_tools=True
)
CALL = FAMILIES["hermes"].g
ANALYSIS = GPT_OSS.thought.open
ANSWERS: list[tuple[TemplateDialect, str, Said]] = [
    (THINK, f"<think>Let me think{CALL}", Said("Let me think", "", ["g"], "tool_calls")),
    (THINK, f"<think>Use <tool_call>.</think>a{CALL}", Said("Use <tool_call>.", "a", ["g"], "")),
    (THINK, f"<think>{CALL} so</think>yes", Said(f"{CALL} so", "yes", [], "stop")),
    (GEMMA, f"<|channel>thought\nhm{FAMILIES['gemma'].g}", Said("hm", "", ["g"], "tool_calls")),
    (GPT, f"{ANALYSIS}hm{GPT_OSS.start}{FAMILIES['harmony'].g}", Said("hm", "", ["g"], "")),
    (SOLAR, f"<|think|>hm{FAMILIES['solar'].g}", Said("hm", "", ["g"], "tool_calls")),
    (THINK, "a<think>b</think>c", Said("b", "ac", [], "stop")),
    (GEMMA, "a<|channel>thought\nb<channel|>c", Said("b", "ac", [], "stop")),
    (GEMMA, "<|channel>thought\n<channel|>Hello<channel|>", Said("", "Hello", [], "stop")),
    (GPT, "hello", Said("", "hello", [], "stop")),
    (
        GPT,
        "<|channel|>commentary to=python <|constrain|>code<|message|>print(1)",
        Said("print(1)", "", [], "stop"),
    ),
]


@pytest.fixture(scope="module")
def served(model: treadle.Model) -> Iterator[tuple[Service, DirectClient]]:
    with running(model) as service, DirectClient(build_app(service)) as client:
        yield service, client


@pytest.mark.parametrize("ask", PROTOCOLS)
@pytest.mark.parametrize(("dialect", "text", "said"), ANSWERS, ids=range(len(ANSWERS)))
def test_answers(
    dialect: TemplateDialect,
    text: str,
    said: Said,
    ask: Callable[..., list[Said]],
    served: tuple[Service, DirectClient],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    (service, client), scribe = served, Scribe()
    template = ChatTemplate("{% for m in messages %}{{ m.content }}{% endfor %}")
    monkeypatch.setitem(service.model.__dict__, "template", template)
    monkeypatch.setitem(service.__dict__, "dialect", dialect)
    monkeypatch.setattr(service.engine, "add", scribe.add)
    monkeypatch.setattr(service.engine, "wake", lambda: None)
    scribe.ids = service.model.tokenizer.encode_plain(text, start=False)
    end = said.end or "tool_calls"
    for found in ask(client, tools=TOOLS):
        assert found == said._replace(end=end)


def test_tokens_of_a_call_within_reasoning_are_not_of_it(
    served: tuple[Service, DirectClient], monkeypatch: pytest.MonkeyPatch
) -> None:
    (service, client), scribe = served, Scribe()
    template = ChatTemplate("{% for m in messages %}{{ m.content }}{% endfor %}")
    monkeypatch.setitem(service.model.__dict__, "template", template)
    monkeypatch.setitem(service.__dict__, "dialect", THINK)
    monkeypatch.setattr(service.engine, "add", scribe.add)
    monkeypatch.setattr(service.engine, "wake", lambda: None)
    tokenizer = service.model.tokenizer
    before, call, behind = (
        tokenizer.encode_plain(text, start=False) for text in ("<think>hm", CALL, " so")
    )
    tools = [
        {"type": "function", "function": {"name": n, "parameters": s}} for n, s in TOOLS.items()
    ]
    used = []
    for ids in ([*before, *call], [*before, *call, *behind]):
        scribe.ids = ids
        answer = post(client, "/v1/chat/completions", messages=HI, tools=tools)
        used.append(answer["usage"]["completion_tokens_details"]["reasoning_tokens"])
    marks = [tokenizer.decode(before[: n + 1], start=False) for n in range(len(before))]
    opened = sum("<think>" in text for text in marks)  # the token behind the mark is the first
    mark = tokenizer.encode_plain("<tool_call>", start=False)
    assert used[0] - opened <= len(mark)  # whose beginning may be text
    assert used[1] >= len(call) + len(behind)


# -- what must hold -----------------------------------------------------------------------------


@pytest.fixture(scope="module", params=["harmony", "solar"])
def channelled(model: treadle.Model, request: pytest.FixtureRequest) -> Iterator[TestClient]:
    own = with_template(model, TEMPLATES[request.param])
    with running(own) as service, talking(service) as client:
        yield client


@pytest.mark.slow
@pytest.mark.parametrize("ask", PROTOCOLS)
def test_a_grammar_of_ones_own(ask: Callable[..., list[Said]], channelled: TestClient) -> None:
    """It holds for the answer, whose header is written before it."""
    for found in ask(channelled, grammar='root ::= "yes"'):
        assert found == Said("", "yes", [], "stop")
    if ask is by_chat:
        for found in ask(channelled, regex="yes"):
            assert found == Said("", "yes", [], "stop")


SCHEMA: dict[str, Any] = {"type": "array", "items": {"enum": [1]}, "minItems": 1, "maxItems": 2}


@pytest.mark.slow
@pytest.mark.parametrize("effort", ["none", None])
def test_a_budget_beside_what_must_hold(effort: str | None, channelled: TestClient) -> None:
    form = {"type": "json_schema", "json_schema": {"name": "x", "schema": SCHEMA}}
    function = {"name": "g", "parameters": TOOLS["g"]}
    tool = {"type": "function", "function": function}
    for wanted in (
        {"response_format": form},
        {"tools": [tool], "tool_choice": "required"},
        {"tools": [tool], "tool_choice": {"type": "function", "function": {"name": "g"}}},
    ):
        own = {"reasoning_budget": 8} if effort is None else {"reasoning_effort": effort}
        answer = post(
            channelled, "/v1/chat/completions", messages=HI, max_tokens=200, **own, **wanted
        )
        message = answer["choices"][0]["message"]
        if "tools" in wanted:
            assert {call["function"]["name"] for call in message["tool_calls"]} == {"g"}
        else:
            assert json.loads(message["content"]) in ([1], [1, 1])
        n = answer["usage"]["completion_tokens_details"]["reasoning_tokens"]
        assert n <= (0 if effort else 8 + len("<|end|>"))


# -- reasoning that is off ----------------------------------------------------------------------


READERS: list[tuple[Any, dict[str, Any]]] = [
    (chat.read_chat, {"messages": HI, "reasoning_effort": "none"}),
    (chat.read_chat, {"messages": HI, "chat_template_kwargs": {"enable_thinking": False}}),
    (chat.read_chat, {"messages": HI, "chat_template_kwargs": {"thinking": False}}),
    (chat.read_chat, {"messages": HI, "reasoning_budget": 0}),
    (chat.read_chat, {"messages": HI, "thinking_budget_tokens": 0}),
    (
        chat.read_chat,
        {"messages": HI, "reasoning_budget": 9, "chat_template_kwargs": {"enable_thinking": False}},
    ),
    (responses.read_response, {"input": "hi", "reasoning": {"effort": "none"}}),
    (
        responses.read_response,
        {"input": "hi", "chat_template_kwargs": {"enable_thinking": False}},
    ),
    (
        anthropic.read_messages,
        {"messages": HI, "max_tokens": 9, "thinking": {"type": "disabled"}},
    ),
    (ollama.read_chat, {"messages": HI, "think": False}),
    (ollama.read_chat, {"messages": HI, "think": "false"}),
    (ollama.read_generate, {"prompt": "hi", "think": False}),
]
ON: list[tuple[Any, dict[str, Any]]] = [
    (chat.read_chat, {"messages": HI}),
    (chat.read_chat, {"messages": HI, "chat_template_kwargs": {"enable_thinking": True}}),
    (anthropic.read_messages, {"messages": HI, "max_tokens": 9, "thinking": {"type": "adaptive"}}),
    (ollama.read_chat, {"messages": HI, "think": True}),
]


@pytest.fixture(scope="module")
def thinker(model: treadle.Model) -> Iterator[Service]:
    with running(with_template(model, THINKS)) as service:
        yield service


@pytest.mark.parametrize(("read", "body"), READERS, ids=range(len(READERS)))
def test_reasoning_that_is_off_may_not_be_opened(
    read: Any, body: dict[str, Any], thinker: Service
) -> None:
    plan = read(thinker, body).planned.plan
    assert plan.budget == 0
    guide = plan.guide()
    tokenizer = thinker.model.tokenizer
    for id in tokenizer.encode_plain("so <think", start=False):
        guide.accept(id)
    bits = guide.bits()
    (end,) = tokenizer.encode_plain(">", start=False)[-1:]
    assert not bits[end // 8] >> end % 8 & 1


@pytest.mark.parametrize(("read", "body"), ON, ids=range(len(ON)))
def test_reasoning_that_is_on_is_free(read: Any, body: dict[str, Any], thinker: Service) -> None:
    assert read(thinker, body).planned.plan is None


def test_the_librarys_chat_keeps_to_it(thinker: Service) -> None:
    """A model that would think at once, or behind a word: with tools, and without."""
    model = thinker.model
    ids = model.tokenizer.encode_plain("so<think>hm</think>yes", start=False)

    def insist(x: Any, before: list[int]) -> Any:
        x[ids[min(len(before) - start, len(ids) - 1)]] += 99
        return x

    off: list[dict[str, Any]] = [
        {"template": {"enable_thinking": False}},
        {"template": {"enable_thinking": False}, "tools": []},
        {"reasoning_budget": 0},
    ]
    for own in off:
        start = len(model.chat(HI, **own, max_tokens=1).prompt_ids)
        made = model.chat(HI, **own, max_tokens=len(ids), custom=[insist], temperature=0)
        made.finish()
        assert "<think>" not in model.detokenize(made.ids)
    start = len(model.chat(HI, max_tokens=1).prompt_ids)
    free = model.chat(HI, max_tokens=len(ids), custom=[insist], temperature=0)
    assert "<think>hm</think>yes" in free.finish()
    with pytest.raises(TreadleError):
        model.chat(HI, template={"enable_thinking": False}, grammar="root ::= (")
    own = {"template": {"enable_thinking": False}, "grammar": 'root ::= "a"'}
    assert model.chat(HI, **own).finish() == "a"
