"""Calls of tools and reasoning, through every protocol that has them.

The model writes what a grammar says; the template is one that has tools.
"""

from __future__ import annotations

import json
from itertools import accumulate
from typing import Any
from unittest.mock import ANY

import pytest
from starlette.testclient import TestClient

import treadle
from tests.server.conftest import running, talking
from tests.server.test_ollama import lines
from tests.server.test_openai import post, stream
from tests.server.test_responses import named
from treadle.chat.template.template import ChatTemplate
from treadle.chat.tools.schemas import without_nulls
from treadle.server.protocols.anthropic import SIGNATURE

CHAT = "/v1/chat/completions"
HI: list[Any] = [{"role": "user", "content": "hi"}]
PARAMETERS = {
    "type": "object",
    "properties": {"a": {"enum": [1, 2]}},
    "required": ["a"],
    "additionalProperties": False,
}
F: Any = {"type": "function", "function": {"name": "f", "parameters": PARAMETERS}}
G: Any = {"type": "function", "function": {"name": "g", "description": "G."}}
ODD: Any = {"properties": {"a": {"not": {"type": "string"}}, "b": {"const": 1}}, "required": ["b"]}
STRICT: Any = {
    "type": "function",
    "function": {"name": "odd", "parameters": ODD, "strict": True},
}


def gbnf(text: str) -> str:
    """A grammar of one text."""
    return f"root ::= {json.dumps(text, ensure_ascii=False)}"


CALL_F = '<tool_call>\n{"name": "f", "arguments": {"a": "é}</tool_call>"}}\n</tool_call>'
CALL_G = '<tool_call>\n{"name": "g", "arguments": {}}\n</tool_call>'
TWO = gbnf(f"so:\n{CALL_F}\n{CALL_G}")
ARGUMENTS = {"a": "é}</tool_call>"}


# -- OpenAI's chat ----------------------------------------------------------------------------


@pytest.mark.parametrize("name", ['a"b', "a\nb", "", "é", "a b", "n" * 129, "f\n"])
def test_names_that_no_call_could_have(agent: TestClient, name: str) -> None:
    tool = {"type": "function", "function": {"name": name, "parameters": PARAMETERS}}
    error = post(agent, CHAT, 400, messages=HI, tools=[tool], tool_choice="required")["error"]
    assert "expected a name of 1 to 128 letters" in error["message"]
    assert error["param"] == "tools"


@pytest.mark.slow
@pytest.mark.parametrize("name", ["mcp__server__tool.v-2", "n" * 128])
def test_names_as_clients_have_them(agent: TestClient, name: str) -> None:
    tool = {"type": "function", "function": {"name": name, "parameters": PARAMETERS}}
    body: dict[str, Any] = {"messages": HI, "tools": [tool], "tool_choice": "required"}
    choice = post(agent, CHAT, **body, parallel_tool_calls=False)["choices"][0]
    (call,) = choice["message"]["tool_calls"]
    assert call["function"]["name"] == name


@pytest.mark.parametrize(
    "parameters",
    [
        {"type": "string"},
        {"type": ["array", "null"]},
        {"enum": ["a"]},
        {"const": 1},
        {"anyOf": [{"type": "string"}, {"type": "null"}]},
        {"allOf": [{}, {"type": "integer"}]},
    ],
)
def test_parameters_that_allow_no_object(agent: TestClient, parameters: Any) -> None:
    tool = {"type": "function", "function": {"name": "f", "parameters": parameters}}
    error = post(agent, CHAT, 400, messages=HI, tools=[tool])["error"]
    assert error["message"] == "tools[0]: tool f: the schema of its parameters allows no object"
    assert error["param"] == "tools"


@pytest.mark.slow
def test_calls_are_told_from_text(agent: TestClient) -> None:
    body: dict[str, Any] = {"messages": HI, "tools": [F, G], "grammar": TWO}
    choice = post(agent, CHAT, **body)["choices"][0]
    assert choice["finish_reason"] == "tool_calls"
    assert choice["message"]["content"] == "so:"
    first, second = choice["message"]["tool_calls"]
    assert (first["type"], first["function"]["name"]) == ("function", "f")
    assert json.loads(first["function"]["arguments"]) == ARGUMENTS
    assert second["function"] == {"name": "g", "arguments": "{}"}
    assert first["id"] != second["id"]
    one = post(agent, CHAT, **body, parallel_tool_calls=False)["choices"][0]
    assert len(one["message"]["tool_calls"]) == 1


def test_calls_in_a_stream(agent: TestClient) -> None:
    *chunks, done = stream(agent, CHAT, messages=HI, tools=[F, G], grammar=TWO)
    assert done == "[DONE]"
    choices = [chunk["choices"][0] for chunk in chunks]
    assert [c["finish_reason"] for c in choices] == [None] * (len(chunks) - 1) + ["tool_calls"]
    assert "".join(c["delta"].get("content") or "" for c in choices) == "so:"
    calls: dict[int, dict[str, str]] = {}
    for choice in choices:
        for call in choice["delta"].get("tool_calls", []):
            if call["index"] not in calls:
                assert call["type"] == "function"
                calls[call["index"]] = {"id": call["id"], **call["function"]}
            else:
                assert set(call) == {"index", "function"}
                calls[call["index"]]["arguments"] += call["function"]["arguments"]
    assert [calls[i]["name"] for i in (0, 1)] == ["f", "g"]
    assert json.loads(calls[0]["arguments"]) == ARGUMENTS


@pytest.mark.parametrize("text", ['<tool_call>{"name": "h"}</tool_call>', '<tool_call>{"name": '])
def test_what_is_no_call_is_content(text: str, agent: TestClient) -> None:
    choice = post(agent, CHAT, messages=HI, tools=[F], grammar=gbnf(text))["choices"][0]
    assert choice["finish_reason"] == "stop"
    assert choice["message"]["content"].startswith("<tool_call>")
    assert "tool_calls" not in choice["message"]


@pytest.mark.slow
@pytest.mark.parametrize(
    ("choice", "names"),
    [
        ("required", {"f", "g"}),
        ({"type": "function", "function": {"name": "f"}}, {"f"}),
        ({"type": "function", "name": "f"}, {"f"}),
    ],
)
def test_a_call_that_is_forced(choice: Any, names: set[str], agent: TestClient) -> None:
    tools = [F, {"type": "function", "function": {"name": "g", "parameters": PARAMETERS}}]
    for seed in range(3):
        body: dict[str, Any] = {"messages": HI, "tools": tools, "tool_choice": choice, "seed": seed}
        body["parallel_tool_calls"] = False
        answer = post(agent, CHAT, **body)["choices"][0]
        assert answer["finish_reason"] == "tool_calls"
        (call,) = answer["message"]["tool_calls"]
        assert call["function"]["name"] in names
        assert json.loads(call["function"]["arguments"])["a"] in (1, 2)
        assert answer["message"]["content"] is None


def test_the_template_is_shown_tools_unless_none_may_be_called(agent: TestClient) -> None:
    with_tools = post(agent, "/apply-template", messages=HI, tools=[G])["prompt"]
    assert '"description": "G."' in with_tools
    none = post(agent, "/apply-template", messages=HI, tools=[G], tool_choice="none")["prompt"]
    assert none == post(agent, "/apply-template", messages=HI)["prompt"]


def test_a_result_of_nothing(agent: TestClient) -> None:
    """A tool that gives nothing: null, as clients write what they have not."""
    call = {"id": "1", "type": "function", "function": {"name": "f", "arguments": "{}"}}
    talk: list[Any] = [*HI, {"role": "assistant", "tool_calls": [call]}]
    prompts = [
        post(agent, "/apply-template", messages=[*talk, {"role": "tool", **own}])["prompt"]
        for own in ({"content": ""}, {"content": None}, {})
    ]
    assert len(set(prompts)) == 1


def test_calls_and_results_of_earlier_turns(agent: TestClient) -> None:
    function = {"name": "f", "arguments": '{"a": 1}'}
    messages = [
        *HI,
        {"role": "assistant", "content": None, "tool_calls": [{"id": "1", "function": function}]},
        {"role": "tool", "tool_call_id": "1", "content": "[2]"},
    ]
    told = post(agent, "/apply-template", messages=messages, tools=[F])["prompt"]
    assert '{"name": "f", "arguments": {"a": 1}}' in told
    assert "tool\n[2]" in told


def allowed(mode: str, *names: str) -> Any:
    tools = [{"type": "function", "function": {"name": name}} for name in names]
    return {"type": "allowed_tools", "allowed_tools": {"mode": mode, "tools": tools}}


@pytest.mark.slow
def test_some_of_the_tools_are_allowed(agent: TestClient) -> None:
    """The model is shown all: its prompt stays as it is, and in the cache."""
    body: dict[str, Any] = {"messages": HI, "tools": [F, G]}
    whole = post(agent, "/apply-template", **body)["prompt"]
    for mode in ("auto", "required"):
        body["tool_choice"] = allowed(mode, "g")
        assert post(agent, "/apply-template", **body)["prompt"] == whole
    for seed in range(4):
        choice = post(agent, CHAT, **body, seed=seed, max_tokens=60)["choices"][0]
        assert {c["function"]["name"] for c in choice["message"]["tool_calls"]} == {"g"}
    flat = {"type": "allowed_tools", **body["tool_choice"]["allowed_tools"]}
    choice = post(agent, CHAT, **{**body, "tool_choice": flat}, max_tokens=60)["choices"][0]
    assert choice["message"]["tool_calls"][0]["function"]["name"] == "g"


def test_a_call_of_a_tool_that_is_not_allowed_is_text(agent: TestClient) -> None:
    body: dict[str, Any] = {"messages": HI, "tools": [F, G], "grammar": TWO}
    choice = post(agent, CHAT, **body, tool_choice=allowed("auto", "g"))["choices"][0]
    assert [c["function"]["name"] for c in choice["message"]["tool_calls"]] == ["g"]
    assert '"name": "f"' in choice["message"]["content"]
    none = post(agent, CHAT, **body, tool_choice=allowed("auto"))["choices"][0]
    assert "tool_calls" not in none["message"]


@pytest.mark.parametrize(
    ("body", "said"),
    [
        ({"tools": [{"type": "web"}]}, "tools[0].type"),
        ({"tools": [{"type": "function"}]}, "tools[0].function"),
        ({"tools": [{"type": "function", "function": {}}]}, "tools[0].function.name"),
        ({"tools": [F, F]}, "two have the name 'f'"),
        ({"tools": [F] * 513}, "at most"),
        ({"tools": [F], "tool_choice": "must"}, "tool_choice"),
        ({"tools": [F], "tool_choice": {"type": "function", "name": "x"}}, "unknown tool 'x'"),
        ({"tools": [F], "tool_choice": allowed("must", "f")}, "allowed_tools.mode: expected one"),
        ({"tools": [F], "tool_choice": allowed("auto", "x")}, "unknown tool 'x'"),
        ({"tools": [F], "tool_choice": allowed("required")}, "no tool is allowed"),
        ({"tools": [F], "tool_choice": {"type": "allowed_tools"}}, "allowed_tools.mode"),
        ({"tool_choice": "required"}, "the request has no tools"),
        ({"tools": [F], "tool_choice": "required", "grammar": 'root ::= "x"'}, "tool_choice"),
        ({"tools": [STRICT]}, "tool 'odd': JSON schema"),
    ],
)
def test_refused(body: dict[str, Any], said: str, agent: TestClient) -> None:
    assert said in post(agent, CHAT, 400, messages=HI, **body)["error"]["message"]


def test_a_template_without_tools(model: treadle.Model, monkeypatch: pytest.MonkeyPatch) -> None:
    """The prompt tells the model of them."""
    silent = ChatTemplate("{% for m in messages %}{{ m.content }}{% endfor %}")
    monkeypatch.setitem(model.__dict__, "template", silent)
    with running(model) as service, talking(service) as client:
        body: dict[str, Any] = {"messages": HI, "tools": [F], "max_tokens": 200}
        prompt = post(client, "/apply-template", **body)["prompt"]
        assert '"name": "f"' in prompt
        assert "<tool_call>" in prompt
        body["parallel_tool_calls"] = False
        choice = post(client, CHAT, **body, tool_choice="required")["choices"][0]
        assert choice["finish_reason"] == "tool_calls"
        none = post(client, "/apply-template", **body, tool_choice="none")["prompt"]
        assert none == "hi"
        assert post(client, "/api/show")["capabilities"] == ["completion", "embedding", "tools"]


def test_arguments_are_sent_as_they_come(agent: TestClient) -> None:
    """Fragments that join to what the whole answer has."""
    words = {"type": "string", "pattern": "^[a-z]{40}$"}
    parameters = {"type": "object", "properties": {"w": words}, "required": ["w"]}
    tool: Any = {"type": "function", "function": {"name": "w", "parameters": parameters}}
    body: dict[str, Any] = {
        "messages": HI,
        "tools": [tool],
        "tool_choice": "required",
        "parallel_tool_calls": False,
        "seed": 3,
        "temperature": 1,
    }
    whole = post(agent, CHAT, **body)["choices"][0]["message"]["tool_calls"][0]["function"]
    *chunks, _ = stream(agent, CHAT, **body)
    deltas = [c["choices"][0]["delta"].get("tool_calls") for c in chunks]
    calls = [call for delta in deltas if delta for call in delta]
    assert calls[0]["function"] == {"name": "w", "arguments": ""}
    assert all(call["index"] == 0 for call in calls)
    fragments = [call["function"]["arguments"] for call in calls[1:]]
    assert len(fragments) > 3
    assert "".join(fragments) == whole["arguments"]
    assert len(json.loads(whole["arguments"])["w"]) == 40


@pytest.mark.parametrize("stop", ["\n", "}", '"name"', "</tool_call>"])
def test_stop_strings_cut_no_call_that_is_forced(stop: str, agent: TestClient) -> None:
    body: dict[str, Any] = {
        "messages": HI,
        "tools": [F],
        "parallel_tool_calls": False,
        "stop": stop,
    }
    choice = post(agent, CHAT, **body, tool_choice="required", max_tokens=200)["choices"][0]
    assert choice["finish_reason"] == "tool_calls"
    (call,) = choice["message"]["tool_calls"]
    assert json.loads(call["function"]["arguments"])["a"] in (1, 2)


@pytest.mark.slow
@pytest.mark.parametrize("stop", ['"', "}", "f", "<tool_call>"])
def test_stop_strings_cut_no_call_that_the_model_chose(stop: str, agent: TestClient) -> None:
    """They hold for what is said beside it."""
    body: dict[str, Any] = {"messages": HI, "tools": [F, G], "stop": stop}
    choice = post(agent, CHAT, **body, grammar=TWO)["choices"][0]
    assert choice["finish_reason"] == "tool_calls"
    assert choice["message"]["content"] == "so:"
    calls = choice["message"]["tool_calls"]
    assert [json.loads(call["function"]["arguments"]) for call in calls] == [ARGUMENTS, {}]
    assert post(agent, CHAT, **{**body, "stop": "o:"}, grammar=TWO)["choices"][0]["message"] == {
        "role": "assistant",
        "content": "s",
    }


@pytest.mark.slow
def test_several_calls_may_be_required(agent: TestClient) -> None:
    """As many as the context has room for, up to 16; the last one is perhaps cut."""
    tools = [{"type": "function", "function": {"name": "g", "parameters": PARAMETERS}}]
    body: dict[str, Any] = {"messages": HI, "tools": tools, "tool_choice": "required"}
    choice = post(agent, CHAT, **body, ignore_eos=True)["choices"][0]
    calls = choice["message"]["tool_calls"]
    assert 4 < len(calls) <= 16
    calls = calls[: len(calls) - (choice["finish_reason"] == "length")]
    assert all(json.loads(call["function"]["arguments"])["a"] in (1, 2) for call in calls)


@pytest.mark.slow
@pytest.mark.parametrize("n", [1, 14, 17, 22, 30])
def test_a_forced_call_that_is_cut(n: int, agent: TestClient) -> None:
    """Never text: a call with what of its arguments was written, or nothing yet."""
    tool = {"name": "f", "input_schema": PARAMETERS}
    choice = {"type": "tool", "name": "f"}
    body: dict[str, Any] = {"messages": HI, "tools": [tool], "tool_choice": choice}
    body["max_tokens"] = n
    found = post(agent, "/v1/messages", **body)
    assert [block["type"] for block in found["content"]] in ([], ["tool_use"])
    assert all(isinstance(block["input"], dict) for block in found["content"])
    assert found["stop_reason"] in ("max_tokens", "tool_use")
    options = {"num_predict": n}
    told = post(agent, "/api/chat", messages=HI, tools=[F], stream=False, options=options)
    assert "<tool_call>" not in told["message"]["content"]
    chosen = {"type": "function", "function": {"name": "f"}}
    cut: dict[str, Any] = {"messages": HI, "tools": [F], "tool_choice": chosen, "max_tokens": n}
    message = post(agent, CHAT, **cut)["choices"][0]["message"]
    assert not message["content"]
    assert len(message.get("tool_calls", [])) == len(found["content"])


@pytest.mark.slow
def test_tools_together_with_a_schema(agent: TestClient) -> None:
    form = {"type": "json_schema", "json_schema": {"name": "x", "schema": {"const": "yes"}}}
    body: dict[str, Any] = {"messages": HI, "tools": [F], "response_format": form}
    body["parallel_tool_calls"] = False
    for seed in range(4):
        choice = post(agent, CHAT, **body, seed=seed)["choices"][0]
        if choice["finish_reason"] == "tool_calls":
            (call, *_) = choice["message"]["tool_calls"]
            assert json.loads(call["function"]["arguments"])["a"] in (1, 2)
        else:
            assert json.loads(choice["message"]["content"]) == "yes"


def test_what_is_not_enforced_is_told(agent: TestClient) -> None:
    odd = {"type": "function", "function": {"name": "odd", "parameters": ODD}}
    body: dict[str, Any] = {"messages": HI, "tools": [odd], "tool_choice": "required"}
    body |= {"max_tokens": 100, "parallel_tool_calls": False}
    found = post(agent, CHAT, **body)
    assert any('"not"' in warning for warning in found["warnings"])
    *chunks, _ = stream(agent, CHAT, **body)
    assert chunks[-1]["warnings"] == found["warnings"]
    assert not any("warnings" in chunk for chunk in chunks[:-1])
    assert "warnings" not in post(agent, CHAT, messages=HI, tools=[F], max_tokens=1)


def test_a_schema_that_is_not_strict(agent: TestClient) -> None:
    outer = {"name": "x", "schema": {"not": {"type": "string"}, "const": 5}}
    form = {"type": "json_schema", "json_schema": outer}
    error = post(agent, CHAT, 400, messages=HI, response_format=form)["error"]
    assert '"not"' in error["message"]
    lenient = {"type": "json_schema", "json_schema": {**outer, "strict": False}}
    found = post(agent, CHAT, messages=HI, response_format=lenient, max_tokens=20)
    assert json.loads(found["choices"][0]["message"]["content"]) == 5
    assert any('"not"' in warning for warning in found["warnings"])


def test_keywords_that_are_null(agent: TestClient) -> None:
    """As clients in Go write lists and objects that are empty."""
    plain: dict[str, Any] = {"type": "object", "properties": None, "required": None}
    inner = {"type": "string", "enum": None, "default": None, "description": None}
    for parameters in (plain, {**plain, "properties": {"a": inner}}):
        tool = {"type": "function", "function": {"name": "f", "parameters": parameters}}
        body: dict[str, Any] = {"messages": HI, "tools": [tool], "tool_choice": "required"}
        found = post(agent, CHAT, **body, max_tokens=1)
        assert "warnings" not in found
    assert without_nulls({"a": [{"const": None}], "enum": [None]}) == {
        "a": [{"const": None}],
        "enum": [None],
    }


def test_only_what_cannot_be_kept_is_left_out(agent: TestClient) -> None:
    """A pattern that no grammar has, in a tool's schema and in that of an answer."""
    own = {
        "type": "object",
        "properties": {"a": {"type": "string", "pattern": "^(?!x)"}, "b": {"const": 1}},
        "required": ["a", "b"],
        "additionalProperties": False,
    }
    function = {"name": "f", "parameters": own}
    body: dict[str, Any] = {"messages": HI, "max_tokens": 1}
    tools = [{"type": "function", "function": function}]
    found = post(agent, CHAT, **body, tools=tools, tool_choice="required")
    (warning,) = found["warnings"]
    assert warning.startswith('tool \'f\': JSON schema: "pattern": "^(?!x)" cannot be enforced')
    tools = [{"type": "function", "function": {**function, "strict": True}}]
    error = post(agent, CHAT, 400, **body, tools=tools)["error"]
    assert error["message"].startswith("tool 'f': JSON schema: \"pattern\"")
    form = {"type": "json_schema", "json_schema": {"schema": own, "strict": False}}
    (warning,) = post(agent, CHAT, **body, response_format=form)["warnings"]
    assert warning.startswith('JSON schema: "pattern": "^(?!x)" cannot be enforced: look-around')


# -- reasoning --------------------------------------------------------------------------------


def test_reasoning_is_told_from_the_answer(agent: TestClient) -> None:
    body: dict[str, Any] = {"messages": HI, "grammar": gbnf("<think>\na < b\n</think>\n\nyes")}
    message = post(agent, CHAT, **body)["choices"][0]["message"]
    assert message["content"] == "yes"
    assert message["reasoning_content"] == message["reasoning"] == "a < b"
    *chunks, _ = stream(agent, CHAT, **body)
    deltas = [chunk["choices"][0]["delta"] for chunk in chunks]
    assert "".join(delta.get("reasoning_content", "") for delta in deltas) == "a < b"
    assert "".join(delta.get("content") or "" for delta in deltas) == "yes"
    measured = post(agent, CHAT, **body, logprobs=True)
    tokens = [entry["token"] for entry in measured["choices"][0]["logprobs"]["content"]]
    *texts, whole = accumulate(tokens)
    assert whole == "<think>\na < b\n</think>\n\nyes"
    n = sum(
        "<think>" in output and "</think>" not in output for output in texts
    )  # before a next token
    used = {"reasoning_tokens": n}  # the mark that ends it is of it
    assert 3 < n < len(tokens)
    assert measured["usage"]["completion_tokens_details"] == used
    options = {"include_usage": True}
    assert stream(agent, CHAT, **body, stream_options=options)[-2]["usage"] == (
        measured["usage"] | {"prompt_tokens_details": ANY}
    )
    (thought, answer) = post(agent, "/v1/messages", max_tokens=99, **body)["content"]
    assert (thought["type"], thought["thinking"]) == ("thinking", "a < b")
    assert answer == {"type": "text", "text": "yes"}
    found = post(agent, "/v1/responses", input="hi", grammar=body["grammar"])
    assert [item["type"] for item in found["output"]] == ["reasoning", "message"]
    assert found["usage"]["output_tokens_details"] == used
    options = {"grammar": body["grammar"]}
    told = post(agent, "/api/chat", messages=HI, stream=False, options=options)["message"]
    assert (told["thinking"], told["content"]) == ("a < b", "yes")


@pytest.mark.parametrize("cut", [False, True])
def test_anthropics_thinking_is_signed(cut: bool, agent: TestClient) -> None:
    """Also where the reasoning is all that there is. Clients send the block back, unless its
    signature is empty.
    """
    assert SIGNATURE
    body: dict[str, Any] = {"messages": HI, "max_tokens": 12 if cut else 99, "temperature": 0}
    body["grammar"] = gbnf("<think>\na < b" + " and so on" * 9 * cut + "\n</think>\n\nyes")
    events = named(agent.post("/v1/messages", json={**body, "stream": True}).text)
    told = [data for name, data in events if name.startswith("content_block") and not data["index"]]
    assert told[0]["content_block"] == {"type": "thinking", "thinking": "", "signature": ""}
    assert {each["delta"]["type"] for each in told[1:-2]} == {"thinking_delta"}
    assert told[-2]["delta"] == {"type": "signature_delta", "signature": SIGNATURE}
    assert told[-1]["type"] == "content_block_stop"
    whole = post(agent, "/v1/messages", **body)["content"]
    thought = "".join(each["delta"]["thinking"] for each in told[1:-2])
    assert whole[0] == {"type": "thinking", "thinking": thought, "signature": SIGNATURE}
    assert len(whole) == (1 if cut else 2)
    talk = [*HI, {"role": "assistant", "content": whole}, *HI]
    post(agent, "/v1/messages", **{**body, "messages": talk})


def test_a_prompt_may_open_the_reasoning(agent: TestClient) -> None:
    """A grammar holds behind it, and its budget ends it."""
    messages = [*HI, {"role": "assistant", "content": "<think>\n"}]
    body: dict[str, Any] = {"messages": messages, "grammar": gbnf("so"), "seed": 1}
    for budget in (0, 5):
        choice = post(agent, CHAT, **body, reasoning_budget=budget)["choices"][0]
        assert choice["message"]["content"] == "so"
        assert bool(choice["message"].get("reasoning")) == bool(budget)
    cut = post(agent, CHAT, messages=messages, max_tokens=3, ignore_eos=True)["usage"]
    assert cut["completion_tokens_details"] == {"reasoning_tokens": 3}
    body |= {"reasoning_effort": "none", "response_format": {"type": "text"}}
    assert post(agent, CHAT, **body)["choices"][0]["message"]["content"] == "so"


def test_the_budget_by_anthropics_name(agent: TestClient) -> None:
    messages = [*HI, {"role": "assistant", "content": "<think>\n"}]
    body: dict[str, Any] = {"messages": messages, "grammar": gbnf("so"), "max_tokens": 99}
    body["seed"] = 1  # its four tokens neither end the thought nor are blank
    thinking = {"type": "enabled", "budget_tokens": 4}
    (thought, answer) = post(agent, "/v1/messages", **body, thinking=thinking)["content"]
    assert thought["type"] == "thinking"
    assert answer == {"type": "text", "text": "so"}


def test_stop_strings_are_not_looked_for_in_reasoning(agent: TestClient) -> None:
    body: dict[str, Any] = {"messages": HI, "grammar": gbnf("<think>a stop b</think>c stop d")}
    message = post(agent, CHAT, **body, stop="stop")["choices"][0]["message"]
    assert (message["reasoning"], message["content"]) == ("a stop b", "c ")


# -- the other protocols ----------------------------------------------------------------------


@pytest.mark.slow
def test_anthropic(agent: TestClient) -> None:
    import anthropic

    tools: Any = [{"name": "f", "input_schema": PARAMETERS}, {"name": "g", "input_schema": {}}]
    body: dict[str, Any] = {"messages": HI, "tools": tools, "max_tokens": 200, "grammar": TWO}
    whole = post(agent, "/v1/messages", **body)
    assert whole["stop_reason"] == "tool_use"
    assert [block["type"] for block in whole["content"]] == ["text", "tool_use", "tool_use"]
    assert whole["content"][1]["input"] == ARGUMENTS
    events = named(agent.post("/v1/messages", json={**body, "stream": True}).text)
    blocks = [(name, data["index"]) for name, data in events if "index" in data]
    assert [at for name, at in blocks if name == "content_block_start"] == [0, 1, 2]
    assert [at for name, at in blocks if name == "content_block_stop"] == [0, 1, 2]
    assert [at for _, at in blocks] == sorted(at for _, at in blocks)
    people = anthropic.Anthropic(
        api_key="none", base_url="http://localhost", http_client=agent, max_retries=0
    )
    with people.messages.stream(
        model="any", max_tokens=200, messages=HI, tools=tools, extra_body={"grammar": TWO}
    ) as made:
        final = made.get_final_message()
    told = [block.input for block in final.content if block.type == "tool_use"]
    assert told == [ARGUMENTS, {}]
    forced = people.messages.create(
        model="any",
        max_tokens=200,
        messages=HI,
        tools=tools[:1],
        tool_choice={"type": "tool", "name": "f"},
    )
    assert [block.type for block in forced.content] == ["tool_use"]


def test_responses(agent: TestClient) -> None:
    import openai

    inner = {"type": "function", "name": "f", "parameters": PARAMETERS}
    tools: Any = [
        {"type": "web_search"},
        {"type": "namespace", "name": "mcp__x", "tools": [inner]},
        {"type": "function", "name": "g", "parameters": {"type": "object"}},
    ]
    grammar = gbnf(f"so:\n{CALL_F}\n{CALL_G}".replace('"f"', '"mcp__x__f"'))
    people = openai.OpenAI(
        api_key="none", base_url="http://localhost/v1", http_client=agent, max_retries=0
    )
    body = {"input": "hi", "tools": tools, "grammar": grammar}
    events = named(agent.post("/v1/responses", json={**body, "stream": True}).text)
    assert [data["sequence_number"] for _, data in events] == list(range(len(events)))
    places = [data["output_index"] for _, data in events if "output_index" in data]
    assert places == sorted(places)
    assert set(places) == {0, 1, 2}
    whole = events[-1][1]["response"]
    assert [item["type"] for item in whole["output"]] == ["message", *["function_call"] * 2]
    own = [(item["name"], item.get("namespace")) for item in whole["output"][1:]]
    assert own == [("f", "mcp__x"), ("g", None)]  # Codex finds its tools by both
    assert json.loads(whole["output"][1]["arguments"]) == ARGUMENTS
    done = [data for name, data in events if name == "response.function_call_arguments.done"]
    assert [data["name"] for data in done] == ["f", "g"]

    result: Any = {
        "type": "function_call_output",
        "call_id": whole["output"][1]["call_id"],
        "output": "2",
    }
    more = people.responses.create(
        model="any", input=[result], previous_response_id=whole["id"], max_output_tokens=3
    )
    talk = [  # in one turn, as it was written
        *HI,
        {
            "role": "assistant",
            "content": "so:",
            "tool_calls": [
                {"function": {"name": "mcp__x__f", "arguments": json.dumps(ARGUMENTS)}},
                {"function": {"name": "g", "arguments": "{}"}},
            ],
        },
        {"role": "tool", "content": "2"},
    ]
    asked = {"messages": talk, "max_tokens": 0}
    expected = agent.post(CHAT, json=asked).json()["usage"]["prompt_tokens"]
    assert more.usage is not None
    assert more.usage.input_tokens == expected
    said = people.responses.input_tokens.count(input=[*HI, *whole["output"], result])
    assert said.input_tokens == expected


def test_ollama(agent: TestClient) -> None:
    options = {"grammar": TWO, "num_predict": 200}
    body: dict[str, Any] = {"messages": HI, "tools": [F, G], "options": options}
    parts = lines(agent, "/api/chat", **body)
    calls = [call for part in parts for call in part["message"].get("tool_calls", [])]
    assert [call["function"] for call in calls] == [
        {"index": 0, "name": "f", "arguments": ARGUMENTS},
        {"index": 1, "name": "g", "arguments": {}},
    ]
    assert len({call["id"] for call in calls}) == 2  # for results of one tool's two calls
    whole = post(agent, "/api/chat", **body, stream=False)["message"]["tool_calls"]
    assert [call["function"] for call in whole] == [call["function"] for call in calls]
    assert "".join(part["message"]["content"] for part in parts) == "so:"
    assert set(post(agent, "/api/show")["capabilities"]) >= {"tools", "thinking"}


def test_anthropics_own_loop_loses_no_message(agent: TestClient) -> None:
    """It asks the server to keep the conversation; refused, it sends all of it each time."""
    import anthropic

    @anthropic.beta_tool  # type: ignore[untyped-decorator]
    def g(a: int) -> str:
        """Called once."""
        return "twelve"

    people = anthropic.Anthropic(
        api_key="none", base_url="http://localhost", http_client=agent, max_retries=0
    )
    call = '<tool_call>\n{"name": "g", "arguments": {"a": 1}}\n</tool_call>'
    told = people.beta.messages.tool_runner(
        model="any",
        max_tokens=60,
        messages=[{"role": "user", "content": "how much?"}],
        tools=[g],
        extra_body={"grammar": gbnf(call)},
        max_iterations=2,
    )
    first, second = (message.usage for message in told)
    both = [(u.input_tokens or 0) + (u.cache_read_input_tokens or 0) for u in (first, second)]
    assert both[1] > both[0] + first.output_tokens


@pytest.mark.slow
def test_openai_client(agent: TestClient) -> None:
    import openai

    people = openai.OpenAI(
        api_key="none", base_url="http://localhost/v1", http_client=agent, max_retries=0
    )
    with people.chat.completions.stream(
        model="any", messages=HI, tools=[F, G], extra_body={"grammar": TWO}
    ) as made:
        final = made.get_final_completion()
    calls = final.choices[0].message.tool_calls
    assert calls is not None
    assert [json.loads(call.function.arguments) for call in calls] == [ARGUMENTS, {}]
