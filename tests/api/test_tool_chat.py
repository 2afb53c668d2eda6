"""Chats with tools: functions as schemas, calls, the loop that runs them."""

from __future__ import annotations

import asyncio
import functools
import json
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Annotated, Any, Literal

import pydantic
import pytest

import treadle
from tests.chat.tools.families import HERMES_TEMPLATE
from tests.chat.tools.test_history import GPT_OSS
from treadle.api.tool_chat import Reply
from treadle.chat.template.template import ChatTemplate
from treadle.chat.tools.python_functions import result_of, tool_of
from treadle.errors import TemplateError, TreadleError
from treadle.grammar.json_schema import kept_schema

HI = [{"role": "user", "content": "hi"}]


def weather(
    place: Literal["Oslo", "Rome"],
    days: Annotated[int, "How many."] = 1,
    *,
    units: Literal["C", "F"] | None = None,
) -> dict[str, Any]:
    """The weather of a place,
    for some days.

    Args:
        place: Where.
    """
    return {"place": place, "days": days, "units": units}


def sky(place: Literal["Oslo", "Rome"]) -> str:
    """A call of it has one of two lengths, whatever a model would say."""
    return f"place: {place}"


def nothing() -> str:
    """Do nothing.

    :param x: not one of its own
    """
    return "done"


@pytest.fixture(scope="module")
def model(one_kernel_cache: Any) -> Iterator[treadle.Model]:
    with treadle.load(threads=2, context=512, deterministic=True) as model:
        model.__dict__["template"] = ChatTemplate(HERMES_TEMPLATE)
        yield model


def test_a_function_as_a_tool() -> None:
    assert tool_of(weather) == {
        "type": "function",
        "function": {
            "name": "weather",
            "description": "The weather of a place, for some days.",
            "parameters": {
                "type": "object",
                "properties": {
                    "place": {"enum": ["Oslo", "Rome"], "description": "Where."},
                    "days": {"type": "integer", "description": "How many."},
                    "units": {"anyOf": [{"enum": ["C", "F"]}, {"type": "null"}]},
                },
                "required": ["place"],
                "additionalProperties": False,
            },
        },
    }
    assert tool_of(nothing)["function"]["parameters"]["properties"] == {}


@pytest.mark.parametrize(
    ("kind", "schema"),
    [
        (str, {"type": "string"}),
        (bool, {"type": "boolean"}),
        (float, {"type": "number"}),
        (Any, {}),
        (list, {"type": "array", "items": {}}),
        (list[int], {"type": "array", "items": {"type": "integer"}}),
        (Sequence[str], {"type": "array", "items": {"type": "string"}}),
        (tuple[int, ...], {"type": "array", "items": {"type": "integer"}}),
        (dict, {"type": "object"}),
        (dict[str, int], {"type": "object", "additionalProperties": {"type": "integer"}}),
    ],
)
def test_types(kind: Any, schema: Any) -> None:
    def f(x: Any) -> None: ...

    f.__annotations__["x"] = kind
    assert tool_of(f)["function"]["parameters"]["properties"]["x"] == schema


def test_what_is_no_tool() -> None:
    def rest(*x: int) -> None: ...
    def odd(x: complex) -> None: ...
    def keys(x: dict[int, int]) -> None: ...

    for function, said in ((rest, "by name"), (odd, "odd: x: type"), (keys, "no JSON equivalent")):
        with pytest.raises(TreadleError, match=said):
            tool_of(function)
    with pytest.raises(TreadleError, match="tool int: no signature"):
        tool_of(int)
    for thing in (5, lambda: 1):
        with pytest.raises(TreadleError, match="named functions"):
            tool_of(thing)  # type: ignore[arg-type]


class City(pydantic.BaseModel):
    name: Literal["Oslo", "Rome"]


class Trip(pydantic.BaseModel):
    stops: list[City]


class Stay(pydantic.BaseModel):
    n: int


def travel(trip: Trip, more: list[City] | None = None, way: Stay | City | None = None) -> list[str]:
    cities = [*trip.stops, *(more or []), *([way] if isinstance(way, City) else [])]
    return [city.name for city in cities]


async def wait(n: int) -> int:
    await asyncio.sleep(0)
    return n + 1


def test_classes_of_pydantic() -> None:
    """References lead from the root on, and a function gets what its annotations say."""
    parameters = tool_of(travel)["function"]["parameters"]
    assert set(parameters["$defs"]) == {"City"}
    _, left_out = kept_schema(parameters)
    assert left_out == ()
    oslo = {"name": "Oslo"}
    said = json.dumps({"trip": {"stops": [oslo]}, "more": [oslo], "way": oslo})
    assert json.loads(result_of(travel, said)) == ["Oslo"] * 3
    assert json.loads(result_of(travel, json.dumps({"trip": {"stops": []}, "way": {"n": 1}}))) == []
    assert result_of(travel, '{"trip": {"stops": [{"name": "Bonn"}]}}').startswith("error: Valid")


def test_two_classes_of_one_name() -> None:
    def other() -> Any:
        class City(pydantic.BaseModel):
            n: int

        class Other(pydantic.BaseModel):
            city: City

        return Other

    def f(a: Any, b: Any) -> None: ...

    f.__annotations__ |= {"a": Trip, "b": other()}
    with pytest.raises(TreadleError, match="tool f: b: two classes are named City"):
        tool_of(f)


def test_functions_that_wait() -> None:
    async def within() -> str:
        return result_of(wait, '{"n": 3}')

    assert result_of(wait, '{"n": 3}') == "4"
    assert asyncio.run(within()) == "4"


def test_results() -> None:
    assert json.loads(result_of(weather, '{"place": "Oslo"}'))["days"] == 1
    assert result_of(nothing, "{}") == "done"
    assert result_of(nothing, '{"x": 1}').startswith("error: TypeError")


def test_calls(model: treadle.Model) -> None:
    made = model.chat(HI, tools=[sky, nothing], tool_choice="sky", max_tokens=200)
    assert isinstance(made, Reply)
    assert list(made) == []  # there is no content
    (call,) = made.calls
    assert call.name == "sky"
    assert result_of(sky, call.arguments).startswith("place: ")
    assert made.finish_reason == "stop"
    assert made.text == ""
    message = made.message()
    more = model.chat_prompt(
        [
            *HI,
            {
                "role": "assistant",
                "content": "",
                "tool_calls": [
                    {"function": {"name": "sky", "arguments": json.loads(call.arguments)}}
                ],
            },
        ],
    )
    again = model.chat(
        [*HI, message, {"role": "tool", "tool_call_id": call.id, "content": "1"}],
        tools=[sky],
        max_tokens=1,
    )
    assert f'"arguments": {json.dumps(json.loads(call.arguments))}' in model.detokenize(
        again.prompt_ids, special=True
    )
    assert more


def test_content_is_what_is_given_out(model: treadle.Model) -> None:
    """A grammar is taken for what the model wants to say."""
    text = 'so:\n<tool_call>\n{"name": "nothing", "arguments": {}}\n</tool_call>'
    own: dict[str, Any] = {"grammar": f"root ::= {json.dumps(text)}", "max_tokens": 200}
    made = model.chat(HI, tools=[nothing], **own)
    finished = model.chat(HI, tools=[nothing], **own)
    assert "".join(made) == made.text == "so:"
    assert isinstance(made, Reply)
    assert isinstance(finished, Reply)
    assert finished.finish() == "so:"
    assert len(finished.ids) == len(made.ids)
    assert [call.name for call in made.calls] == ["nothing"]
    assert len(finished.calls) == 1

    async def read() -> str:
        return "".join([piece async for piece in model.chat(HI, tools=[nothing], **own)])

    assert asyncio.run(read()) == "so:"


def test_reasoning(model: treadle.Model, monkeypatch: pytest.MonkeyPatch) -> None:
    template = ChatTemplate(HERMES_TEMPLATE + "{# </think> #}")
    monkeypatch.setitem(model.__dict__, "template", template)
    talk = [*HI, {"role": "assistant", "content": "<think>\n"}]
    made = model.chat(talk, reasoning_budget=4, json_schema={"const": 5})
    assert isinstance(made, Reply)
    assert made.finish() == "5"
    assert made.message()["content"] == "5"
    assert made.message()["reasoning_content"] == made.reasoning


def test_wrong_choices(model: treadle.Model) -> None:
    with pytest.raises(TreadleError, match="tool_choice"):
        model.chat(HI, tools=[nothing], tool_choice="absent")
    with pytest.raises(TreadleError, match="tool_choice"):
        model.chat(HI, tools=[nothing], tool_choice={"type": "function"})
    with pytest.raises(TypeError):
        model.chat(HI, tools=[nothing], tool_chioce="none")
    none = model.chat(HI, tools=[nothing], tool_choice="none", max_tokens=1)
    assert none.prompt_ids == model.chat(HI).prompt_ids


@pytest.mark.parametrize(
    ("name", "parameters", "said"),
    [
        ('a"b', {}, "expected a name of 1 to 128"),
        ("", {}, "expected a name of 1 to 128"),
        (None, {}, "expected a name of 1 to 128"),
        ("f", {"type": "string"}, "tool f: the schema of its parameters allows no object"),
    ],
)
def test_wrong_tools(model: treadle.Model, name: Any, parameters: Any, said: str) -> None:
    tool = {"type": "function", "function": {"name": name, "parameters": parameters}}
    with pytest.raises(TreadleError, match=said):
        model.chat(HI, tools=[tool])


@pytest.mark.parametrize(
    ("tools", "said"),
    [
        ([{"name": "x"}], "expected a dict with 'function'"),
        ([{"type": "function", "function": None}], "expected a dict with 'function'"),
        (sky, "expected a list, found function"),
        ([sky, sky], "two have the name sky"),
    ],
)
def test_what_is_no_list_of_tools(model: treadle.Model, tools: Any, said: str) -> None:
    with pytest.raises(TreadleError, match=said):
        model.chat(HI, tools=tools)


def test_no_tools(model: treadle.Model) -> None:
    """A list that happens to be empty gives a Reply too."""
    made: treadle.Reply = model.chat(HI, tools=[], max_tokens=1)
    made.finish()
    assert type(made) is treadle.Reply
    assert made.calls == []
    assert made.prompt_ids == model.chat(HI).prompt_ids
    added = treadle.run_tools(model, HI, [], max_tokens=1)
    assert [message["role"] for message in added] == ["assistant"]
    with pytest.raises(TreadleError, match="'required' needs at least one tool"):
        model.chat(HI, tools=[], tool_choice="required")


@pytest.mark.parametrize("tool", [{"type": "function"}, functools.partial(sky)])
def test_the_loop_calls_named_functions(model: treadle.Model, tool: Any) -> None:
    with pytest.raises(TreadleError, match="named functions"):
        treadle.run_tools(model, HI, [tool])


def test_the_loop_forces_its_first_answer_alone(model: treadle.Model) -> None:
    added = treadle.run_tools(model, HI, [sky], tool_choice="sky", max_tokens=64, temperature=0)
    assert [message["role"] for message in added] == ["assistant", "tool", "assistant"]


@pytest.mark.parametrize("tools", [None, [sky]])
@pytest.mark.parametrize(
    "content", [5, {"x": 1}, [{"type": "text"}], [5], b"hi"], ids=lambda content: repr(content)
)
def test_contents_that_are_no_text(model: treadle.Model, content: Any, tools: Any) -> None:
    for role in ("user", "assistant"):
        with pytest.raises(TemplateError):
            model.chat([*HI, {"role": role, "content": content}], tools=tools)


@pytest.mark.parametrize(
    "calls",
    [
        5,
        True,
        {"name": "f"},
        [None],
        [{}],
        [{"function": 5}],
        [{"function": {"arguments": {}}}],
        [{"function": {"name": "f", "arguments": 5}}],
    ],
    ids=lambda calls: repr(calls),
)
def test_calls_that_are_none(model: treadle.Model, calls: Any) -> None:
    talk = [*HI, {"role": "assistant", "content": None, "tool_calls": calls}]
    for use in (model.chat, functools.partial(treadle.run_tools, model)):
        with pytest.raises(TemplateError, match="message 1"):
            use(talk, tools=[sky])


def test_rules_that_exclude_each_other(model: treadle.Model) -> None:
    class Free:
        def mask(self, logits: Any) -> None: ...
        def accept(self, id: int) -> None: ...

    with pytest.raises(treadle.GrammarError, match="choose one"):
        model.chat(HI, tools=[sky], grammar='root ::= "a"', regex="b")
    with pytest.raises(treadle.GrammarError, match="combined with tools"):
        model.chat(HI, tools=[sky], constraint=Free())
    for budget in (-2, "many"):
        with pytest.raises(TreadleError, match="reasoning_budget="):
            model.chat(HI, reasoning_budget=budget)


@pytest.mark.slow
def test_the_loop(model: treadle.Model, monkeypatch: pytest.MonkeyPatch) -> None:
    """The model calls until it is told not to."""
    chat = model.chat
    n = 0

    def twice(messages: Any, **settings: Any) -> Any:
        nonlocal n
        n += 1
        choice = "sky" if n < 3 else "none"
        return chat(messages, tool_choice=choice, **settings)

    monkeypatch.setattr(model, "chat", twice)
    told: list[Any] = []
    added = treadle.run_tools(model, HI, [sky], told=told.append, max_tokens=128)
    assert added == told
    assert [message["role"] for message in added] == ["assistant", "tool"] * 2 + ["assistant"]
    assert "place" in added[1]["content"]
    assert added[1]["tool_call_id"] == added[0]["tool_calls"][0]["id"]
    n = -100
    with pytest.raises(TreadleError, match="after 2 answers"):
        treadle.run_tools(model, HI, [sky], most=2, max_tokens=128)


def test_regex(model: treadle.Model) -> None:
    assert model.generate("x", regex="[ab]{3}").finish().strip("ab") == ""
    with pytest.raises(treadle.GrammarError, match="choose one"):
        model.generate("x", regex="a", grammar='root ::= "a"')


def test_a_constraint_of_ones_own(model: treadle.Model) -> None:
    class Only:
        """The token 65, thrice, then the end."""

        def __init__(self) -> None:
            self.n = 0

        def mask(self, logits: Any) -> None:
            keep = 65 if self.n < 3 else min(model.tokenizer.eog)
            value = logits[keep]
            logits[:] = -float("inf")
            logits[keep] = value

        def accept(self, id: int) -> None:
            self.n += 1

    made = model.generate("x", constraint=Only())
    made.finish()
    assert made.ids == [65] * 3


def test_talks_that_a_template_raises_on(model: treadle.Model, data: Path) -> None:
    """Without tools too; what no other form of a conversation mends is raised."""
    own = model.template
    source = (data / "templates/google-gemma-2-2b-it.jinja").read_text("utf-8")
    try:
        model.__dict__["template"] = ChatTemplate(source)
        system = {"role": "system", "content": "be brief"}
        text = model.chat_prompt([system, *HI, *HI])
        assert "<start_of_turn>user\nbe brief\n\nhi\nhi<end_of_turn>" in text
        with pytest.raises(TemplateError, match="roles must alternate"):
            model.chat_prompt([{"role": "x", "content": ""}, *HI])
        with pytest.raises(TemplateError, match=r"message 0: call .*: expected a dict"):
            model.chat_prompt([{"role": "x", "tool_calls": [{}]}, *HI])
    finally:
        model.__dict__["template"] = own


def test_a_history_without_tools_now(model: treadle.Model) -> None:
    """A template leaves out the words beside a call, later words of the system's, and raises on a
    result without its call.
    """
    own = model.template
    call = {"type": "function", "function": {"name": "f", "arguments": {"text": "ARGUMENT"}}}
    calling: Any = {"role": "assistant", "content": "WORDS", "tool_calls": [{"id": "a", **call}]}
    result: Any = {"role": "tool", "tool_call_id": "a", "content": "RESULT"}
    late = {"role": "system", "content": "LATE"}
    try:
        model.__dict__["template"] = ChatTemplate(GPT_OSS)
        thought = {**calling, "reasoning_content": "REASONED"}
        text = model.chat_prompt([*HI, thought, result, late])
        words = ("hi", "REASONED", "WORDS", "ARGUMENT", "RESULT", "LATE")
        assert [text.count(word) for word in words] == [1] * 6
        assert [text.index(word) for word in words] == sorted(text.index(word) for word in words)
        assert "RESULT" in model.chat_prompt([*HI, result])
        made = model.chat([*HI, result], tools=[], max_tokens=1)
        assert len(made.warnings) == 1
        assert model.chat([*HI, calling, result], tools=[], max_tokens=1).warnings == ()
        parts = [{"type": "text", "text": "BEFORE"}, {"type": "image", "data": "aGk="}]
        pictured: Any = [*HI, calling, {**result, "content": parts}]
        text = model.chat_prompt(pictured)
        assert text.index("BEFORE") < text.index("[The tool gave a picture (2 bytes) here.")
        (warning,) = model.chat(pictured, tools=[], max_tokens=1).warnings
        assert warning == (
            "tool result 'a': a picture (2 bytes) was dropped, because the model reads only text"
        )
        answered: Any = [*HI, thought, result, {"role": "assistant", "content": "ANSWER"}, *HI]
        text = model.chat_prompt(answered)
        assert text.index("WORDS") < text.index("ARGUMENT") < text.index("ANSWER")
    finally:
        model.__dict__["template"] = own


def test_nulls_in_schemas(model: treadle.Model) -> None:
    """As clients in Go write empty lists, and in all else that is null."""
    properties = {"a": {"const": None}}
    schema = {"properties": properties, "required": None, "additionalProperties": False}
    tool = {"type": "function", "function": {"name": "f", "strict": None, "parameters": schema}}
    made = model.chat(HI, tools=[tool], tool_choice="f", max_tokens=200)
    made.finish()
    assert [call.arguments for call in made.calls] in (["{}"], ['{"a": null}'], ['{"a":null}'])
