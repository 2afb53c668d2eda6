"""LiteLLM's calls in process, and by address."""

from __future__ import annotations

import asyncio
import json
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import litellm
import numpy as np
import pytest
from pydantic import BaseModel

import litellm_treadle
import treadle
from shared_tests import Script, run_page, served, written_calls

SAID = [{"role": "user", "content": "What is a list?"}]
WEATHER = {
    "type": "function",
    "function": {
        "name": "weather",
        "description": "The weather of a place.",
        "parameters": {
            "type": "object",
            "properties": {"place": {"type": "string"}},
            "required": ["place"],
        },
    },
}


@pytest.fixture(scope="module")
def model() -> Iterator[treadle.Model]:
    with treadle.load(threads=2, n_sequences=2, deterministic=True) as model:
        yield model


@pytest.fixture(autouse=True)
def registered(model: treadle.Model, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(litellm, "custom_provider_map", [])
    litellm_treadle.register({"demo": model})


def asked(**fields: Any) -> dict[str, Any]:
    usual = {"model": "treadle/demo", "messages": SAID, "temperature": 0, "max_tokens": 8}
    return {**usual, **fields}


def expected(model: treadle.Model, **settings: Any) -> treadle.Reply:
    reply = model.chat(SAID, tools=[], temperature=0, max_tokens=8, **settings)
    reply.finish()
    return reply


def test_a_whole_answer(model: treadle.Model) -> None:
    reply = expected(model, logprobs=2)
    answer = litellm.completion(**asked(logprobs=True, top_logprobs=2, repeat_penalty=1.1))
    choice = answer.choices[0]
    assert choice.message.content == reply.text
    assert choice.finish_reason == "length"
    assert answer.usage.prompt_tokens == len(reply.prompt_ids)
    assert answer.usage.completion_tokens == 8
    assert reply.logprobs is not None
    got = [entry.logprob for entry in choice.logprobs.content]
    assert got == [entry.logprob for entry in reply.logprobs]


def test_a_stream_has_the_answer_and_its_usage(model: treadle.Model) -> None:
    reply = expected(model)
    chunks = list(litellm.completion(**asked(stream=True, stream_options={"include_usage": True})))
    choices = [choice for chunk in chunks for choice in chunk.choices]
    assert "".join(choice.delta.content or "" for choice in choices) == reply.text
    assert [c.finish_reason for c in choices if c.finish_reason] == ["length"]
    whole = litellm.stream_chunk_builder(chunks, messages=SAID)
    assert whole.choices[0].message.content == reply.text
    assert whole.usage.prompt_tokens == len(reply.prompt_ids)
    assert whole.usage.completion_tokens == 8


async def test_async(model: treadle.Model) -> None:
    text = expected(model).text
    threads = set()

    def note(logits: Any, ids: Any) -> Any:
        threads.add(threading.get_ident())
        return logits

    two = await asyncio.gather(*(litellm.acompletion(**asked(custom=note)) for _ in range(2)))
    assert [answer.choices[0].message.content for answer in two] == [text, text]
    stream = await litellm.acompletion(**asked(stream=True))
    pieces = [chunk.choices[0].delta.content or "" async for chunk in stream]
    assert "".join(pieces) == text
    assert threading.get_ident() not in threads


def test_tools(model: treadle.Model) -> None:
    script = Script(model, written_calls(model, weather={"place": "Oslo"}))
    fields = asked(tools=[WEATHER], tool_choice="required", max_tokens=None, custom=script)
    answer = litellm.completion(**fields)
    call = answer.choices[0].message.tool_calls[0]
    assert (call.function.name, json.loads(call.function.arguments)) == (
        "weather",
        {"place": "Oslo"},
    )
    assert answer.choices[0].finish_reason == "tool_calls"
    chunks = list(litellm.completion(**fields, stream=True))
    whole = litellm.stream_chunk_builder(chunks, messages=SAID)
    streamed = whole.choices[0].message.tool_calls[0].function
    assert (streamed.name, json.loads(streamed.arguments)) == ("weather", {"place": "Oslo"})
    result = {"role": "tool", "tool_call_id": call.id, "content": "sunny"}
    again = litellm.completion(
        **asked(messages=[*SAID, answer.choices[0].message, result], tools=[WEATHER])
    )
    assert again.usage.prompt_tokens > answer.usage.prompt_tokens


class Choice(BaseModel):
    colour: bool
    number: int


def test_response_format() -> None:
    schema = {
        "type": "object",
        "properties": {"n": {"enum": [1, 2]}},
        "required": ["n"],
        "additionalProperties": False,
    }
    form = {"type": "json_schema", "json_schema": {"name": "one", "schema": schema}}
    answer = litellm.completion(**asked(response_format=form, max_tokens=50))
    assert json.loads(answer.choices[0].message.content)["n"] in (1, 2)


def test_a_class_as_response_format(model: treadle.Model) -> None:
    script = Script(model, '{"colour": true, "number": 3}')
    answer = litellm.completion(**asked(response_format=Choice, max_tokens=50, custom=script))
    assert Choice.model_validate_json(answer.choices[0].message.content).number == 3


async def test_embedding(model: treadle.Model) -> None:
    want = model.embed(["a list", "b"])
    found = litellm.embedding(model="treadle/demo", input=["a list", "b"])
    np.testing.assert_array_equal([row["embedding"] for row in found.data], want)
    assert found.usage.prompt_tokens == sum(len(model.tokenize(t)) for t in ("a list", "b"))
    short = await litellm.aembedding(
        model="treadle/demo", input="a list", extra_body={"dimensions": 8}
    )
    np.testing.assert_array_equal(
        short.data[0]["embedding"], model.embed("a list", dimensions=8)[0]
    )


def test_errors() -> None:
    with pytest.raises(litellm.ContextWindowExceededError):
        litellm.completion(**asked(messages=[{"role": "user", "content": "word " * 2000}]))
    with pytest.raises(litellm.BadRequestError, match="did you mean 'temperature'"):
        litellm.completion(**asked(temprature=1))
    with pytest.raises(litellm.NotFoundError, match=r"no\.gguf"):
        litellm.completion(**asked(model="treadle/no.gguf"))


def test_by_address(model: treadle.Model) -> None:
    text = expected(model).text
    vector = model.embed("a list")[0]
    with served(model) as url:
        fields = asked(model="openai/any", api_base=f"{url}/v1", api_key="none")
        answer = litellm.completion(**fields)
        assert answer.choices[0].message.content == text
        chunks = list(litellm.completion(**fields, stream=True))
        assert "".join(chunk.choices[0].delta.content or "" for chunk in chunks) == text
        found = litellm.embedding(
            model="openai/any", input=["a list"], api_base=f"{url}/v1", api_key="none"
        )
        got = np.array(found.data[0]["embedding"], np.float32)
        np.testing.assert_allclose(got, vector, rtol=1e-6)


def test_the_page(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(litellm, "custom_provider_map", [])
    run_page("litellm", tmp_path)
