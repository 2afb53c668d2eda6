"""Components of Haystack, alone and in pipelines."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any, Literal

import numpy as np
import pytest
from haystack import Document, Pipeline
from haystack.components.generators.utils import print_streaming_chunk
from haystack.dataclasses import ChatMessage, ImageContent, StreamingChunk
from haystack.tools import Tool
from pydantic import BaseModel

import treadle
from haystack_integrations.components.embedders.treadle import (
    TreadleDocumentEmbedder,
    TreadleTextEmbedder,
)
from haystack_integrations.components.generators.treadle import TreadleChatGenerator
from haystack_integrations.components.generators.treadle.chat_generator import openai_messages
from haystack_integrations.components.rankers.treadle import TreadleRanker
from shared_tests import DATA, Script, run_page, written_calls

QUESTION = "What is a list?"
SHORT = {"temperature": 0, "max_tokens": 8}


@pytest.fixture(scope="module")
def model() -> Iterator[treadle.Model]:
    with treadle.load(threads=2, n_sequences=2, deterministic=True) as model:
        yield model


@pytest.fixture
def reply(model: treadle.Model) -> treadle.Reply:
    made = model.chat([{"role": "user", "content": QUESTION}], tools=[], logprobs=0, **SHORT)
    assert isinstance(made, treadle.Reply)
    made.finish()
    return made


def weather(place: str) -> str:
    """The weather of a place."""
    return f"sunny in {place}"


TOOL = Tool(
    name="weather",
    description="The weather of a place.",
    parameters={
        "type": "object",
        "properties": {"place": {"type": "string"}},
        "required": ["place"],
    },
    function=weather,
)


def test_answers_are_treadles(model: treadle.Model, reply: treadle.Reply) -> None:
    made = TreadleChatGenerator(model, generation_kwargs={**SHORT, "logprobs": True})
    (answer,) = made.run(QUESTION)["replies"]
    assert answer.text == reply.text
    assert answer.meta["finish_reason"] == "length"
    assert answer.meta["model"] == "demo"
    assert answer.meta["usage"]["completion_tokens"] == 8
    assert reply.logprobs is not None
    got = [entry["logprob"] for entry in answer.meta["logprobs"]["content"]]
    assert got == [entry.logprob for entry in reply.logprobs]
    assert made.run([])["replies"] == []
    (one,) = made.run([ChatMessage.from_user(QUESTION)], generation_kwargs={"max_tokens": 1})[
        "replies"
    ]
    assert one.meta["usage"]["completion_tokens"] == 1


def test_streaming(model: treadle.Model, reply: treadle.Reply) -> None:
    chunks: list[StreamingChunk] = []
    made = TreadleChatGenerator(model, SHORT, streaming_callback=chunks.append)
    (answer,) = made.run(QUESTION)["replies"]
    assert answer.text == reply.text == "".join(chunk.content for chunk in chunks)
    assert answer.meta["usage"]["completion_tokens"] == 8
    assert len(chunks) > 4
    assert chunks[0].component_info is not None


async def test_async(model: treadle.Model, reply: treadle.Reply) -> None:
    threads = set()

    def note(logits: Any, ids: Any) -> Any:
        threads.add(threading.get_ident())
        return logits

    made = TreadleChatGenerator(model, {**SHORT, "custom": note})
    two = await asyncio.gather(made.run_async(QUESTION), made.run_async(QUESTION))
    assert [each["replies"][0].text for each in two] == [reply.text] * 2
    pieces = []

    async def take(chunk: StreamingChunk) -> None:
        pieces.append(chunk.content)

    await made.run_async(QUESTION, streaming_callback=take)
    assert "".join(pieces) == reply.text
    assert threads
    assert threading.get_ident() not in threads


def test_tools(model: treadle.Model) -> None:
    script = Script(model, written_calls(model, weather={"place": "Oslo"}))
    made = TreadleChatGenerator(model, {"tool_choice": "required", "custom": script}, tools=[TOOL])
    for callback in (None, lambda chunk: None):
        (answer,) = made.run("Oslo?", streaming_callback=callback)["replies"]
        (call,) = answer.tool_calls
        assert (call.tool_name, call.arguments) == ("weather", {"place": "Oslo"})
        assert answer.meta["finish_reason"] == "tool_calls"
    result = ChatMessage.from_tool("sunny", origin=call)
    talk = [ChatMessage.from_user("Oslo?"), answer, result]
    assert [message["role"] for message in openai_messages(talk)] == ["user", "assistant", "tool"]
    plain = TreadleChatGenerator(model, SHORT)
    assert plain.run(talk, tools=[TOOL])["replies"][0].meta["usage"]["prompt_tokens"] > 0


class Sky(BaseModel):
    state: Literal["clear", "cloudy"]
    degrees: int


def test_structured_data(model: treadle.Model) -> None:
    settings = {"response_format": Sky, "temperature": 0, "max_tokens": 300}
    made = TreadleChatGenerator(model, settings)
    for generator in (made, TreadleChatGenerator.from_dict(made.to_dict())):
        (answer,) = generator.run("Blue, 20 degrees")["replies"]
        assert Sky.model_validate_json(answer.text or "").state in ("clear", "cloudy")


def test_pictures_and_reasoning_in_messages() -> None:
    path = DATA / "media" / "media" / "plain.png"
    picture = ImageContent.from_file_path(path)
    past = ChatMessage.from_assistant("Yes.", reasoning="It is easy.")
    made = openai_messages([ChatMessage.from_user(content_parts=["What?", picture]), past])
    assert made[0]["content"][1]["image_url"]["url"].startswith("data:image/png;base64,")
    assert made[1]["reasoning_content"] == "It is easy."


def test_embedders(model: treadle.Model) -> None:
    settings: dict[str, Any] = {"prefix": "text: ", "dimensions": 16}
    text = TreadleTextEmbedder(model, **settings).run("a list")
    want = model.embed(["text: a list"], dimensions=16)[0]
    np.testing.assert_array_equal(text["embedding"], want)
    assert text["meta"] == {"model": "demo"}
    documents = [Document(content="a list", meta={"title": "Python"}), Document(content="b")]
    made = TreadleDocumentEmbedder(model, meta_fields_to_embed=["title"], **settings)
    embedded = made.run(documents)["documents"]
    want = model.embed(["text: Python\na list", "text: b"], dimensions=16)
    np.testing.assert_array_equal([document.embedding for document in embedded], want)
    assert documents[0].embedding is None
    assert made.run([])["documents"] == []
    with pytest.raises(TypeError, match="TreadleTextEmbedder"):
        made.run("a list")  # type: ignore[arg-type]
    with pytest.raises(TypeError, match="TreadleDocumentEmbedder"):
        TreadleTextEmbedder(model).run(documents)  # type: ignore[arg-type]


async def test_embedders_async(model: treadle.Model) -> None:
    text = await TreadleTextEmbedder(model).run_async("a")
    embedded = await TreadleDocumentEmbedder(model).run_async([Document(content="a")])
    assert text["embedding"] == embedded["documents"][0].embedding


def test_ranker(model: treadle.Model, monkeypatch: pytest.MonkeyPatch) -> None:
    def rerank(query: str, documents: list[str], *, truncate: bool) -> Any:
        return np.array([len(text) for text in documents], np.float32)

    monkeypatch.setattr(model, "rerank", rerank, raising=False)
    documents = [Document(content=text) for text in ("aa", "a", "aaa")]
    best = TreadleRanker(model, top_k=2).run("length", documents)["documents"]
    assert [(each.content, each.score) for each in best] == [("aaa", 3.0), ("aa", 2.0)]
    assert len(TreadleRanker(model).run("length", documents, top_k=1)["documents"]) == 1


def test_a_pipeline_is_written_and_read(model: treadle.Model) -> None:
    options = {"threads": 1, "context": 256}
    path = str(model.path)
    made = Pipeline()
    made.add_component(
        "chat",
        TreadleChatGenerator(
            path, SHORT, print_streaming_chunk, tools=[TOOL], load_options=options
        ),
    )
    made.add_component("text", TreadleTextEmbedder(path, prefix="x", load_options=options))
    made.add_component("documents", TreadleDocumentEmbedder(path, load_options=options))
    made.add_component("ranker", TreadleRanker(path, top_k=3, load_options=options))
    again = Pipeline.loads(made.dumps(), allowed_modules=[weather.__module__])
    assert again.to_dict() == made.to_dict()
    chat = again.get_component("chat")
    chat.warm_up()
    again.get_component("text").warm_up()
    assert chat.completions.model.n_ctx == 256
    assert again.get_component("text").completions.model is chat.completions.model
    assert chat.streaming_callback is print_streaming_chunk
    assert chat.tools[0].invoke(place="Oslo") == "sunny in Oslo"
    loaded = TreadleChatGenerator(model).to_dict()
    assert loaded["init_parameters"]["model"] == path


def test_the_page(tmp_path: Path) -> None:
    run_page("haystack", tmp_path)
