"""DSPy's modules with a model of this process, and by address."""

from __future__ import annotations

import asyncio
import json
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any, Literal

import dspy
import pytest
from dspy.lm15 import Message, Request

import treadle
from dspy_treadle import TreadleEngine, treadle_lm
from shared_tests import Script, run_page, served, written_calls


@pytest.fixture(scope="module")
def model() -> Iterator[treadle.Model]:
    with treadle.load(threads=2, n_sequences=2, deterministic=True) as model:
        yield model


JSON = dspy.JSONAdapter()


def lm(model: treadle.Model, **settings: Any) -> dspy.LM:
    return treadle_lm(model, cache=False, num_retries=0, **settings)


def scripted(model: treadle.Model, *answers: str) -> dspy.LM:
    """A ``dspy.LM`` whose model writes these answers."""
    return lm(model, answer_options={"custom": Script(model, *answers)})


class Weather(dspy.Signature):
    """Read the weather from a text."""

    text: str = dspy.InputField()
    sky: Literal["clear", "cloudy"] = dspy.OutputField()
    degrees: int = dspy.OutputField()


def test_answers_are_treadles(model: treadle.Model) -> None:
    said = [{"role": "user", "content": "What is a list?"}]
    text = model.chat(said, tools=[], temperature=0, max_tokens=8, repeat_penalty=1.2).finish()
    made = lm(model, temperature=0, max_tokens=8, answer_options={"repeat_penalty": 1.2})
    assert made("What is a list?") == [text]
    usage = made.history[-1]["usage"]
    assert usage["completion_tokens"] == 8
    request = Request(model=made.model, messages=(Message.user("What is a list?"),))
    assert len(made.copy(max_tokens=4)("What is a list?")[0]) < len(text)
    assert made.engine.chat_of(request)["messages"] == said


def test_a_signature_is_enforced_by_a_grammar(model: treadle.Model) -> None:
    # The small model was not trained for this: the grammar alone makes its answer one.
    with dspy.context(lm=lm(model, temperature=0, max_tokens=400), adapter=JSON):
        found = dspy.Predict(Weather)(text="Blue sky, 20 degrees.")
    assert found.sky in ("clear", "cloudy")
    assert isinstance(found.degrees, int)


def test_values_come_through(model: treadle.Model) -> None:
    with dspy.context(lm=scripted(model, '{"sky": "cloudy", "degrees": 12}'), adapter=JSON):
        found = dspy.Predict(Weather)(text="Clouds, 12 degrees.")
    assert (found.sky, found.degrees) == ("cloudy", 12)


async def test_async(model: treadle.Model) -> None:
    threads = set()

    def note(logits: Any, ids: Any) -> Any:
        threads.add(threading.get_ident())
        return logits

    text = lm(model, temperature=0, max_tokens=8)("What is a list?")
    noted = lm(model, temperature=0, max_tokens=8, answer_options={"custom": note})
    assert await asyncio.gather(*(noted.acall("What is a list?") for _ in range(2))) == [text] * 2
    assert threads
    assert threading.get_ident() not in threads


async def test_streaming(model: treadle.Model) -> None:
    signature = dspy.Signature("question -> answer")
    written = '{"answer": "A river, a lake and a sea."}'
    with dspy.context(lm=scripted(model, written), adapter=JSON):
        program = dspy.streamify(
            dspy.Predict(signature),
            stream_listeners=[dspy.streaming.StreamListener(signature_field_name="answer")],
        )
        pieces = []
        async for each in program(question="What has water?"):
            if isinstance(each, dspy.streaming.StreamResponse):
                pieces.append(each.chunk)
            else:
                answer = each.answer
    assert answer == "A river, a lake and a sea."
    assert len(pieces) > 2
    assert json.loads("".join(pieces)) == answer  # DSPy gives a field of JSON as it is written


def weather(place: str) -> str:
    """The weather of a place."""
    return f"sunny in {place}"


def test_tools(model: treadle.Model) -> None:
    call = written_calls(model, weather={"place": "Oslo"})

    class Ask(dspy.Signature):
        """Answer with the help of tools."""

        question: str = dspy.InputField()
        tools: list[dspy.Tool] = dspy.InputField()
        calls: dspy.ToolCalls = dspy.OutputField()

    adapter = dspy.ChatAdapter(use_native_function_calling=True)
    with dspy.context(lm=scripted(model, call), adapter=adapter):
        found = dspy.Predict(Ask)(question="The weather in Oslo?", tools=[dspy.Tool(weather)])
    assert [(c.name, c.args) for c in found.calls.tool_calls] == [("weather", {"place": "Oslo"})]


def test_a_program_is_saved_with_its_model(tmp_path: Path) -> None:
    program = dspy.Predict(Weather)
    program.lm = treadle_lm(load_options={"threads": 1, "context": 256}, max_tokens=8)
    program.save(tmp_path / "program.json")
    again = dspy.Predict(Weather)
    again.load(tmp_path / "program.json", allow_unsafe_lm_state=True)
    assert isinstance(again.lm.engine, TreadleEngine)
    assert again.lm.engine.completions.model.n_ctx == 256
    assert again.lm.kwargs["max_tokens"] == 8
    with pytest.raises(TypeError, match="give its path"):
        treadle_lm(again.lm.engine.completions.model).dump_state()


def test_errors(model: treadle.Model) -> None:
    with pytest.raises(dspy.ContextWindowExceededError):
        lm(model)("word " * 2000)
    with pytest.raises(dspy.LMError, match="did you mean 'temperature'"):
        lm(model, answer_options={"temprature": 1})("x")


def test_by_address(model: treadle.Model) -> None:
    answer = lm(model, temperature=0, max_tokens=8)("What is a list?")
    with served(model) as url:
        remote = dspy.LM(
            "openai/any",
            api_base=f"{url}/v1",
            api_key="none",
            cache=False,
            temperature=0,
            max_tokens=8,
        )
        assert remote("What is a list?") == answer


def test_the_page(tmp_path: Path) -> None:
    run_page("dspy", tmp_path)
