"""Chats in the form of OpenAI's API are those of ``Model.chat``."""

from __future__ import annotations

import asyncio
import copy
import json
import pickle
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import treadle
from treadle.api.chat_completions import chat_fields, chat_settings
from treadle.errors import TreadleError

SAID = [{"role": "user", "content": "What is a list?"}]
SHORT = {"temperature": 0, "max_tokens": 6}
TOOL = {
    "type": "function",
    "function": {"name": "pick", "parameters": {"properties": {"n": {"enum": [7]}}}},
}
THINKS = (
    "{% for m in messages %}{{ m.content }}\n{% endfor %}<think>\n"
    "{% if enable_thinking is false %}\n</think>\n\n{% endif %}"
)


@pytest.fixture(scope="module")
def model(one_kernel_cache: Path) -> Iterator[treadle.Model]:
    with treadle.load(threads=2, context=512, n_sequences=3, deterministic=True) as model:
        yield model


@pytest.fixture
def completions(model: treadle.Model) -> treadle.ChatCompletions:
    return treadle.ChatCompletions(model)


def joined(chunks: list[dict[str, Any]]) -> dict[str, Any]:
    """The answer that a stream's chunks make, as ``create`` returns it."""
    message: dict[str, Any] = {"content": ""}
    logprobs: list[Any] = []
    for chunk in chunks:
        (choice,) = chunk["choices"]
        delta = dict(choice["delta"])
        for call in delta.pop("tool_calls", ()):
            calls = message.setdefault("tool_calls", [])
            if call["index"] == len(calls):
                calls.append({**call, "function": {**call["function"], "arguments": ""}})
                del calls[-1]["index"]
            calls[-1]["function"]["arguments"] += call["function"]["arguments"]
        message["content"] += delta.pop("content", "")
        message |= delta
        logprobs += (choice["logprobs"] or {}).get("content", ())
    assert [chunk["choices"][0]["finish_reason"] for chunk in chunks[:-1]] == [None] * (
        len(chunks) - 1
    )
    last = chunks[-1]
    choice = {**last["choices"][0], "message": message}
    choice["logprobs"] = {"content": logprobs} if logprobs else None
    del choice["delta"]
    return {**last, "object": "chat.completion", "choices": [choice]}


def same(made: dict[str, Any], other: dict[str, Any]) -> bool:
    """Whether two answers differ in ids, times and what was cached alone."""
    one, two = (json.loads(json.dumps(each)) for each in (made, other))
    for each in (one, two):
        del each["id"], each["created"], each["usage"]["prompt_tokens_details"]
        message = each["choices"][0]["message"]
        message["content"] = message["content"] or ""
        for call in message.get("tool_calls", ()):
            del call["id"]
    return bool(one == two)


def test_an_answer(model: treadle.Model, completions: treadle.ChatCompletions) -> None:
    reply = model.chat(SAID, tools=[], logprobs=2, **SHORT)
    reply.finish()
    made = completions.create(SAID, logprobs=True, top_logprobs=2, **SHORT)
    (choice,) = made["choices"]
    assert choice["message"] == {"role": "assistant", "content": reply.text}
    assert choice["finish_reason"] == reply.finish_reason == "length"
    assert reply.logprobs is not None
    assert choice["logprobs"]["content"] == [entry.as_dict() for entry in reply.logprobs]
    assert made["usage"]["prompt_tokens"] == len(reply.prompt_ids)
    assert made["usage"]["completion_tokens"] == len(reply.ids)
    assert made["model"] == "demo"


CALLS = {"tools": [TOOL], "tool_choice": "required", "max_tokens": 60, "temperature": 0}
FIELDS = {
    "text": {"logprobs": True, **SHORT},
    "calls": {**CALLS, "parallel_tool_calls": False},
    "schema": {
        "response_format": {"type": "json_schema", "json_schema": {"schema": {"enum": [1, 2]}}},
        **SHORT,
    },
}


@pytest.mark.parametrize("fields", FIELDS.values(), ids=FIELDS)
def test_streams_and_tasks_have_the_same_answer(
    fields: dict[str, Any], completions: treadle.ChatCompletions
) -> None:
    made = completions.create(SAID, **fields)
    assert same(joined(list(completions.stream(SAID, **fields))), made)

    async def both() -> tuple[dict[str, Any], list[dict[str, Any]]]:
        async def chunks() -> list[dict[str, Any]]:
            return [chunk async for chunk in completions.astream(SAID, **fields)]

        whole, pieces = await asyncio.gather(completions.acreate(SAID, **fields), chunks())
        return whole, pieces

    whole, chunks = asyncio.run(both())
    assert same(whole, made)
    assert same(joined(chunks), made)


def test_calls_follow_the_schema(completions: treadle.ChatCompletions) -> None:
    (choice,) = completions.create(SAID, **CALLS, parallel_tool_calls=False)["choices"]
    (call,) = choice["message"]["tool_calls"]
    assert call["function"]["name"] == "pick"
    assert json.loads(call["function"]["arguments"]).get("n", 7) == 7
    assert choice["finish_reason"] == "tool_calls"


def test_reasoning_is_a_field_of_its_own() -> None:
    with treadle.load(threads=1, context=256, chat_template=THINKS) as model:
        completions = treadle.ChatCompletions(model)
        fields = {"regex": "[a-z]{3}", "reasoning_budget": 3, "temperature": 0, "max_tokens": 30}
        message = completions.create(SAID, **fields)["choices"][0]["message"]
        assert message["reasoning_content"]
        assert len(message["content"].strip()) == 3
        deltas = [chunk["choices"][0]["delta"] for chunk in completions.stream(SAID, **fields)]
    thought = "".join(delta.get("reasoning_content", "") for delta in deltas)
    assert thought == message["reasoning_content"]


def test_a_stream_that_is_closed_ends_its_answer(model: treadle.Model) -> None:
    n_steps = 0

    def count(logits: np.ndarray, ids: list[int]) -> np.ndarray:
        nonlocal n_steps
        n_steps += 1
        return logits

    completions = treadle.ChatCompletions(model)
    stream = completions.stream(SAID, custom=count, ignore_eos=True)
    next(stream)
    stream.close()  # type: ignore[attr-defined]  # a generator
    seen = n_steps
    completions.create(SAID, **SHORT)
    assert n_steps == seen < 20


def test_the_event_loop_stays_free(completions: treadle.ChatCompletions) -> None:
    threads = set()

    def note(logits: np.ndarray, ids: list[int]) -> np.ndarray:
        threads.add(threading.get_ident())
        return logits

    asyncio.run(completions.acreate(SAID, custom=note, **SHORT))
    assert threads
    assert threading.get_ident() not in threads


def test_a_task_that_is_cancelled_ends_its_answer(model: treadle.Model) -> None:
    n_steps = 0

    async def main() -> None:
        begun = asyncio.Event()
        loop = asyncio.get_running_loop()

        def note(logits: np.ndarray, ids: list[int]) -> np.ndarray:
            nonlocal n_steps
            n_steps += 1
            loop.call_soon_threadsafe(begun.set)
            return logits

        made = model.generate("x", custom=note, ignore_eos=True)
        task = asyncio.ensure_future(made.afinish())
        await begun.wait()
        task.cancel()
        with pytest.raises(asyncio.CancelledError):
            await task

    asyncio.run(main())
    seen = n_steps
    model.generate("x", max_tokens=6).finish()
    assert n_steps == seen < 400


def test_parts_are_the_same_under_asyncio(model: treadle.Model) -> None:
    def reply() -> treadle.Reply:
        return model.chat(SAID, tools=[TOOL], tool_choice="pick", max_tokens=60, temperature=0)

    async def parts() -> list[tuple[str, str]]:
        return [(part.kind, part.text) async for part in reply().parts()]

    expected = [(part.kind, part.text) for part in reply().parts()]
    assert {kind for kind, _ in expected} == {"call", "arguments"}
    assert asyncio.run(parts()) == expected


# -- fields -------------------------------------------------------------------------------


SETTINGS: dict[str, tuple[dict[str, Any], dict[str, Any]]] = {
    "names": (
        {"max_completion_tokens": 3, "seed": 1, "user": "me", "stop": None, "n": 1},
        {"max_tokens": 3, "seed": 1},
    ),
    "logprobs": ({"logprobs": True, "top_logprobs": 3}, {"logprobs": 3}),
    "no logprobs": ({"logprobs": False}, {}),
    "bias": ({"logit_bias": {"5": 1}}, {"logit_bias": {5: 1.0}}),
    "text": ({"response_format": {"type": "text"}}, {}),
    "object": ({"response_format": {"type": "json_object"}}, {"json_schema": {"type": "object"}}),
    "regex": ({"response_format": {"type": "regex", "regex": "a"}}, {"regex": "a"}),
    "no tools": ({"tool_choice": "required"}, {}),
    "any tool": (
        {"tools": [TOOL], "tool_choice": "any"},
        {"tools": [TOOL], "tool_choice": "required"},
    ),
    "one tool": (
        {"tools": [TOOL], "tool_choice": {"type": "function", "function": {"name": "pick"}}},
        {"tools": [TOOL], "tool_choice": "pick"},
    ),
    "effort": (
        {"reasoning_effort": "low"},
        {"template": {"reasoning_effort": "low"}, "reasoning_budget": 1024},
    ),
    "no effort": (
        {"reasoning_effort": "none", "chat_template_kwargs": {"a": 1}},
        {"template": {"reasoning_effort": "none", "a": 1}, "reasoning": "off"},
    ),
}


@pytest.mark.parametrize(("fields", "settings"), SETTINGS.values(), ids=SETTINGS)
def test_fields(fields: dict[str, Any], settings: dict[str, Any], model: treadle.Model) -> None:
    assert chat_settings(fields, model.template) == settings
    assert fields.keys() <= chat_fields()


def test_a_schema_that_need_not_be_strict(model: treadle.Model) -> None:
    schema = {"type": "string", "pattern": "(?=a)"}
    form = {"type": "json_schema", "json_schema": {"schema": schema, "strict": False}}
    with pytest.warns(UserWarning, match="pattern"):
        kept = chat_settings({"response_format": form}, model.template)
    assert kept["json_schema"] == {"type": "string"}


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({"n": 2}, "n=2: one answer"),
        ({"response_format": {"type": "yaml"}}, "response_format="),
        ({"tools": [TOOL], "tool_choice": 3}, "tool_choice=3"),
    ],
)
def test_fields_that_are_wrong(fields: dict[str, Any], message: str, model: treadle.Model) -> None:
    with pytest.raises(TreadleError, match=message):
        chat_settings(fields, model.template)


def test_a_name_that_is_no_setting(completions: treadle.ChatCompletions) -> None:
    with pytest.raises(TypeError, match="did you mean 'temperature'"):
        completions.create(SAID, temprature=0)


def test_copies_are_the_object_itself(completions: treadle.ChatCompletions) -> None:
    assert copy.copy(completions) is completions
    assert copy.deepcopy([completions])[0] is completions
    with pytest.raises(TypeError, match="load it in each process"):
        pickle.dumps(completions)
