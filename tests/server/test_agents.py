"""What coding agents and SDKs send, trimmed: Claude Code, Codex, zod, Vercel's AI SDK."""

from __future__ import annotations

import json
from typing import Any, Literal

import pytest
from starlette.testclient import TestClient

import treadle
from tests.server.conftest import running, talking
from tests.server.test_ollama import lines
from tests.server.test_openai import post
from tests.server.test_responses import named
from tests.server.test_tools import CHAT, HI, ODD, F

MESSAGES = "/v1/messages"
ASKED: dict[str, Any] = {"max_tokens": 5, "messages": HI}
RECORD: Any = {  # z.object({"m": z.record(z.string(), z.literal(1))})
    "$schema": "https://json-schema.org/draft/2020-12/schema",
    "type": "object",
    "properties": {
        "m": {
            "type": "object",
            "propertyNames": {"type": "string", "enum": ["k"]},
            "additionalProperties": {"type": "number", "const": 1},
            "required": ["k"],
        }
    },
    "required": ["m"],
    "additionalProperties": False,
}


def test_a_conversation_that_the_server_would_keep(client: TestClient) -> None:
    """Anthropic's tool runners send new messages alone, until they are told this."""
    for thread in ({"type": "create"}, {"type": "continue", "previous_message_id": "msg_1"}):
        error = post(client, MESSAGES, 400, **ASKED, thread=thread)["error"]
        assert error["details"] == {"error_code": "thread_unsupported_request"}
    assert "details" not in post(client, MESSAGES, 400, messages=HI)["error"]


@pytest.mark.slow
def test_a_runner_of_tools(agent: TestClient) -> None:
    """Anthropic's: what it sends behind a call has the whole conversation in it."""
    import anthropic

    asked: list[str] = []

    @anthropic.beta_tool  # type: ignore[untyped-decorator]
    def w(city: Literal["Paris"]) -> str:
        """Weather."""
        asked.append(city)
        return "sunny"

    people = anthropic.Anthropic(
        api_key="none", base_url="http://localhost", http_client=agent, max_retries=0
    )
    runner = people.beta.messages.tool_runner(
        model="any",
        max_tokens=60,
        max_iterations=2,
        tools=[w],
        tool_choice={"type": "tool", "name": "w"},
        messages=[{"role": "user", "content": "hi"}],
    )
    assert [message.stop_reason for message in runner] == ["tool_use", "tool_use"]
    assert "Paris" in asked


def test_a_record_of_zod(client: TestClient) -> None:
    form = {"type": "json_schema", "json_schema": {"name": "r", "schema": RECORD, "strict": True}}
    found = post(client, CHAT, messages=HI, response_format=form, temperature=0, max_tokens=200)
    assert json.loads(found["choices"][0]["message"]["content"]) == {"m": {"k": 1}}


def test_what_is_not_enforced_is_told_everywhere(agent: TestClient) -> None:
    tool = {"name": "odd", "input_schema": ODD}
    found = post(agent, MESSAGES, **ASKED, tools=[tool])
    assert any('"not"' in warning for warning in found["warnings"])
    body = {**ASKED, "tools": [tool], "stream": True}
    told = dict(named(agent.post(MESSAGES, json=body).text))
    assert told["message_delta"]["warnings"] == found["warnings"]
    assert "warnings" not in post(agent, MESSAGES, **ASKED)

    tool = {"type": "function", "function": {"name": "odd", "parameters": ODD}}
    asked: Any = {"messages": HI, "tools": [tool], "options": {"num_predict": 5}}
    assert post(agent, "/api/chat", **asked, stream=False)["warnings"] == found["warnings"]
    assert lines(agent, "/api/chat", **asked)[-1]["warnings"] == found["warnings"]
    asked["tools"] = [F]
    assert "warnings" not in post(agent, "/api/chat", **asked, stream=False)


def test_what_the_system_says_later_does_not_spoil_the_cache(agent: TestClient) -> None:
    """Claude Code tells so which tools there are now; the tools come before what it said first."""
    tools = [{"name": "w", "description": "word " * 60, "input_schema": {"type": "object"}}]
    talk: list[Any] = [*HI, {"role": "assistant", "content": "so"}]
    asked: dict[str, Any] = {"system": "one", "tools": tools, "max_tokens": 1}
    before = post(agent, MESSAGES, **asked, messages=[*talk, *HI])["usage"]
    late = {"role": "system", "content": "The tools are others."}
    usage = post(agent, MESSAGES, **asked, messages=[*talk, *HI, late])["usage"]
    n = before["input_tokens"] + before["cache_read_input_tokens"]
    assert usage["cache_read_input_tokens"] > 0.8 * n
    body: dict[str, Any] = {"tools": [F], "messages": [*HI, late, *talk[1:], late]}
    prompt = post(agent, "/apply-template", **body)["prompt"]
    assert prompt.count(late["content"]) == 2
    assert prompt.index("hi<|im_end|>") < prompt.index(late["content"]) < prompt.index("so<|im_end")
    assert prompt.endswith("assistant\n")


def test_the_log_says_why(model: treadle.Model, capsys: pytest.CaptureFixture[str]) -> None:
    """Claude Code and Codex show words of their own where a prompt is too long."""
    long: Any = {"max_tokens": 5, "messages": [{"role": "user", "content": "secret " * 2000}]}
    for texts in (False, True):
        with running(model, log=True, log_text=texts) as service, talking(service) as client:
            said = post(client, MESSAGES, 400, **long)["error"]["message"]
            post(client, MESSAGES, 400, messages=HI)
            post(client, MESSAGES, **ASKED)
        first, second, third = map(json.loads, capsys.readouterr().err.splitlines())
        assert first["error"]["code"] == "context_length_exceeded"
        assert first["error"]["n_prompt_tokens"] > first["error"]["n_ctx"] == model.n_ctx
        assert second["error"]["param"] == "max_tokens"
        assert ("message" in first["error"]) is texts
        assert not texts or first["error"]["message"] == said
        assert "error" not in third
