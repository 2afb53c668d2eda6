"""Numbers of schemas as llguidance reads them."""

from __future__ import annotations

import json
import math
from typing import Any

import pytest
from hypothesis import example, given
from hypothesis import strategies as st
from llguidance import LLMatcher, LLTokenizer

from treadle.errors import GrammarError
from treadle.grammar import llguidance_limits
from treadle.grammar.json_numbers import dump, read, spelling
from treadle.grammar.json_schema import schema_source

BYTES = LLTokenizer("byte")
FLOATS = st.floats(allow_nan=False, allow_infinity=False)


def forced(schema: Any) -> str:
    """The only text that a schema allows."""
    matcher = LLMatcher(BYTES, schema_source(schema)[0])
    assert not matcher.is_error()
    return bytes(matcher.compute_ff_tokens()).decode()


@pytest.mark.parametrize(
    "number", [0.9452706955539223, 0.38120423768821243, -2.5157234196648135e270, 0.1, 1e300, -0.5]
)
def test_a_constant_is_written_as_it_is(number: float) -> None:
    """The first three were written as their neighbours."""
    assert float(forced({"const": number})) == number
    assert float(forced({"enum": [number]})) == number


@given(FLOATS)
@example(5e-324)
@example(1.7976931348623157e308)
@example(-0.0)
@example(2.0**63)
def test_what_is_read_is_what_llguidance_reads(number: float) -> None:
    source = LLMatcher.grammar_from_json_schema(json.dumps({"const": number}))
    matcher = LLMatcher(BYTES, source)
    if not matcher.is_error():
        assert float(bytes(matcher.compute_ff_tokens())) == read(repr(number))


@given(FLOATS)
def test_a_spelling_is_the_number(number: float) -> None:
    text = spelling(number)
    if text is not None:
        assert read(text) == number
        assert math.isclose(float(text), number, rel_tol=1e-15)
        assert math.isclose(json.loads(dump([number]))[0], number, rel_tol=1e-15)


def test_texts_stay_what_they_are() -> None:
    value = {"a": ["0.9452706955539223", True, None, 1, 2**70], "\ud800": {}}
    assert dump(value) == json.dumps(value)


def test_a_number_without_a_spelling(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(llguidance_limits, "spelling", lambda number: None)
    with pytest.raises(
        GrammarError, match=r'"const": 0.1 has 0.1, which cannot be written exactly'
    ):
        schema_source({"const": 0.1})
