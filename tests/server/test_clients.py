"""The clients that people use, as judges: what they send is taken, what they get they can read."""

from __future__ import annotations

from typing import Any

import numpy as np
import openai
import pytest
from openai.types.chat import ChatCompletionMessageParam
from starlette.testclient import TestClient

import treadle

HI: list[ChatCompletionMessageParam] = [{"role": "user", "content": "hi"}]


@pytest.fixture
def people(client: TestClient) -> openai.OpenAI:
    return openai.OpenAI(
        api_key="none", base_url="http://localhost/v1", http_client=client, max_retries=0
    )


def test_openai_chat(people: openai.OpenAI, model: treadle.Model) -> None:
    expected = model.chat([dict(m) for m in HI], temperature=0, max_tokens=8).finish()
    made = people.chat.completions.create(
        model="any", messages=HI, temperature=0, max_completion_tokens=8, logprobs=True,
        top_logprobs=1,
    )  # fmt: skip
    assert made.choices[0].message.content == expected
    assert made.usage is not None
    assert made.usage.completion_tokens == 8
    assert made.usage.prompt_tokens_details is not None
    assert made.usage.prompt_tokens_details.cached_tokens is not None
    logprobs = made.choices[0].logprobs
    assert logprobs is not None
    assert logprobs.content is not None
    assert len(logprobs.content) == 8


def test_openai_streams(people: openai.OpenAI) -> None:
    said = 'naïve "猫"'
    with people.chat.completions.stream(
        model="any", messages=HI, stream_options={"include_usage": True},
        extra_body={"grammar": 'root ::= "naïve \\"猫\\""'},
    ) as stream:  # fmt: skip
        deltas = [event.delta for event in stream if event.type == "content.delta"]
        final = stream.get_final_completion()
    assert "".join(deltas) == said == final.choices[0].message.content
    assert len(deltas) > 2
    assert final.usage is not None
    assert final.usage.completion_tokens >= len(deltas)


def test_openai_completions(people: openai.OpenAI) -> None:
    made = people.completions.create(model="any", prompt=["def f(", "import "], max_tokens=4, n=2)
    assert [choice.index for choice in made.choices] == [0, 1, 2, 3]
    parts = people.completions.create(model="any", prompt="def f(", max_tokens=4, stream=True)
    assert [part.choices[0].finish_reason for part in parts][-1] == "length"


def test_openai_embeddings(people: openai.OpenAI, model: treadle.Model) -> None:
    """It asks for base64 where numpy is installed, and unpacks it."""
    made = people.embeddings.create(model="any", input=["def f(", "x"])
    rows = np.array([entry.embedding for entry in made.data], np.float32)
    assert np.array_equal(rows, model.embed(["def f(", "x"]))


def test_openai_models(people: openai.OpenAI) -> None:
    assert [entry.id for entry in people.models.list()] == ["demo"]


def test_openai_errors(people: openai.OpenAI) -> None:
    with pytest.raises(openai.BadRequestError) as caught:
        people.completions.create(model="any", prompt=[5] * 10_000)
    assert caught.value.code == "context_length_exceeded"
    tools: Any = [{"type": "function", "function": {"name": "f", "parameters": {}}}]
    with pytest.raises(openai.BadRequestError, match="tools"):
        people.chat.completions.create(model="any", messages=HI, tools=tools)
    with pytest.raises(openai.NotFoundError):
        people.files.list()
