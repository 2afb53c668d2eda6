"""The clients that people use, as judges: what they send is taken, what they get they can read."""

from __future__ import annotations

from contextlib import closing
from typing import TYPE_CHECKING, Any

import numpy as np
import pydantic
import pytest
from starlette.testclient import TestClient

import treadle
from tests.server.conftest import Served

# Elsewhere they are imported where they are needed: each process of a run collects this file, and
# they take seconds.
if TYPE_CHECKING:
    import anthropic
    import openai
    from openai.types.chat import ChatCompletionMessageParam

HI: list[ChatCompletionMessageParam] = [{"role": "user", "content": "hi"}]


@pytest.fixture
def people(client: TestClient) -> openai.OpenAI:
    import openai

    return openai.OpenAI(
        api_key="none", base_url="http://localhost/v1", http_client=client, max_retries=0
    )


def test_openai_chat(people: openai.OpenAI, model: treadle.Model) -> None:
    expected = model.chat([dict(m) for m in HI], temperature=0, max_tokens=8).finish()
    made = people.chat.completions.create(
        model="any",
        messages=HI,
        temperature=0,
        max_completion_tokens=8,
        logprobs=True,
        top_logprobs=1,
    )
    assert made.choices[0].message.content == expected
    assert made.usage is not None
    assert made.usage.completion_tokens == 8
    assert made.usage.prompt_tokens_details is not None
    assert made.usage.prompt_tokens_details.cached_tokens is not None
    logprobs = made.choices[0].logprobs
    assert logprobs is not None
    assert logprobs.content is not None
    assert len(logprobs.content) == 8


@pytest.mark.slow
@pytest.mark.usefixtures("each_piece")
def test_openai_streams(people: openai.OpenAI) -> None:
    said = 'naïve "猫"'
    with people.chat.completions.stream(
        model="any",
        messages=HI,
        stream_options={"include_usage": True},
        extra_body={"grammar": 'root ::= "naïve \\"猫\\""'},
    ) as stream:
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
    import openai

    with pytest.raises(openai.BadRequestError) as caught:
        people.completions.create(model="any", prompt=[5] * 10_000)
    assert caught.value.code == "context_length_exceeded"
    tools: Any = [{"type": "web_search"}]
    with pytest.raises(openai.BadRequestError, match="tools"):
        people.chat.completions.create(model="any", messages=HI, tools=tools)
    with pytest.raises(openai.NotFoundError):
        people.files.list()


@pytest.mark.slow
def test_openai_responses(people: openai.OpenAI) -> None:
    grammar = {"grammar": 'root ::= "naïve 猫"'}
    with people.responses.stream(model="any", input="hi", extra_body=grammar) as stream:
        said = "".join(e.delta for e in stream if e.type == "response.output_text.delta")
        final = stream.get_final_response()
    assert said == final.output_text == "naïve 猫"
    assert final.status == "completed"
    more = people.responses.create(model="any", input="x", previous_response_id=final.id)
    assert more.usage is not None
    assert more.usage.input_tokens > 0


@pytest.fixture
def others(client: TestClient) -> anthropic.Anthropic:
    import anthropic

    return anthropic.Anthropic(
        api_key="none", base_url="http://localhost", http_client=client, max_retries=0
    )


def test_ollama(process: Served) -> None:
    """Its client makes its own connections."""
    import ollama

    server = process("--no-log", "--alias", "mine")
    with closing(ollama.Client(host=server.url)) as client:
        assert [entry.model for entry in client.list().models] == ["mine"]
        talk = [{"role": "user", "content": "hi"}]
        greedy = {"temperature": 0, "num_predict": 3}
        whole = client.chat(model="mine", messages=talk, options=greedy)
        parts = list(client.chat(model="mine", messages=talk, options=greedy, stream=True))
        assert "".join(part.message.content or "" for part in parts) == whole.message.content
        assert (parts[-1].done, parts[-1].done_reason) == (True, "length")
        assert client.generate(model="mine", prompt="x", options=greedy).eval_count == 3
        assert whole.logprobs is None
        measured = client.chat(
            model="mine", messages=talk, options=greedy, logprobs=True, top_logprobs=2
        ).logprobs
        assert measured is not None
        assert [len(entry.top_logprobs or ()) for entry in measured] == [2, 2, 2]
        assert len(client.embed(model="mine", input=["a", "b"]).embeddings) == 2
        assert client.show("mine").details is not None
        with pytest.raises(ollama.ResponseError, match="images"):
            client.generate(model="mine", prompt="x", images=[b"x"], raw=True)
        seen = client.generate(model="mine", prompt="x", images=[b"x"], options=greedy)
        assert seen.eval_count == 3  # a sentence for a model of text stands for the picture


class Verdict(pydantic.BaseModel):
    good: bool


def test_anthropic_parses_a_model(others: anthropic.Anthropic) -> None:
    made = others.messages.parse(
        model="any",
        max_tokens=64,
        messages=[{"role": "user", "content": "hi"}],
        output_format=Verdict,
        output_config={"effort": "low"},
    )
    assert isinstance(made.parsed_output, Verdict)


def test_anthropic_messages(others: anthropic.Anthropic, model: treadle.Model) -> None:
    import anthropic

    talk: Any = HI
    greedy = {"temperature": 0}
    expected = model.chat([dict(m) for m in HI], temperature=0, max_tokens=8).finish()
    made = others.messages.create(model="any", max_tokens=8, messages=talk, extra_body=greedy)
    assert [block.text for block in made.content if block.type == "text"] == [expected]
    with others.messages.stream(
        model="any", max_tokens=8, messages=talk, extra_body=greedy
    ) as stream:
        assert "".join(stream.text_stream) == expected
        final = stream.get_final_message()
    assert final.stop_reason == "max_tokens"
    assert final.usage.output_tokens == 8
    n = others.messages.count_tokens(model="any", messages=talk).input_tokens
    assert n == made.usage.input_tokens + (made.usage.cache_read_input_tokens or 0)
    tool: Any = {"name": "f", "input_schema": {"type": "object", "additionalProperties": False}}
    called = others.messages.create(
        model="any",
        max_tokens=64,
        messages=talk,
        tools=[tool],
        tool_choice={"type": "tool", "name": "f"},
    )
    assert [block.input for block in called.content if block.type == "tool_use"] == [{}]
    with pytest.raises(anthropic.BadRequestError, match="tool_choice"):
        others.messages.create(
            model="any", max_tokens=8, messages=talk, tool_choice={"type": "any"}
        )
