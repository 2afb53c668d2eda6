"""LlamaIndex's calls of an LLM, in process."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any, Literal

import pytest
from llama_index.core.base.llms.types import (
    ChatMessage,
    ImageBlock,
    MessageRole,
    TextBlock,
    ThinkingBlock,
    ToolCallBlock,
)
from llama_index.core.program.function_program import FunctionCallingProgram
from llama_index.core.prompts import PromptTemplate
from llama_index.core.tools import FunctionTool
from pydantic import BaseModel, ValidationError

import treadle
from llama_index.llms.treadle import Treadle
from llama_index.llms.treadle.messages import openai_messages
from shared_tests import DATA, Script, run_page, written_calls

QUESTION = "What is a list?"
SAID = [ChatMessage(role="user", content=QUESTION)]


@pytest.fixture(scope="module")
def model() -> Iterator[treadle.Model]:
    with treadle.load(threads=2, n_sequences=2, deterministic=True) as model:
        yield model


@pytest.fixture
def reply(model: treadle.Model) -> treadle.Reply:
    said = [{"role": "user", "content": QUESTION}]
    made = model.chat(said, tools=[], temperature=0, max_tokens=8, logprobs=1)
    made.finish()
    return made


def llm(model: treadle.Model, **settings: Any) -> Treadle:
    return Treadle(model, temperature=0, max_tokens=8, **settings)


def scripted(model: treadle.Model, *answers: str) -> Treadle:
    return Treadle(model, additional_kwargs={"custom": Script(model, *answers)})


def test_answers_are_treadles(model: treadle.Model, reply: treadle.Reply) -> None:
    made = llm(model)
    answer = made.chat(SAID, logprobs=True, top_logprobs=1)
    assert answer.message.content == reply.text
    assert answer.message.role is MessageRole.ASSISTANT
    assert answer.additional_kwargs["completion_tokens"] == 8
    assert answer.additional_kwargs["prompt_tokens"] == len(reply.prompt_ids)
    assert reply.logprobs is not None
    assert answer.logprobs is not None
    assert [each[0].logprob for each in answer.logprobs] == [e.logprob for e in reply.logprobs]
    assert made.complete(QUESTION).text == reply.text
    streamed = list(made.stream_chat(SAID))
    assert "".join(each.delta or "" for each in streamed) == reply.text
    assert streamed[-1].message.content == reply.text
    assert streamed[-1].additional_kwargs["completion_tokens"] == 8
    assert [each.text for each in made.stream_complete(QUESTION)][-1] == reply.text


async def test_async(model: treadle.Model, reply: treadle.Reply) -> None:
    threads = set()

    def note(logits: Any, ids: Any) -> Any:
        threads.add(threading.get_ident())
        return logits

    made = llm(model, additional_kwargs={"custom": note})
    two = await asyncio.gather(made.achat(SAID), made.acomplete(QUESTION))
    assert two[0].message.content == two[1].text == reply.text
    streamed = [each async for each in await made.astream_chat(SAID)]
    assert "".join(each.delta or "" for each in streamed) == reply.text
    texts = [each.text async for each in await made.astream_complete(QUESTION)]
    assert texts[-1] == reply.text
    assert threads
    assert threading.get_ident() not in threads


async def test_a_base_model_continues_the_text(model: treadle.Model) -> None:
    text = model.generate("def add(a, b):", temperature=0, max_tokens=8).finish()
    made = llm(model, is_chat_model=False)
    assert not made.metadata.is_chat_model
    answer = made.complete("def add(a, b):")
    assert answer.text == text
    assert answer.additional_kwargs["completion_tokens"] == 8
    assert (await made.acomplete("def add(a, b):")).text == text
    assert [each.text for each in made.stream_complete("def add(a, b):")][-1] == text
    pieces = [each.delta or "" async for each in await made.astream_complete("def add(a, b):")]
    assert "".join(pieces) == text


def weather(place: str) -> str:
    """The weather of a place."""
    return f"sunny in {place}"


TOOL = FunctionTool.from_defaults(weather)


async def test_tools(model: treadle.Model) -> None:
    call = written_calls(model, weather={"place": "Oslo"})
    made = scripted(model, call)
    answer = made.chat_with_tools([TOOL], user_msg="Oslo?", tool_required=True)
    (found,) = made.get_tool_calls_from_response(answer)
    assert (found.tool_name, found.tool_kwargs) == ("weather", {"place": "Oslo"})
    assert made.predict_and_call([TOOL], user_msg="Oslo?").response == "sunny in Oslo"
    assert (await made.apredict_and_call([TOOL], user_msg="Oslo?")).response == "sunny in Oslo"
    streamed = list(made.stream_chat_with_tools([TOOL], user_msg="Oslo?", tool_required=True))
    assert made.get_tool_calls_from_response(streamed[-1])[0].tool_kwargs == {"place": "Oslo"}
    again = made.chat_with_tools(
        [TOOL],
        chat_history=[
            ChatMessage(role="user", content="Oslo?"),
            answer.message,
            ChatMessage(
                role="tool", content="sunny", additional_kwargs={"tool_call_id": found.tool_id}
            ),
        ],
    )
    assert again.additional_kwargs["prompt_tokens"] > answer.additional_kwargs["prompt_tokens"]


def test_no_call_and_half_a_call(model: treadle.Model) -> None:
    made = scripted(model, "It is sunny.")
    answer = made.chat_with_tools([TOOL], user_msg="Oslo?")
    with pytest.raises(ValueError, match="expected a tool call, found 'It is sunny"):
        made.get_tool_calls_from_response(answer)
    assert made.get_tool_calls_from_response(answer, error_on_no_tool_call=False) == []
    text = written_calls(model, weather={"place": "Oslo, the capital of Norway"})
    n_tokens = len(model.tokenize(text, bos=False))
    cut = scripted(model, text).chat_with_tools([TOOL], user_msg="?", max_tokens=n_tokens - 12)
    with pytest.raises(ValueError, match="a call of weather was cut"):
        made.get_tool_calls_from_response(cut)


class Sky(BaseModel):
    """The sky."""

    state: Literal["clear", "cloudy"]
    degrees: int


async def test_structured_data(model: treadle.Model) -> None:
    prompt = PromptTemplate("Read: {text}")
    # The small model was not trained for this: the grammar alone makes its answer one.
    found = Treadle(model, temperature=0, max_tokens=300).structured_predict(
        Sky, prompt, text="Blue, 20 degrees"
    )
    assert found.state in ("clear", "cloudy")
    exact = scripted(model, '{"state": "cloudy", "degrees": 12}')
    want = Sky(state="cloudy", degrees=12)
    assert exact.structured_predict(Sky, prompt, text="x") == want
    assert await exact.astructured_predict(Sky, prompt, text="x") == want
    streamed = list(exact.stream_structured_predict(Sky, prompt, text="x"))
    assert streamed[-1] == want
    assert any(getattr(each, "state", None) == "cloudy" and each != want for each in streamed)
    objects = await exact.astream_structured_predict(Sky, prompt, text="x")
    assert [each async for each in objects][-1] == want
    by_call = scripted(model, written_calls(model, Sky={"state": "cloudy", "degrees": 12}))
    program = FunctionCallingProgram.from_defaults(Sky, prompt=prompt, llm=by_call)
    assert program(text="x") == want
    assert list(program.stream_call(text="x"))[-1] == want
    assert exact.as_structured_llm(Sky).complete("x").raw == want
    with pytest.raises(ValidationError):
        Treadle(model, max_tokens=2).structured_predict(Sky, prompt, text="x")


def test_messages() -> None:
    picture = (DATA / "media" / "media" / "plain.png").read_bytes()
    messages = [
        ChatMessage(role="developer", content="Be short."),
        ChatMessage(role="user", blocks=[TextBlock(text="What?"), ImageBlock(image=picture)]),
        ChatMessage(
            role="assistant",
            blocks=[
                ThinkingBlock(content="Hm."),
                TextBlock(text="I ask."),
                ToolCallBlock(tool_call_id="1", tool_name="weather", tool_kwargs={"place": "Oslo"}),
            ],
        ),
        ChatMessage(role="tool", content="sunny", additional_kwargs={"tool_call_id": "1"}),
    ]
    made = openai_messages(messages)
    assert made[0] == {"role": "system", "content": "Be short."}
    assert made[1]["content"][1]["image_url"]["url"].startswith("data:image/png;base64,")
    assert made[2] == {
        "role": "assistant",
        "content": "I ask.",
        "reasoning_content": "Hm.",
        "tool_calls": [
            {
                "id": "1",
                "type": "function",
                "function": {"name": "weather", "arguments": '{"place": "Oslo"}'},
            }
        ],
    }
    assert made[3] == {"role": "tool", "content": "sunny", "tool_call_id": "1"}


def test_a_model_that_reads_pictures() -> None:
    folder = DATA / "media" / "gemma3"
    options = {"mmproj": str(folder / "mmproj.gguf")}
    made = Treadle(str(folder / "text.gguf"), max_tokens=2, load_options=options)
    picture = ImageBlock(path=DATA / "media" / "media" / "plain.png")
    with_picture = made.chat([ChatMessage(role="user", blocks=[TextBlock(text="What?"), picture])])
    without = made.chat([ChatMessage(role="user", content="What?")])
    n_with = with_picture.additional_kwargs["prompt_tokens"]
    assert n_with > without.additional_kwargs["prompt_tokens"]


def test_it_is_serialised_without_its_model(model: treadle.Model) -> None:
    made = Treadle(str(model.path), load_options={"threads": 1, "context": 256}, max_tokens=4)
    again = Treadle.from_dict(made.to_dict())
    assert again.completions.model is made.completions.model
    assert again.metadata.context_window == 256
    assert again.metadata.model_name == "demo"
    assert again.max_tokens == 4


def test_the_page(tmp_path: Path) -> None:
    run_page("llamaindex", tmp_path)
