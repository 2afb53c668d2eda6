"""Tools of ``/v1/responses``: namespaces, custom tools, those that are allowed."""

from __future__ import annotations

import json
from typing import Any

import pytest
from starlette.testclient import TestClient

from tests.server.test_openai import post
from tests.server.test_responses import named
from tests.server.test_tools import PARAMETERS, gbnf
from treadle.server.http.api_errors import ApiError
from treadle.server.protocols.openai.response_items import given_items, in_turns, read_items
from treadle.server.protocols.openai.response_tools import (
    chat_choice,
    flat_name,
    read_response_tools,
)
from treadle.server.requests.response_store import ResponseStore

PATH = "/v1/responses"
LARK = {"type": "grammar", "syntax": "lark", "definition": "start: /x/"}
REGEX = {"type": "grammar", "syntax": "regex", "definition": "[ab]|cc"}
F: Any = {"type": "function", "name": "f", "parameters": PARAMETERS}
G: Any = {"type": "function", "name": "g", "parameters": PARAMETERS}
SPACE: Any = {"type": "namespace", "name": "mcp__x__", "tools": [F, G]}
PATCH: Any = {"type": "custom", "name": "patch", "description": "Patch."}


def test_a_tool_of_a_namespace(agent: TestClient) -> None:
    """Codex finds a tool by its name and its namespace, and sends both back."""
    body: dict[str, Any] = {"input": "hi", "tools": [SPACE], "seed": 1}
    body["tool_choice"] = {"type": "function", "name": "f"}
    whole = post(agent, PATH, **body)
    (item,) = whole["output"]
    assert (item["type"], item["name"], item["namespace"]) == ("function_call", "f", "mcp__x__")
    events = named(agent.post(PATH, json={**body, "stream": True}).text)
    items = [data["item"] for name, data in events if "output_item" in name]
    assert [(each["name"], each["namespace"]) for each in items] == [("f", "mcp__x__")] * 2
    tools = [{**F, "name": "mcp__x__f"}, {**G, "name": "mcp__x__g"}]
    flat = {key: value for key, value in item.items() if key != "namespace"} | {"name": "mcp__x__f"}
    counts = [
        post(agent, f"{PATH}/input_tokens", input=[{"role": "user", "content": "x"}, call], tools=t)
        for call, t in ((item, [SPACE]), (flat, tools))
    ]
    assert counts[0] == counts[1]


def test_a_custom_tool(agent: TestClient) -> None:
    """Its call has a text and no JSON, whole and in events."""
    from openai.types.responses import Response, ResponseStreamEvent
    from pydantic import TypeAdapter

    said = "*** Begin\n é"
    call = json.dumps({"name": "patch", "arguments": {"input": said}}, ensure_ascii=False)
    grammar = gbnf(f"<tool_call>\n{call}\n</tool_call>")
    body: dict[str, Any] = {"input": "hi", "tools": [PATCH], "grammar": grammar}
    whole = post(agent, PATH, **body)
    (item,) = Response.model_validate(whole).output
    assert item.type == "custom_tool_call"
    assert (item.name, item.input) == ("patch", said)
    events = named(agent.post(PATH, json={**body, "stream": True}).text)
    for _, data in events:
        TypeAdapter(ResponseStreamEvent).validate_python(data)
    assert [name for name, _ in events][2:-1] == [
        "response.output_item.added",
        "response.custom_tool_call_input.delta",
        "response.custom_tool_call_input.done",
        "response.output_item.done",
    ]
    assert events[2][1]["item"]["input"] == ""
    assert events[3][1]["delta"] == events[4][1]["input"] == said
    assert events[5][1]["item"]["input"] == said
    assert events[5][1]["item"]["id"] == events[3][1]["item_id"]
    result = {"type": "custom_tool_call_output", "call_id": item.call_id, "output": "done"}
    again: list[Any] = [{"role": "user", "content": "hi"}, *whole["output"], result]
    n = post(agent, f"{PATH}/input_tokens", input=again, tools=[PATCH])["input_tokens"]
    kept = {"input": [result], "previous_response_id": whole["id"], "tools": [PATCH]}
    assert post(agent, f"{PATH}/input_tokens", **kept)["input_tokens"] == n


def test_reasoning_that_comes_back_as_it_was_sealed(agent: TestClient) -> None:
    """Codex keeps the conversation, and of reasoning sends ``encrypted_content`` alone."""
    body: dict[str, Any] = {"input": "hi", "grammar": gbnf("<think>hm é</think>so")}
    plain = post(agent, PATH, **body)["output"]
    assert "encrypted_content" not in plain[0]
    body["include"] = ["reasoning.encrypted_content"]
    whole = post(agent, PATH, **body)["output"]
    events = named(agent.post(PATH, json={**body, "stream": True}).text)
    done = [data["item"] for name, data in events if name == "response.output_item.done"]
    user = {"role": "user", "content": "x"}
    for thought, said in (whole, done):
        assert (thought["type"], thought["content"][0]["text"]) == ("reasoning", "hm é")
        bare = {
            "type": "reasoning",
            "summary": [],
            "encrypted_content": thought["encrypted_content"],
        }
        made = in_turns(read_items(given_items([user, bare, said, user], ResponseStore())))
        assert made == in_turns(read_items(given_items([user, *plain, user], ResponseStore())))
        assert made[1]["reasoning_content"] == "hm é"


@pytest.mark.parametrize("value", [None, 5, "gAAAA", "treadle:é", "treadle:A", "treadle:/w=="])
def test_reasoning_that_nobody_can_read(value: Any) -> None:
    user = {"role": "user", "content": "x"}
    thought = {"type": "reasoning", "summary": [], "encrypted_content": value}
    assert read_items(given_items([user, thought], ResponseStore())) == [user]


def test_a_custom_call_that_is_cut(agent: TestClient) -> None:
    body: dict[str, Any] = {"input": "hi", "tools": [PATCH], "max_output_tokens": 24}
    body["tool_choice"] = {"type": "custom", "name": "patch"}
    whole = post(agent, PATH, **body, ignore_eos=True)
    assert whole["status"] == "incomplete"
    assert all(isinstance(item["input"], str) for item in whole["output"])


def test_the_grammar_of_a_custom_tool(agent: TestClient) -> None:
    """A pattern holds; of another grammar the answer says that it does not."""
    body: dict[str, Any] = {"input": "hi", "parallel_tool_calls": False, "seed": 2}
    choice = {"type": "custom", "name": "patch"}
    for seed in range(3):
        own = {**body, "tools": [{**PATCH, "format": REGEX}], "tool_choice": choice, "seed": seed}
        found = post(agent, PATH, **own)
        assert found["output"][0]["input"] in ("a", "b", "cc")
        assert "warnings" not in found
    told = post(agent, PATH, **body, tools=[{**PATCH, "format": LARK}], max_output_tokens=1)
    assert told["warnings"] == ["tool 'patch': the grammar is not enforced"]


def test_some_of_the_tools_are_allowed(agent: TestClient) -> None:
    tools = [{"type": "web_search"}, SPACE, PATCH]
    body: dict[str, Any] = {"input": "hi", "tools": tools, "max_output_tokens": 60}
    whole = post(agent, f"{PATH}/input_tokens", **body)
    allowed = {"type": "allowed_tools", "mode": "required"}
    own = [{"type": "web_search"}, {"type": "function", "name": "g"}]
    body["tool_choice"] = {**allowed, "tools": own}
    assert post(agent, f"{PATH}/input_tokens", **body) == whole
    for seed in range(3):
        found = post(agent, PATH, **body, seed=seed)
        assert {item["name"] for item in found["output"]} == {"g"}
        assert found["tool_choice"] == body["tool_choice"]


def test_what_is_chosen() -> None:
    offered = read_response_tools([{"type": "mcp"}, SPACE, PATCH, F])

    def names(tools: list[Any], mode: str = "auto") -> list[str]:
        choice = {"type": "allowed_tools", "mode": mode, "tools": tools}
        made = chat_choice(choice, offered)["allowed_tools"]
        assert made["mode"] == mode
        return [tool["function"]["name"] for tool in made["tools"]]

    assert names([{"type": "namespace", "name": "mcp__x__"}]) == ["mcp__x__f", "mcp__x__g"]
    assert names([{"type": "function", "name": "f"}]) == ["f"]
    assert names([{"type": "function", "name": "g"}]) == ["mcp__x__g"]
    assert names([{"type": "function", "name": "f", "namespace": "mcp__x__"}]) == ["mcp__x__f"]
    assert names([{"type": "function", "name": "mcp__x__g"}]) == ["mcp__x__g"]
    assert names([{"type": "mcp"}, {"type": "custom", "name": "patch"}]) == ["patch"]
    assert names([{"type": "function", "name": "none"}]) == ["none"]  # which chat refuses
    only = read_response_tools([{"type": "mcp"}])
    choice = {"type": "allowed_tools", "mode": "auto", "tools": [{"type": "mcp"}]}
    assert chat_choice(choice, only) == "auto"
    with pytest.raises(ApiError, match="type 'mcp' is not supported"):
        chat_choice("required", only)
    with pytest.raises(ApiError, match="type 'mcp' is not supported"):
        chat_choice({"type": "mcp", "server_label": "x"}, offered)


def test_names_in_a_namespace() -> None:
    assert flat_name("mcp__x__", "f") == flat_name("mcp__x", "f") == "mcp__x__f"
    assert flat_name(None, "f") == flat_name("", "f") == "f"


@pytest.mark.parametrize(
    ("tool", "param"),
    [
        ({"type": "custom"}, "tools.name"),
        ({"type": "namespace", "tools": [F]}, "tools.name"),
        ({"type": "namespace", "name": "x", "tools": 5}, "tools.tools"),
        ({"type": "namespace", "name": "x", "tools": [{**SPACE, "name": "y"}]}, "tools"),
        (
            {"type": "namespace", "name": "x", "tools": [{"type": str(i)} for i in range(600)]},
            "tools",
        ),
        ({"type": 5}, "tools.type"),
        ({}, "tools.type"),
        (5, "tools"),
        ({**PATCH, "format": 5}, "tools.format"),
        ({**PATCH, "format": {"type": "grammar", "syntax": "lark"}}, "tools.format.definition"),
    ],
)
def test_refused(agent: TestClient, tool: Any, param: str) -> None:
    assert post(agent, PATH, 400, input="hi", tools=[tool])["error"]["param"] == param


@pytest.mark.parametrize("name", [None, 5, {}, "x"])
def test_a_choice_without_a_name(agent: TestClient, name: Any) -> None:
    for choice in (
        {"type": "function", "name": name},
        {"type": "allowed_tools", "mode": "auto", "tools": [{"type": "function", "name": name}]},
    ):
        error = post(agent, PATH, 400, input="hi", tools=[F], tool_choice=choice)["error"]
        assert error["message"].startswith("tool_choice: unknown tool ")


def test_too_many_are_allowed(agent: TestClient) -> None:
    choice = {"type": "allowed_tools", "mode": "auto", "tools": [F] * 513}
    error = post(agent, PATH, 400, input="hi", tools=[F], tool_choice=choice)["error"]
    assert error["message"] == "tool_choice.tools: 513 items, at most 512"


def test_the_names_of_a_choice_are_those_of_the_client(agent: TestClient) -> None:
    choice = {"type": "allowed_tools", "mode": "must", "tools": [F]}
    error = post(agent, PATH, 400, input="hi", tools=[F], tool_choice=choice)["error"]
    assert error["param"] == "tool_choice.mode"
    assert error["message"].startswith("tool_choice.mode: expected one of auto, required")
