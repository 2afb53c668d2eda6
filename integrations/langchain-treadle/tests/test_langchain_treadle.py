"""Behaviour that LangChain's standard tests leave open."""

from __future__ import annotations

import asyncio
import base64
import threading
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from langchain_core.documents import Document
from langchain_core.messages import HumanMessage
from pydantic import BaseModel, ValidationError

import treadle
from langchain_treadle import ChatTreadle, TreadleEmbeddings, TreadleLLM, TreadleReranker
from langchain_treadle.messages import openai_messages
from shared_tests import DATA, Script, run_page, written_calls

MODEL = treadle.load(threads=2, n_sequences=2, deterministic=True)
QUESTION = [HumanMessage("What is a list?")]
# As Qwen 3 has it: the model may reason, between marks.
THINKS = (
    "{% for m in messages %}{{ m.role }}: {{ m.content }}\n{% endfor %}assistant: "
    "{% if enable_thinking is defined and not enable_thinking %}<think>\n\n</think>\n\n{% endif %}"
)


def chat(**settings: Any) -> ChatTreadle:
    return ChatTreadle(model=MODEL, temperature=0, max_tokens=8, **settings)


def expected(**settings: Any) -> treadle.Reply:
    """The same answer by treadle itself."""
    said = [{"role": "user", "content": "What is a list?"}]
    reply = MODEL.chat(said, tools=[], temperature=0, max_tokens=8, **settings)
    reply.finish()
    return reply


def test_answers_are_treadles() -> None:
    reply = expected()
    answer = chat().invoke(QUESTION)
    assert answer.content == reply.text
    assert answer.usage_metadata is not None
    assert answer.usage_metadata["input_tokens"] == len(reply.prompt_ids)
    assert answer.usage_metadata["output_tokens"] == len(reply.ids) == 8
    assert answer.response_metadata["finish_reason"] == "length"
    assert answer.response_metadata["model_name"] == "demo"
    assert "".join(chunk.text for chunk in chat().stream(QUESTION)) == reply.text


async def test_the_event_loop_stays_free_and_tasks_share_batches() -> None:
    loop = threading.get_ident()
    threads = set()

    def note(logits: Any, ids: Any) -> Any:
        threads.add(threading.get_ident())
        return logits

    answers = await asyncio.gather(*(chat(custom=note).ainvoke(QUESTION) for _ in range(2)))
    assert [answer.content for answer in answers] == [expected().text] * 2
    pieces = [chunk.text async for chunk in chat(custom=note).astream(QUESTION)]
    assert "".join(pieces) == expected().text
    assert threads
    assert loop not in threads


async def test_a_task_that_is_cancelled_ends_its_answer() -> None:
    begun = asyncio.Event()
    loop = asyncio.get_running_loop()
    n_steps = 0

    def note(logits: Any, ids: Any) -> Any:
        nonlocal n_steps
        n_steps += 1
        loop.call_soon_threadsafe(begun.set)
        return logits

    endless = ChatTreadle(model=MODEL, custom=note, ignore_eos=True)
    task = asyncio.create_task(endless.ainvoke(QUESTION))
    await begun.wait()
    task.cancel()
    with pytest.raises(asyncio.CancelledError):
        await task
    seen = n_steps
    chat().invoke(QUESTION)  # steps of the model, in which the cancelled answer has no part
    assert n_steps == seen < 900


def test_logprobs() -> None:
    reply = expected(logprobs=2)
    assert reply.logprobs is not None
    entries = [entry.as_dict() for entry in reply.logprobs]
    answer = chat(logprobs=True, top_logprobs=2).invoke(QUESTION)
    assert answer.response_metadata["logprobs"]["content"] == entries
    streamed: Any = None
    for chunk in chat(logprobs=True, top_logprobs=2).stream(QUESTION):
        streamed = chunk if streamed is None else streamed + chunk
    assert streamed.response_metadata["logprobs"]["content"] == entries


def test_stop() -> None:
    whole = expected().text
    word = whole[len(whole) // 2 :][:2]
    before = whole[: whole.index(word)]
    assert chat(stop_sequences=[word]).invoke(QUESTION).content == before
    answer = chat(stop=["never"]).invoke(QUESTION, stop=[word])
    assert answer.content == before
    assert answer.response_metadata["finish_reason"] == "stop"


def test_settings_by_name() -> None:
    model = ChatTreadle(repeat_penalty=1.3, context=256, threads=1, api_key="none", timeout=3)
    assert model.model_kwargs == {"repeat_penalty": 1.3}
    assert model.load_options == {"context": 256, "threads": 1}
    assert model.loaded.n_ctx == 256
    assert ChatTreadle(context=256, threads=1).loaded is model.loaded
    with pytest.raises(ValidationError, match="did you mean 'temperature'"):
        ChatTreadle(temprature=0)
    with pytest.raises(TypeError, match="did you mean 'temperature'"):
        chat().invoke(QUESTION, temprature=0)


class Place(BaseModel):
    """A place on a map."""

    name: str
    height: int


def test_structured_output_is_valid_though_the_model_was_not_trained_for_it() -> None:
    model = ChatTreadle(model=MODEL, temperature=0, max_tokens=200)
    # The small model writes what it likes, as far as the grammar allows.
    schema = {
        "title": "Choice",
        "type": "object",
        "properties": {
            "colour": {"enum": ["red", "green"]},
            "n": {"type": "integer", "maximum": 9},
        },
        "required": ["colour", "n"],
        "additionalProperties": False,
    }
    found = model.with_structured_output(schema).invoke("x")
    assert isinstance(found, dict)
    assert found.keys() == {"colour", "n"}
    cut = ChatTreadle(model=MODEL, max_tokens=2).with_structured_output(Place, include_raw=True)
    answer = cut.invoke("x")
    assert isinstance(answer, dict)
    assert answer["parsed"] is None
    assert answer["parsing_error"] is not None
    with pytest.raises(ValueError, match="method='yaml'"):
        model.with_structured_output(Place, method="yaml")  # type: ignore[arg-type]


def test_a_call_that_is_cut_is_an_invalid_call() -> None:
    text = written_calls(MODEL, place={"name": "Oslo", "height": 23})
    n_whole = len(MODEL.tokenize(text, bos=False))
    script = {"custom": Script(MODEL, text)}
    tool = {"name": "place", "description": "", "parameters": Place.model_json_schema()}
    whole = ChatTreadle(model=MODEL, **script).bind_tools([tool]).invoke("x")
    assert whole.tool_calls[0]["args"] == {"name": "Oslo", "height": 23}
    assert whole.response_metadata["finish_reason"] == "tool_calls"
    half = ChatTreadle(model=MODEL, **script, max_tokens=n_whole // 2 + 8)
    answer = half.bind_tools([tool]).invoke("x")
    assert not answer.tool_calls
    assert answer.invalid_tool_calls[0]["name"] == "place"


def test_reasoning_comes_and_goes_back() -> None:
    with treadle.load(chat_template=THINKS, threads=1) as model:
        script = Script(model, "<think>\nIt is easy.\n</think>\n\nYes.")
        whole = ChatTreadle(model=model, custom=script).invoke("Is it?")
        streamed: Any = None
        for chunk in ChatTreadle(model=model, custom=script).stream("Is it?"):
            streamed = chunk if streamed is None else streamed + chunk
    for answer in (whole, streamed):
        assert answer.content == "Yes."
        assert answer.additional_kwargs == {"reasoning_content": "It is easy."}
    assert openai_messages([whole]) == [
        {"role": "assistant", "content": "Yes.", "reasoning_content": "It is easy."}
    ]


def test_pictures_are_read_in_each_form() -> None:
    folder = DATA / "media"
    picture = base64.b64encode((folder / "media" / "plain.png").read_bytes()).decode()
    forms: list[Any] = [
        {"type": "image_url", "image_url": {"url": f"data:image/png;base64,{picture}"}},
        {"type": "image", "base64": picture, "mime_type": "image/png"},
        {
            "type": "image",
            "source": {"type": "base64", "media_type": "image/png", "data": picture},
        },
    ]
    mmproj = folder / "gemma3" / "mmproj.gguf"
    model = ChatTreadle(
        model=str(folder / "gemma3" / "text.gguf"), mmproj=str(mmproj), max_tokens=4, temperature=0
    )
    answers = [
        model.invoke([HumanMessage([{"type": "text", "text": "What is it?"}, form])])
        for form in forms
    ]
    counts = {answer.usage_metadata["input_tokens"] for answer in answers if answer.usage_metadata}
    assert len(counts) == 1
    assert counts.pop() > model.invoke("What is it?").usage_metadata["input_tokens"]  # type: ignore[index]
    assert len({answer.text for answer in answers}) == 1


async def test_completion() -> None:
    expected = MODEL.generate("def add(a, b):", max_tokens=6, temperature=0).finish()
    model = TreadleLLM(model=MODEL, max_tokens=6, temperature=0)
    assert model.invoke("def add(a, b):") == expected
    assert "".join(model.stream("def add(a, b):")) == expected
    assert await model.ainvoke("def add(a, b):") == expected
    assert "".join([piece async for piece in model.astream("def add(a, b):")]) == expected
    digits = TreadleLLM(model=MODEL, regex="[0-9]{3}").invoke("x = ")
    assert digits.isdecimal()
    assert model.get_num_tokens("def add") == len(MODEL.tokenize("def add", bos=False))


def test_embeddings() -> None:
    model = TreadleEmbeddings(
        model=MODEL, query_prompt="query: ", document_prompt="text: ", dimensions=16
    )
    documents = np.array(model.embed_documents(["a", "b"]))
    want = MODEL.embed(["text: a", "text: b"], dimensions=16)
    np.testing.assert_array_equal(documents, want)
    np.testing.assert_array_equal(
        model.embed_query("a"), MODEL.embed(["query: a"], dimensions=16)[0]
    )
    assert model.embed_documents([]) == []


def test_reranker(monkeypatch: pytest.MonkeyPatch) -> None:
    def rerank(query: str, documents: list[str], *, truncate: bool) -> Any:
        assert (query, truncate) == ("length", True)
        return np.array([len(text) for text in documents], np.float32)

    monkeypatch.setattr(MODEL, "rerank", rerank, raising=False)
    documents = [Document(text, metadata={"page": 1}) for text in ("aa", "a", "aaaa", "aaa")]
    best = TreadleReranker(model=MODEL).compress_documents(documents, "length")
    assert [(d.page_content, d.metadata["relevance_score"]) for d in best] == [
        ("aaaa", 4.0),
        ("aaa", 3.0),
        ("aa", 2.0),
    ]
    assert best[0].metadata["page"] == 1
    assert "relevance_score" not in documents[2].metadata


def test_the_page(tmp_path: Path) -> None:
    run_page("langchain", tmp_path)
