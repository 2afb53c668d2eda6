"""Answers whose beginning the caller gives, as the last message, which is the assistant's."""

from __future__ import annotations

import json
from collections.abc import Iterator
from typing import Any

import pytest
from starlette.testclient import TestClient

import treadle
from tests.chat.tools.families import HERMES_TEMPLATE, TEMPLATES
from tests.server.conftest import running, talking, with_template
from tests.server.test_openai import post

CHAT = "/v1/chat/completions"
PROMPT = "/apply-template"
HI: list[Any] = [{"role": "user", "content": "hi"}]
KNOWS = HERMES_TEMPLATE + "{# </think> #}"
OWN = {
    "plain": HERMES_TEMPLATE,
    "knows": KNOWS,  # reasoning, which the model opens
    "opens": KNOWS.replace("assistant\\n' }}{% endif", "assistant\\n<think>\\n' }}{% endif"),
    "channels": TEMPLATES["harmony"],
    "recipient": "{{ tools }}{% for m in messages %}{{ m.role }}:{{ m.content or '' }}"
    "{% for c in m.tool_calls or [] %}>>>{{ c.function.name }}\n{{ c.function.arguments | tojson }}"
    "{% endfor %}<|e|>{% endfor %}{% if add_generation_prompt %}assistant:>>>{% endif %}",
}
ANALYSIS = "<|channel|>analysis<|message|>hm<|end|><|start|>assistant"
FINAL = "<|channel|>final<|message|>"


@pytest.fixture(scope="module", params=OWN)
def begun(model: treadle.Model, request: pytest.FixtureRequest) -> Iterator[tuple[str, TestClient]]:
    own = with_template(model, OWN[request.param])
    with running(own) as service, talking(service) as client:
        yield request.param, client


def test_prompts(begun: tuple[str, TestClient]) -> None:
    """Reasoning is closed before a content, and a content is in its channel."""
    name, client = begun

    def added(**last: Any) -> str:
        asked: str = post(client, PROMPT, messages=HI)["prompt"]
        whole: str = post(client, PROMPT, messages=[*HI, {"role": "assistant", **last}])["prompt"]
        assert whole.startswith(asked)
        return whole.removeprefix(asked)

    before = {"opens": "\n</think>\n\n", "channels": FINAL, "recipient": "all\n"}.get(name, "")
    assert added(content="The") == f"{before}The"
    assert added(content="") == added(content=None) == ""
    behind = {
        "knows": "<think>\nhm\n</think>\n\n",
        "opens": "hm\n</think>\n\n",
        "channels": f"{ANALYSIS}{FINAL}",
    }.get(name, before)
    assert added(content="The", reasoning="hm") == f"{behind}The"
    if name in ("knows", "opens"):  # words that open reasoning
        assert post(client, PROMPT, messages=[*HI, {"role": "assistant", "content": "<think>\n"}])[
            "prompt"
        ].endswith("assistant\n<think>\n")
    if name in ("knows", "opens", "channels"):
        assert added(content=None, reasoning_content="hm") == behind


def test_answers_go_on_where_they_were_begun(begun: tuple[str, TestClient]) -> None:
    """With its first line break, and no reasoning or header, also where a schema holds."""
    _, client = begun
    talk = [*HI, {"role": "assistant", "content": "A list:"}]
    for said in ("\n1. a", "<|channel|>"):
        body: dict[str, Any] = {"messages": talk, "grammar": f"root ::= {json.dumps(said)}"}
        assert post(client, CHAT, **body)["choices"][0]["message"]["content"] == said
    thought = [*HI, {"role": "assistant", "content": None, "reasoning": "hm"}]
    body = {"messages": thought, "grammar": 'root ::= "so"'}
    assert post(client, CHAT, **body)["choices"][0]["message"]["content"] == "so"
    form = {"type": "json_schema", "json_schema": {"name": "x", "schema": {"enum": [5]}}}
    made = post(client, CHAT, messages=talk, response_format=form, reasoning_budget=5)
    assert made["choices"][0]["message"] == {"role": "assistant", "content": "5"}


def test_reasoning_goes_on(begun: tuple[str, TestClient]) -> None:
    """Where the call says so: it is not closed, and what comes first is reasoning."""
    name, client = begun
    talk = [*HI, {"role": "assistant", "content": None, "reasoning_content": "hm"}]
    body: dict[str, Any] = {"messages": talk, "continue_final_message": "reasoning_content"}
    if name in ("plain", "recipient"):
        error = post(client, CHAT, 400, **body)["error"]
        assert error["param"] == "continue_final_message"
        assert "the model's chat template has no reasoning" in error["message"]
        return
    asked = post(client, PROMPT, messages=HI)["prompt"]
    of_channels = ANALYSIS.partition("<|end|>")[0]
    added = {"knows": "<think>\nhm", "opens": "hm", "channels": of_channels}[name]
    assert post(client, PROMPT, **body)["prompt"] == f"{asked}{added}"
    made = post(client, CHAT, **body, max_tokens=8)["choices"][0]["message"]
    assert made["reasoning_content"]
    assert not made["content"]
    form = {"type": "json_schema", "json_schema": {"name": "x", "schema": {"enum": [5]}}}
    made = post(client, CHAT, **body, response_format=form, reasoning_budget=3)
    assert made["choices"][0]["message"]["content"] == "5"
    assert made["choices"][0]["message"]["reasoning_content"]


def test_only_reasoning_alone_goes_on(begun: tuple[str, TestClient]) -> None:
    """The rest is refused; a content that goes on may be asked for by its name, too."""
    _, client = begun
    last = {"role": "assistant", "content": "so", "reasoning_content": "hm"}
    for talk in (HI, [*HI, last], [*HI, {**last, "reasoning_content": ""}]):
        body = {"messages": talk, "continue_final_message": "reasoning_content"}
        assert "no reasoning to continue" in post(client, CHAT, 400, **body)["error"]["message"]
    post(client, CHAT, 400, messages=[*HI, last], continue_final_message="thoughts")
    both = {"continue_final_message": True, "add_generation_prompt": True}
    refused = post(client, PROMPT, 400, messages=[*HI, last], **both)["error"]["message"]
    assert "exclude each other" in refused
    prompts = [
        post(client, PROMPT, messages=[*HI, last], continue_final_message=way)["prompt"]
        for way in (True, "content")
    ]
    assert prompts[0] == prompts[1]


def test_a_call_is_whole(begun: tuple[str, TestClient]) -> None:
    """It is no beginning: it was left out of the prompt."""
    name, client = begun
    call = {"id": "a", "type": "function", "function": {"name": "f", "arguments": '{"x": 7}'}}
    talk = [*HI, {"role": "assistant", "content": None, "tool_calls": [call]}]
    prompt = post(client, PROMPT, messages=talk)["prompt"]
    end = post(client, PROMPT, messages=HI)["prompt"][-4:]
    assert "7" in prompt
    assert prompt.endswith(end), name
