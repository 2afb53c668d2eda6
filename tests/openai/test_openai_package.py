"""The real ``openai`` package, whose clients ask a model of this process."""

from __future__ import annotations

import asyncio
from collections.abc import Iterator
from pathlib import Path
from typing import Any, Literal

import openai
import pytest
from pydantic import BaseModel

import treadle
from tests.chat.tools.families import HERMES_TEMPLATE
from tests.server.pictures import data_url
from tests.server.pictures import load as load_with_pictures

HI: Any = [{"role": "user", "content": "hi"}]


class Colour(BaseModel):
    name: Literal["red", "green"]
    dark: bool


@pytest.fixture(scope="module")
def model(one_kernel_cache: Path) -> Iterator[treadle.Model]:
    with treadle.load(
        threads=2, context=512, n_sequences=4, deterministic=True, chat_template=HERMES_TEMPLATE
    ) as model:
        yield model


@pytest.fixture(scope="module")
def client(model: treadle.Model) -> Iterator[openai.OpenAI]:
    with treadle.openai.OpenAI(model, max_retries=0) as client:
        yield client


def test_chat(client: openai.OpenAI, model: treadle.Model) -> None:
    expected = model.chat(HI, temperature=0, max_tokens=8).finish()
    made = client.chat.completions.create(
        model="any",
        messages=HI,
        temperature=0,
        max_completion_tokens=8,
        n=2,
        logprobs=True,
        top_logprobs=2,
    )
    assert [choice.message.content for choice in made.choices] == [expected, expected]
    assert made.choices[0].logprobs is not None
    assert made.choices[0].logprobs.content is not None
    assert [len(entry.top_logprobs) for entry in made.choices[0].logprobs.content] == [2] * 8
    assert made.usage is not None
    assert made.usage.completion_tokens == 16
    first = expected[: len(expected) // 2]
    cut = client.chat.completions.create(
        model="any", messages=HI, temperature=0, max_tokens=8, stop=expected[len(first) :]
    )
    assert cut.choices[0].message.content == first


def test_streams(client: openai.OpenAI) -> None:
    said = 'naïve "猫"'
    with client.chat.completions.stream(
        model="any", messages=HI, extra_body={"grammar": 'root ::= "naïve \\"猫\\""'}
    ) as stream:
        deltas = [event.delta for event in stream if event.type == "content.delta"]
    assert "".join(deltas) == said == stream.get_final_completion().choices[0].message.content


def test_parsed(client: openai.OpenAI) -> None:
    made = client.chat.completions.parse(model="any", messages=HI, response_format=Colour)
    assert isinstance(made.choices[0].message.parsed, Colour)
    response = client.responses.parse(model="any", input="hi", text_format=Colour)
    assert isinstance(response.output_parsed, Colour)
    assert client.responses.retrieve(response.id).output_text == response.output_text


def test_tools(client: openai.OpenAI) -> None:
    tool = openai.pydantic_function_tool(Colour, name="paint")
    made = client.chat.completions.create(
        model="any", messages=HI, tools=[tool], tool_choice="required", parallel_tool_calls=False
    )
    calls = made.choices[0].message.tool_calls
    assert calls is not None
    (call,) = calls
    assert call.type == "function"
    assert call.function.name == "paint"
    Colour.model_validate_json(call.function.arguments)


def test_vectors_and_models(client: openai.OpenAI, model: treadle.Model) -> None:
    made = client.embeddings.create(model="any", input=["a", "bc"])
    assert [each.embedding for each in made.data] == model.embed(["a", "bc"]).tolist()
    assert [each.id for each in client.models.list()] == ["demo"]
    text = client.completions.create(model="any", prompt="import ", temperature=0, max_tokens=4)
    assert text.choices[0].text == model.generate("import ", temperature=0, max_tokens=4).finish()


def test_errors(client: openai.OpenAI) -> None:
    with pytest.raises(openai.BadRequestError, match="top_logprobs: logprobs must be true"):
        client.chat.completions.create(model="any", messages=HI, top_logprobs=2)
    with pytest.raises(openai.NotFoundError, match="not an endpoint of treadle"):
        client.files.list()
    with pytest.raises(openai.APITimeoutError):
        client.with_options(timeout=1e-4).completions.create(model="any", prompt="a")


def test_coroutines(model: treadle.Model) -> None:
    """One client, in two event loops."""
    client = treadle.openai.AsyncOpenAI(model)

    async def ask() -> list[str | None]:
        made = await asyncio.gather(
            *(
                client.chat.completions.create(
                    model="any", messages=HI, temperature=0, max_tokens=n
                )
                for n in (3, 8)
            )
        )
        stream = await client.chat.completions.create(
            model="any", messages=HI, temperature=0, max_tokens=8, stream=True
        )
        pieces = [chunk.choices[0].delta.content or "" async for chunk in stream]
        return [*(each.choices[0].message.content for each in made), "".join(pieces)]

    expected = [model.chat(HI, temperature=0, max_tokens=n).finish() for n in (3, 8, 8)]
    assert asyncio.run(ask()) == expected
    assert asyncio.run(ask()) == expected
    asyncio.run(client.close())


@pytest.mark.slow
def test_pictures(data: Path) -> None:
    picture = data / "media" / "media" / "plain.png"
    with load_with_pictures(data) as model, treadle.openai.OpenAI(model) as client:
        ours = [{"type": "image", "path": str(picture)}, {"type": "text", "text": "What is it?"}]
        expected = model.chat(
            [{"role": "user", "content": ours}], temperature=0, max_tokens=4
        ).finish()
        address: Any = {"type": "image_url", "image_url": {"url": data_url(picture)}}
        made = client.chat.completions.create(
            model="any",
            messages=[
                {"role": "user", "content": [address, {"type": "text", "text": "What is it?"}]}
            ],
            temperature=0,
            max_tokens=4,
        )
        assert made.choices[0].message.content == expected
