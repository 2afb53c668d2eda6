"""Fields of bodies: types, ranges, what is refused, and settings of sampling."""

from __future__ import annotations

import math
from typing import Any

import pytest

import treadle
from treadle.chat.tools.answer_plan import AnswerOptions
from treadle.errors import TreadleError, of_setting
from treadle.sampling import Sampling
from treadle.server.http import body_fields
from treadle.server.http.api_errors import ApiError, named
from treadle.server.requests import generation_request
from treadle.server.requests.generation_request import (
    SAMPLERS,
    check_text,
    read_generation,
    read_prompt,
)


def test_every_setting_of_sampling_has_a_field() -> None:
    """But callables, which JSON has not, and two that are read by themselves."""
    own = {name for name in Sampling.__dataclass_fields__ if name != "custom"}
    assert set(SAMPLERS) | {"seed", "logit_bias"} == own


@pytest.mark.parametrize(
    ("read", "value"),
    [
        (body_fields.text, 5),
        (body_fields.flag, 1),
        (body_fields.flag, "true"),
        (body_fields.array, {}),
        (body_fields.mapping, []),
        (body_fields.whole(0), -1),
        (body_fields.whole(0), 1.5),
        (body_fields.whole(0), True),
        (body_fields.whole(0), "1"),
        (body_fields.whole(0), math.inf),
        (body_fields.whole(0), 10**400),
        (body_fields.number(0, 1), 1.1),
        (body_fields.number(0, 1), False),
        (body_fields.one_of("a", "b"), "c"),
        (body_fields.one_of("a", "b"), ["a"]),
        (body_fields.texts, [1]),
        (body_fields.texts, 1),
        (body_fields.refused("why", 0), 1),
        (body_fields.refused("why", 0), False),
    ],
)
def test_wrong_values_name_their_field(read: body_fields.Reader, value: Any) -> None:
    with pytest.raises(ApiError) as caught:
        body_fields.read_fields({"spam": value}, {"spam": read})
    assert caught.value.status == 400
    assert caught.value.param == "spam"
    assert str(caught.value).startswith("spam: ")


def test_right_values() -> None:
    table = {
        "whole": body_fields.whole(0),
        "number": body_fields.number(0, 1),
        "texts": body_fields.texts,
        "refused": body_fields.refused("why", 0, "x"),
        "absent": body_fields.text,
        "null": body_fields.text,
    }
    body = {"whole": 5.0, "number": 1, "texts": "a", "refused": "x", "null": None, "other": object}
    assert body_fields.read_fields(body, table) == {
        "whole": 5,
        "number": 1.0,
        "texts": ["a"],
        "refused": "x",
    }


def test_a_wrong_field_of_an_object_is_named_with_the_object() -> None:
    inner = body_fields.object_of({"a": body_fields.object_of({"b": body_fields.flag})})
    assert inner("spam", {"a": {"b": True}, "c": 5}) == {"a": {"b": True}}
    for value, name in (({"a": {"b": 1}}, "spam.a.b"), ({"a": 5}, "spam.a"), (5, "spam")):
        with pytest.raises(ApiError) as caught:
            inner("spam", value)
        assert caught.value.param == name


ANY: dict[str, Any] = {"response_format": {"type": "json_object"}}
OWN_INNER = {"schema": {"a": 1}}
OWN = {"response_format": {"type": "json_schema", "json_schema": OWN_INNER}}


def read(model: treadle.Model, body: dict[str, Any]) -> generation_request.GenerationRequest:
    return read_generation(body, model, Sampling(temperature=0.5))


def test_what_is_asked(model: treadle.Model) -> None:
    found = read(
        model,
        {
            "max_completion_tokens": 7,
            "max_tokens": 9,
            "seed": -2,
            "stop": ["", "x"],
            "top_k": 3,
            "user": "me",
            "unheard_of": 1,
        },
    )
    assert found.settings["max_tokens"] == 7
    assert found.settings["stop"] == ["x"]
    assert found.settings["sampling"] == Sampling(temperature=0.5, top_k=3, seed=2**64 - 2)
    assert (found.n, found.is_streamed, found.client) == (1, False, "me")
    assert read(model, {"seed": -1}).settings["sampling"].seed is None


@pytest.mark.parametrize(
    "bias",
    [
        {"5": -100, "7": 1.5},
        [[5, -100], [7, 1.5]],
    ],
)
def test_biases(bias: Any, model: treadle.Model) -> None:
    found = read(model, {"logit_bias": bias}).settings["sampling"]
    assert found.logit_bias == {5: -100, 7: 1.5}


def test_a_bias_of_a_text_and_one_that_forbids(model: treadle.Model) -> None:
    ids = model.tokenize("import", bos=False)
    for bias in ([["import", False]], {"import": False}):
        found = read(model, {"logit_bias": bias}).settings["sampling"]
        assert found.logit_bias == dict.fromkeys(ids, -math.inf)


@pytest.mark.parametrize(
    "body",
    [
        {"logit_bias": 5},
        {"logit_bias": [[1]]},
        {"logit_bias": {"5": "x"}},
        {"logit_bias": {"1": "x"}},
        {"logit_bias": {"1": True}},
        {"n": 0},
        {"n": 129},
        {"stop": ["x"] * 65},
        {"guided_choice": []},
        {"guided_choice": ["a"], "structured_outputs": {"regex": "a"}},
        {"guided_choice": ["a"], "guided_regex": "b"},
        {"structured_outputs": {"json": {}}, "json_schema": {}},
        {"structured_outputs": {"json": {}, "regex": "a"}},
        {"structured_outputs": {"structural_tag": "x"}},
        {"stop_token_ids": [10**9]},
        {"stop_token_ids": ["a"]},
        {"allowed_token_ids": []},
        {"bad_words": ["a"] * 1025},
        {"min_tokens": -1},
        {"sse_ping_interval": -2},
        {"lora": {"id": 0}},
        {"lora": [{"scale": 1.0}]},
        {"response_format": {"type": "xml"}},
        {"response_format": {"type": "json_schema", "json_schema": {}}},
        {"response_format": {"type": "json_object"}, "grammar": 'root ::= "x"'},
        {"grammar": 'root ::= "x"', "json_schema": {}},
    ],
)
def test_what_cannot_be_honoured(body: dict[str, Any], model: treadle.Model) -> None:
    with pytest.raises(ApiError) as caught:
        read(model, body)
    assert caught.value.status == 400


@pytest.mark.parametrize(
    ("body", "found"),
    [
        ({}, AnswerOptions()),
        ({"grammar": ""}, AnswerOptions()),
        ({"json_schema": {}}, AnswerOptions(schema={})),
        ({"guided_json": {"a": 1}}, AnswerOptions(schema={"a": 1})),
        ({"regex": "a|b"}, AnswerOptions(regex="a|b")),
        ({"guided_regex": "a"}, AnswerOptions(regex="a")),
        ({"guided_choice": ["a.b", "c d", "[e]-&"]}, AnswerOptions(regex=r"a\.b|c d|\[e\]\-\&")),
        ({"structured_outputs": {"choice": ["a", "b"]}}, AnswerOptions(regex="a|b")),
        ({"structured_outputs": {"json": {"a": 1}}}, AnswerOptions(schema={"a": 1})),
        ({"structured_outputs": {"json_object": True}}, AnswerOptions(schema={"type": "object"})),
        ({"structured_outputs": {"json_object": False}}, AnswerOptions()),
        ({"structured_outputs": {"grammar": "x"}}, AnswerOptions(grammar="x")),
        ({"reasoning_budget_tokens": 5}, AnswerOptions(budget=5)),
        ({"thinking_token_budget": 5}, AnswerOptions(budget=5)),
        ({"reasoning_budget": 5}, AnswerOptions(budget=5)),
        ({"reasoning_budget": -1}, AnswerOptions()),
        ({"response_format": {"type": "text"}}, AnswerOptions()),
        ({"response_format": {"type": "json_object"}}, AnswerOptions(schema={"type": "object"})),
        (
            {"response_format": {"type": "json_schema", "json_schema": {"schema": {"a": 1}}}},
            AnswerOptions(schema={"a": 1}),
        ),
        (
            {"response_format": {"type": "json_schema", "schema": {}, "strict": False}},
            AnswerOptions(schema={}, lenient=True),
        ),
        ({"response_format": {"type": "grammar", "grammar": "x"}}, AnswerOptions(grammar="x")),
        ({**ANY, "json_schema": {"a": 1}}, AnswerOptions(schema={"a": 1})),
        ({**ANY, "guided_json": {"a": 1}}, AnswerOptions(schema={"a": 1})),
        ({"response_format": {**ANY["response_format"], "schema": {}}}, AnswerOptions(schema={})),
        (
            {"response_format": {**ANY["response_format"], "json_schema": {"schema": {"a": 1}}}},
            AnswerOptions(schema={"a": 1}),
        ),
        ({**OWN, "json_schema": {"a": 1}}, AnswerOptions(schema={"a": 1})),
        ({"json_schema": {"a": 1}, "guided_json": {"a": 1}}, AnswerOptions(schema={"a": 1})),
        ({"response_format": {"type": "regex", "regex": "x"}}, AnswerOptions(regex="x")),
    ],
)
def test_constraints(body: Any, found: Any, model: treadle.Model) -> None:
    assert read(model, body).options == found


@pytest.mark.parametrize(
    ("body", "names"),
    [
        ({**OWN, "json_schema": {"b": 1}}, ("response_format", "json_schema")),
        ({**OWN, "guided_json": {"b": 1}}, ("response_format", "guided_json")),
        ({**OWN, "guided_regex": "a"}, ("response_format", "guided_regex")),
        ({**ANY, "grammar": 'root ::= "x"'}, ("response_format", "grammar")),
        ({"json_schema": {"a": 1}, "guided_json": {"b": 1}}, ("guided_json", "json_schema")),
        ({"regex": "a", "guided_regex": "b"}, ("guided_regex", "regex")),
        ({"grammar": 'root ::= "x"', "guided_json": {}}, ("grammar", "guided_json")),
        (
            {"response_format": {"type": "json_schema", "schema": {}, "json_schema": OWN_INNER}},
            ("response_format.schema", "response_format.json_schema.schema"),
        ),
    ],
)
def test_two_forms_of_an_answer(body: Any, names: tuple[str, str], model: treadle.Model) -> None:
    """The second one was dropped."""
    with pytest.raises(ApiError) as caught:
        read(model, body)
    assert caught.value.status == 400
    assert caught.value.param == names[0]
    assert caught.value.message.startswith(f"{names[0]} and {names[1]}: ")


def test_prompts(model: treadle.Model) -> None:
    ids = model.tokenize("def f(")
    assert read_prompt("def f(", model) == ids
    assert read_prompt(ids, model) == ids
    assert read_prompt({"prompt_string": "def f("}, model) == ids
    with pytest.raises(
        ApiError, match=r"prompt\.multimodal_data: not supported: this model reads text only"
    ):
        read_prompt({"prompt_string": "x<__media__>", "multimodal_data": ["aGk="]}, model)
    plain = model.tokenize(" x", bos=False)
    assert read_prompt(["def f(", 9, " x"], model) == [*ids, 9, *plain]


@pytest.mark.parametrize("prompt", [[], 5, [1.5], [True], [10**9], [-1], [[1]], {}, None])
def test_prompts_that_are_none(prompt: Any, model: treadle.Model) -> None:
    with pytest.raises((ApiError, treadle.TreadleError)):
        read_prompt(prompt, model)


def test_a_text_that_is_far_too_long_is_not_tokenized(model: treadle.Model) -> None:
    with pytest.raises(ApiError, match="at least") as caught:
        check_text("x" * 10_000_000, model)
    assert caught.value.more["n_prompt_tokens"] > caught.value.more["n_ctx"] == model.n_ctx


def test_names_that_the_client_knows() -> None:
    names = {"stop": "stop_sequences", "a": "b"}
    for param, theirs in (("stop", "stop_sequences"), ("a[0].c", "b[0].c"), ("stops", "stops")):
        with pytest.raises(ApiError) as caught, named(names):
            raise ApiError(400, f"{param}: wrong", param=param)
        assert (caught.value.param, caught.value.message) == (theirs, f"{theirs}: wrong")
    with pytest.raises(ApiError, match="odd") as caught, named(names), of_setting("a"):
        raise TreadleError("odd")
    assert caught.value.param == "b"
