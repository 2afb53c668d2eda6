"""Anthropic's ``/v1/messages``."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from starlette.testclient import TestClient

import treadle
from tests.server.conftest import N_CTX
from tests.server.test_openai import post
from tests.server.test_responses import named, prompt_of
from treadle.chat.template.template import ChatTemplate
from treadle.server.protocols.anthropic import BILLING, chat_of

PATH = "/v1/messages"
HI = [{"role": "user", "content": "hi"}]
GREEDY: dict[str, Any] = {"temperature": 0, "max_tokens": 8}
ASKED: dict[str, Any] = {"max_tokens": 5, "messages": HI}
UNNAMED: Any = {  # a tool's result with a part of no type in it
    "type": "tool_result",
    "content": [{"type": "text", "text": "x"}, {}],
}
FORM: Any = {"type": "json_schema", "schema": {}}


def test_a_message(client: TestClient, model: treadle.Model) -> None:
    made = model.chat(HI, temperature=0, max_tokens=8)
    found = post(client, f"{PATH}?beta=true", messages=HI, **GREEDY)
    assert found["content"] == [{"type": "text", "text": made.finish()}]
    assert (found["type"], found["role"]) == ("message", "assistant")
    assert (found["stop_reason"], found["stop_sequence"]) == ("max_tokens", None)
    usage = found["usage"]
    read = usage["input_tokens"] + usage["cache_read_input_tokens"]
    assert read == len(made.prompt_ids)
    assert usage["output_tokens"] == 8


def test_a_prompt_is_read_for_the_cache(client: TestClient) -> None:
    found = post(client, PATH, messages=HI, max_tokens=0)
    assert (found["content"], found["stop_reason"]) == ([], "max_tokens")
    assert found["usage"]["output_tokens"] == 0
    body = {"messages": HI, "max_tokens": 0, "stream": True}
    told = [name for name, _ in named(client.post(PATH, json=body).text)]
    assert told == ["message_start", "message_delta", "message_stop"]


def test_why_it_stopped(client: TestClient) -> None:
    said = post(client, PATH, messages=HI, **GREEDY)["content"][0]["text"]
    stop = said[3:5]
    found = post(client, PATH, messages=HI, stop_sequences=[stop], **GREEDY)
    assert (found["stop_reason"], found["stop_sequence"]) == ("stop_sequence", stop)
    ended = post(client, PATH, messages=HI, grammar='root ::= "x"', **GREEDY)
    assert (ended["stop_reason"], ended["stop_sequence"]) == ("end_turn", None)


def test_events_in_their_order(client: TestClient) -> None:
    whole = post(client, PATH, messages=HI, **GREEDY)
    body = {"messages": HI, "stream": True, **GREEDY}
    events = named(client.post(PATH, json=body).text)
    names = [name for name, _ in events]
    deltas = [data for name, data in events if name == "content_block_delta"]
    assert names == [
        "message_start",
        "content_block_start",
        *["content_block_delta"] * len(deltas),
        "content_block_stop",
        "message_delta",
        "message_stop",
    ]
    assert all(name == data["type"] for name, data in events)
    assert events[0][1]["message"]["content"] == []
    assert events[0][1]["message"]["usage"]["input_tokens"] > 0
    assert "".join(d["delta"]["text"] for d in deltas) == whole["content"][0]["text"]
    last = events[-2][1]
    assert last["delta"] == {"stop_reason": "max_tokens", "stop_sequence": None}
    assert last["usage"]["output_tokens"] == 8


def counted(client: TestClient, **body: Any) -> int:
    n: int = post(client, f"{PATH}/count_tokens", **body)["input_tokens"]
    return n


def test_blocks_are_messages(client: TestClient) -> None:
    blocks = [
        {"role": "user", "content": [{"type": "text", "text": "a"}, {"type": "text", "text": "b"}]},
        {
            "role": "assistant",
            "content": [{"type": "thinking", "thinking": "x"}, {"type": "text", "text": "c"}],
        },
        {
            "role": "user",
            "content": [
                {
                    "type": "tool_result",
                    "tool_use_id": "1",
                    "content": [{"type": "text", "text": "d"}],
                },
                {"type": "text", "text": "e"},
            ],
        },
    ]
    system = [{"type": "text", "text": "s"}, {"type": "text", "text": "t"}]
    plain = [
        {"role": "system", "content": "s\nt"},
        {"role": "user", "content": "a\nb"},
        {"role": "assistant", "content": "c"},
        {"role": "tool", "content": "d"},
        {"role": "user", "content": "e"},
    ]
    assert counted(client, messages=blocks, system=system) == prompt_of(client, plain)


def test_neighbours_of_one_role_are_one_turn(
    client: TestClient, model: treadle.Model, monkeypatch: pytest.MonkeyPatch, data: Path
) -> None:
    """Anthropic's API joins them; Gemma's template raises on two."""
    call = {"type": "tool_use", "id": "1", "name": "f", "input": {}}
    talk = [
        {"role": "user", "content": "a"},
        {"role": "user", "content": [{"type": "text", "text": "b"}]},
        {"role": "assistant", "content": "c"},
        {"role": "assistant", "content": [call]},
        {"role": "user", "content": [{"type": "tool_result", "tool_use_id": "1", "content": None}]},
        {"role": "user", "content": "d"},
    ]
    found = chat_of({"messages": talk})["messages"]
    assert [(m["role"], m["content"]) for m in found] == [
        ("user", "a\nb"),
        ("assistant", "c"),
        ("tool", ""),
        ("user", "d"),
    ]
    assert [call["id"] for call in found[1]["tool_calls"]] == ["1"]
    source = (data / "templates" / "google-gemma-2-2b-it.jinja").read_text("utf-8")
    monkeypatch.setitem(model.__dict__, "template", ChatTemplate(source, bos="<s>"))
    assert counted(client, messages=[*talk[:3], talk[5], talk[5]])


@pytest.mark.parametrize(
    ("block", "said"),
    [
        ({"type": "document", "source": {"type": "text", "data": "x y"}}, "x y"),
        (
            {
                "type": "document",
                "title": "T",
                "context": "C",
                "source": {
                    "type": "content",
                    "content": [{"type": "text", "text": "x"}, {"type": "text", "text": "y"}],
                },
            },
            "T\nC\nx\ny",
        ),
        ({"type": "document", "title": None, "source": {"type": "content", "content": "x"}}, "x"),
        ({"type": "search_result", "content": [{"type": "text", "text": "x y"}]}, "x y"),
        ({"type": "tool_reference", "tool_name": "f"}, "f"),
    ],
)
def test_blocks_that_have_a_text(block: Any, said: str) -> None:
    result = {"type": "tool_result", "tool_use_id": "1", "content": [block]}
    for content, role in (([block], "user"), ([result], "tool")):
        (found,) = chat_of({"messages": [{"role": "user", "content": content}]})["messages"]
        assert (found["role"], found["content"]) == (role, said)


def test_a_prompt_is_counted_that_is_too_long(client: TestClient) -> None:
    long = [{"role": "user", "content": "x " * N_CTX}]
    assert counted(client, messages=long) > N_CTX


def test_a_changing_first_line_does_not_spoil_the_cache(client: TestClient) -> None:
    rest = "You are of great help. " * 4
    n = counted(client, messages=HI, system=rest)
    for i in range(2):
        line = f"{BILLING} cc_version=1.{i}; cch={i};"
        system = [{"type": "text", "text": line}, {"type": "text", "text": rest}]
        assert counted(client, messages=HI, system=system) == n
        assert counted(client, messages=HI, system=f"{line}\n{rest}") == n
    body = {"messages": HI, "system": system, **GREEDY}
    post(client, PATH, **body)
    assert post(client, PATH, **body)["usage"]["cache_read_input_tokens"] >= n // 32 * 32


@pytest.mark.parametrize("place", ["output_config", "output_format"])
def test_an_answer_is_of_the_schema(place: str, client: TestClient) -> None:
    form = {"type": "json_schema", "schema": {"type": "boolean"}}
    body: dict[str, Any] = {place: {"format": form} if place == "output_config" else form}
    found = post(client, PATH, messages=HI, **body, **GREEDY)
    assert json.loads(found["content"][0]["text"]) in (True, False)
    assert found["stop_reason"] == "end_turn"


def test_effort_is_that_of_reasoning(
    client: TestClient, model: treadle.Model, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A variable of the template, whose text the tokens are counted of, too."""
    source = "{{ messages[0].content * (9 if reasoning_effort == 'max' else 1) }}"
    monkeypatch.setitem(model.__dict__, "template", ChatTemplate(source))
    n = counted(client, messages=HI)
    assert counted(client, messages=HI, output_config={"effort": "max"}) > n
    found = post(client, PATH, messages=HI, output_config={"effort": "max"}, **GREEDY)["usage"]
    assert found["input_tokens"] + found["cache_read_input_tokens"] > n


@pytest.mark.parametrize(
    ("body", "said"),
    [
        ({"messages": HI}, "max_tokens"),
        ({"max_tokens": 5}, "messages"),
        ({"max_tokens": -1, "messages": HI}, "max_tokens"),
        (
            {"max_tokens": 5, "messages": [{"role": "user", "content": [{"type": "video"}]}]},
            "video",
        ),
        (
            {"max_tokens": 5, "messages": [{"role": "user", "content": [UNNAMED]}]},
            "messages[0].content[0].content[1].type",
        ),
        ({"max_tokens": 5, "messages": HI, "tools": [{"name": "f", "type": "bash"}]}, "tools"),
        ({"tool_choice": {"type": []}, **ASKED}, "tool_choice.type"),
        ({"tool_choice": {"type": {}}, **ASKED}, "tool_choice.type"),
        ({"max_tokens": 5, "messages": HI, "system": [5]}, "system"),
        ({"output_format": {"type": "xml"}, **ASKED}, "output_format.type"),
        ({"output_config": {"format": {"type": "text"}}, **ASKED}, "output_config.format.type"),
        ({"output_config": {"format": {"type": "json_schema"}}, **ASKED}, "format.schema"),
        ({"output_config": {"format": FORM}, "output_format": FORM, **ASKED}, "output_format"),
        ({"output_config": {"effort": 5}, **ASKED}, "output_config.effort"),
        ({"max_tokens": 5, "messages": [{"role": "user", "content": "x " * N_CTX}]}, "tokens"),
    ],
)
def test_refused(body: dict[str, Any], said: str, client: TestClient) -> None:
    found = post(client, PATH, 400, **body)
    assert found["type"] == "error"
    assert found["error"]["type"] == "invalid_request_error"
    assert said in found["error"]["message"]


@pytest.mark.parametrize("path", ["/v1/messages", "/v1/messages/count_tokens"])
@pytest.mark.parametrize(
    "thread", [{"type": "create"}, {"type": "continue", "previous_message_id": "msg_1"}]
)
def test_a_thread_is_refused_as_its_client_knows(
    thread: dict[str, str], path: str, client: TestClient
) -> None:
    """Left out, all of the conversation but its last turn would be lost without a word."""
    hi = {"role": "user", "content": "hi"}
    body: dict[str, Any] = {"messages": [hi], "max_tokens": 1, "thread": thread}
    error = post(client, path, 400, **body)["error"]
    assert error["type"] == "invalid_request_error"
    assert error["message"].startswith("thread: ")
    assert error["details"] == {"error_code": "thread_unsupported_request"}
    post(client, path, **{**body, "thread": None})


def test_errors_have_its_form_everywhere(client: TestClient) -> None:
    for answer in (
        client.post(PATH, content=b"{"),
        client.get(PATH),
        client.get(PATH, headers={"host": "evil.example"}),
    ):
        assert answer.status_code in (400, 403, 405)
        assert answer.json()["type"] == "error"
        known = ("invalid_request_error", "permission_error")
        assert answer.json()["error"]["type"] in known
    assert json.loads(client.get("/messages").text)["type"] == "error"


def test_fields_have_their_own_names(client: TestClient) -> None:
    body: dict[str, Any] = {"messages": [{"role": "user", "content": "hi"}], "max_tokens": 5}
    for own, said in (
        ({"metadata": {"user_id": 5}}, "metadata.user_id: expected"),
        ({"thinking": {"type": "enabled", "budget_tokens": "x"}}, "thinking.budget_tokens: exp"),
        ({"stop_sequences": ["x"] * 65}, "stop_sequences: 65 strings"),
    ):
        answer = client.post("/v1/messages", json={**body, **own})
        assert answer.status_code == 400
        assert answer.json()["error"]["message"].startswith(said)
