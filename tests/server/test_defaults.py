"""What the operator sets for all calls: template, variables, reasoning, sampling, seed."""

from __future__ import annotations

import json
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import pytest
from starlette.testclient import TestClient

import treadle
from tests.server.conftest import running, talking
from treadle.api.options import read_defaults

HELLO = [{"role": "user", "content": "hi"}]
TURNS = "{% for m in messages %}<{{ m.role }}>{{ m.content }}{% endfor %}<assistant>"
OPENED = TURNS + "<think>\n{# </think> #}"  # no variable: every answer begins with reasoning
SWITCHED = TURNS + "{% if thinking %}<think>{% else %}<think></think>{% endif %}"


@contextmanager
def served(model: treadle.Model, **settings: Any) -> Iterator[TestClient]:
    """The app of a model that ``load`` was given such settings for."""
    defaults = read_defaults(**settings)
    sampling = model.sampling
    own = vars(model).pop("template", None)
    vars(model)["template"] = defaults.load_template(model.gguf, model.config.arch.name)
    model.sampling = defaults.sampling_over(sampling)
    try:
        with running(model) as service, talking(service) as client:
            yield client
    finally:
        model.sampling = sampling
        del vars(model)["template"]
        if own is not None:
            vars(model)["template"] = own


def chat(body: dict[str, Any]) -> tuple[str, str]:
    message = body["choices"][0]["message"]
    return message.get("reasoning_content") or "", message["content"]


def responses(body: dict[str, Any]) -> tuple[str, str]:
    parts: dict[str, str] = {"reasoning": "", "message": ""}
    for item in body["output"]:
        parts[item["type"]] += "".join(part["text"] for part in item.get("content") or ())
    return parts["reasoning"], parts["message"]


def messages(body: dict[str, Any]) -> tuple[str, str]:
    said = body["content"]
    thought = "".join(block.get("thinking", "") for block in said)
    return thought, "".join(block.get("text", "") for block in said)


def ollama_chat(body: dict[str, Any]) -> tuple[str, str]:
    return body["message"].get("thinking", ""), body["message"]["content"]


def ollama_generate(body: dict[str, Any]) -> tuple[str, str]:
    return body.get("thinking", ""), body["response"]


MANY = {"options": {"num_predict": 16, "temperature": 0}, "stream": False}
WAYS: list[tuple[str, dict[str, Any], dict[str, Any], Any]] = [
    (
        "/v1/chat/completions",
        {"messages": HELLO, "max_tokens": 16, "temperature": 0},
        {"reasoning_effort": "high"},
        chat,
    ),
    (
        "/v1/chat/completions",
        {"messages": HELLO, "max_tokens": 16, "temperature": 0},
        {"chat_template_kwargs": {"enable_thinking": True}},
        chat,
    ),
    (
        "/v1/responses",
        {"input": "hi", "max_output_tokens": 16, "temperature": 0},
        {"reasoning": {"effort": "high"}},
        responses,
    ),
    (
        "/v1/messages",
        {"messages": HELLO, "max_tokens": 16, "temperature": 0},
        {"thinking": {"type": "enabled", "budget_tokens": 9}},
        messages,
    ),
    ("/api/chat", {"messages": HELLO, **MANY}, {"think": True}, ollama_chat),
    ("/api/generate", {"prompt": "hi", **MANY}, {"think": "high"}, ollama_generate),
]


@pytest.mark.slow
@pytest.mark.parametrize("source", [OPENED, SWITCHED])
def test_reasoning_off_in_every_protocol(model: treadle.Model, source: str) -> None:
    """A call that asks for reasoning has it."""
    with served(model, chat_template=source, reasoning="off") as client:
        for path, body, wish, read in WAYS:
            found = client.post(path, json=body)
            assert found.status_code == 200, found.text
            reasoning, content = read(found.json())
            assert (reasoning, bool(content)) == ("", True), path
            assert "<think>" not in content, path
            reasoning, _ = read(client.post(path, json={**body, **wish}).json())
            assert reasoning, (path, wish)


def test_reasoning_off_in_a_stream(model: treadle.Model) -> None:
    with served(model, chat_template=OPENED, reasoning="off") as client:
        body = {"messages": HELLO, "max_tokens": 16, "temperature": 0, "stream": True}
        lines = client.post("/v1/chat/completions", json=body).text.split("\n\n")
        deltas = [
            choice["delta"]
            for line in lines
            if line.startswith("data: {")
            for choice in json.loads(line.removeprefix("data: "))["choices"]
        ]
        assert not any(delta.get("reasoning_content") for delta in deltas)
        assert "".join(delta.get("content") or "" for delta in deltas).strip()


def test_the_template_is_everywhere(model: treadle.Model) -> None:
    """What is rendered, looked for in answers, and told of it."""
    kwargs = {"mood": "glad"}
    source = SWITCHED + "{{ mood }}"
    given = {"chat_template": source, "chat_template_kwargs": kwargs, "reasoning": "on"}
    with served(model, **given) as client:
        props = client.get("/props").json()
        assert props["chat_template"] == source
        assert props["chat_template_kwargs"] == kwargs
        assert props["treadle"]["template_from"] == "text that was given, by option"
        assert props["treadle"]["reasoning"] == "on"

        def prompt(**fields: Any) -> str:
            body = {"messages": HELLO, **fields}
            return str(client.post("/apply-template", json=body).json()["prompt"])

        assert prompt() == "<user>hi<assistant><think>glad"
        own = {"mood": "sad", "thinking": False}
        assert prompt(chat_template_kwargs=own).endswith("<think></think>sad")
        assert prompt(reasoning_effort="none").endswith("<think></think>glad")
        shown = client.post("/api/show", json={"model": ""}).json()
        assert (shown["template"], "thinking" in shown["capabilities"]) == (source, True)
        count = client.post("/v1/messages/count_tokens", json={"messages": HELLO, "model": ""})
        assert count.json()["input_tokens"] == len(model.tokenizer.encode_prompt(prompt()))


def test_a_named_template_and_its_stop_texts(model: treadle.Model) -> None:
    with served(model, chat_template="plain") as client:
        props = client.get("/props").json()
        assert props["treadle"]["builtin_template"] == "plain"
        assert props["treadle"]["template_from"] == "built-in plain, by option"


def test_sampling_and_seed(model: treadle.Model) -> None:
    """Of calls that do not say; one's own fields win."""
    with served(model, sampling={"temperature": 1.25, "top_k": 7}, seed=21) as client:
        params = client.get("/props").json()["default_generation_settings"]["params"]
        assert (params["temperature"], params["top_k"], params["seed"]) == (1.25, 7, 21)

        def settings(**fields: Any) -> dict[str, Any]:
            body = {"prompt": "def f(", "n_predict": 8, **fields}
            found: dict[str, Any] = client.post("/completion", json=body).json()
            assert found["content"]
            return {**found["generation_settings"], "text": found["content"]}

        first = settings()
        assert (first["temperature"], first["top_k"], first["seed"]) == (1.25, 7, 21)
        assert settings()["text"] == first["text"]
        own = settings(temperature=0.5, seed=22)
        assert (own["temperature"], own["top_k"], own["seed"]) == (0.5, 7, 22)
        body = {"messages": HELLO, "max_tokens": 8}
        one, two = (client.post("/v1/chat/completions", json=body).json() for _ in range(2))
        assert one["choices"][0]["message"] == two["choices"][0]["message"]


def test_a_template_is_told_the_format_of_the_answer(model: treadle.Model) -> None:
    """In every protocol that has one, and where tokens are counted; its own variables win."""
    source = TURNS + "{{ response_format | tojson if response_format }}|{{ tool_choice }}"
    schema = {"type": "object", "properties": {}}
    form = {"type": "json_schema", "json_schema": {"name": "x", "schema": schema}}
    told = "<assistant>" + json.dumps(schema)
    with served(model, chat_template=source) as client:

        def prompt(**fields: Any) -> str:
            body = {"messages": HELLO, **fields}
            return str(client.post("/apply-template", json=body).json()["prompt"])

        assert prompt().endswith("<assistant>|")
        assert prompt(response_format=form).endswith(f"{told}|")
        assert prompt(response_format={"type": "text"}).endswith("<assistant>|")
        own = {"response_format": "mine"}
        assert prompt(response_format=form, chat_template_kwargs=own).endswith('>"mine"|')
        tool = {"type": "function", "function": {"name": "f", "parameters": {"type": "object"}}}
        named = {"type": "function", "function": {"name": "f"}}
        for choice, word in (("auto", "auto"), ("none", "none"), (named, "required")):
            assert prompt(tools=[tool], tool_choice=choice).endswith(f"|{word}")
        n = len(model.tokenizer.encode_prompt(prompt(response_format=form)))
        whole = {"messages": HELLO, "response_format": form, "max_tokens": 9}
        found = client.post("/v1/chat/completions", json=whole).json()
        assert found["usage"]["prompt_tokens"] == n
        anthropic = {"messages": HELLO, "max_tokens": 9}
        anthropic["output_config"] = {"format": {"type": "json_schema", "schema": schema}}
        count = client.post("/v1/messages/count_tokens", json=anthropic).json()
        assert count["input_tokens"] == n
        used = client.post("/v1/messages", json=anthropic).json()["usage"]
        assert used["input_tokens"] + used["cache_read_input_tokens"] == n
        asked = {"input": "hi", "max_output_tokens": 9}
        asked["text"] = {"format": {"type": "json_schema", "name": "x", "schema": schema}}
        used = client.post("/v1/responses", json=asked).json()["usage"]
        assert used["input_tokens"] == n
        whole = {"messages": HELLO, "json_schema": schema, "max_tokens": 9}
        found = client.post("/v1/chat/completions", json=whole).json()
        assert found["usage"]["prompt_tokens"] == n
        ollama = {"messages": HELLO, "format": schema, **MANY}
        assert client.post("/api/chat", json=ollama).json()["prompt_eval_count"] == n
