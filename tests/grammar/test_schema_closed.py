"""Objects that say nothing of further keys have none."""

from __future__ import annotations

from typing import Any

import pytest

from tests.tokenizer.vocabularies import accepts
from treadle.errors import GrammarError
from treadle.grammar.grammar import Grammar
from treadle.tokenizer.tokenizer import Tokenizer


def an_object(**properties: Any) -> dict[str, Any]:
    return {"type": "object", "properties": properties, "required": list(properties)}


N = {"type": "integer"}
A, B = an_object(a=N), an_object(b=N)
LINKED = an_object(n=N, next={"anyOf": [{"$ref": "#/$defs/x"}, {"type": "null"}]})
TAGGED = [an_object(kind={"const": kind}, a=N) for kind in ("one", "two")]


@pytest.mark.parametrize(
    ("schema", "right", "wrong"),
    [
        (A, '{"a": 1}', '{"a": 1, "z": 1}'),
        (an_object(o=A), '{"o": {"a": 1}}', '{"o": {"a": 1, "z": 1}}'),
        ({"type": "array", "items": A}, '[{"a": 1}]', '[{"a": 1, "z": 1}]'),
        ({"type": "object", "properties": {}}, "{}", '{"z": 1}'),
        ({"properties": {"a": N}}, '{"a": 1}', '{"z": 1}'),
        ({"anyOf": [A, B, {"type": "null"}]}, '{"b": 1}', '{"b": 1, "a": 1}'),
        ({"oneOf": TAGGED}, '{"kind": "two", "a": 1}', '{"kind": "two", "a": 1, "z": 1}'),
        ({"allOf": [{"$ref": "#/$defs/x"}], "$defs": {"x": A}}, '{"a": 1}', '{"a": 1, "z": 1}'),
        (
            {"$ref": "#/$defs/x", "$defs": {"x": LINKED}},
            '{"n": 1, "next": {"n": 2, "next": null}}',
            '{"n": 1, "next": {"n": 2, "next": null, "z": 1}}',
        ),
        (an_object(allOf=A, enum=B), '{"allOf": {"a": 1}, "enum": {"b": 1}}', '{"allOf": {"z": 1}'),
    ],
)
def test_closed(bytes_tokenizer: Tokenizer, schema: Any, right: str, wrong: str) -> None:
    grammar = Grammar.from_json_schema(schema, bytes_tokenizer)
    assert accepts(grammar, right)
    assert not accepts(grammar, wrong)


@pytest.mark.parametrize(
    ("schema", "text"),
    [
        ({"type": "object"}, '{"z": 1}'),
        ({**A, "additionalProperties": True}, '{"a": 1, "z": 1}'),
        ({**A, "additionalProperties": N}, '{"a": 1, "z": 1}'),
        ({**A, "patternProperties": {"^z": N}}, '{"a": 1, "z": 1}'),
        ({**A, "required": ["a", "z"]}, '{"a": 1, "z": 1}'),
        ({**A, "minProperties": 2}, '{"a": 1, "z": 1}'),
        ({"allOf": [A, B]}, '{"a": 1, "b": 1}'),
        ({**A, "anyOf": [B, {"required": ["z"]}]}, '{"b": 1, "a": 1}'),
        (
            {**B, "$ref": "#/$defs/x", "$defs": {"x": {"$ref": "#/$defs/y"}, "y": A}},
            '{"b": 1, "a": 1}',
        ),
        ({"allOf": [an_object(o=A), an_object(o=B)]}, '{"o": {"a": 1, "b": 1}}'),
        (
            {"enum": [{**A, "z": 1}]},
            '{"type": "object", "properties": {"a": {"type": "integer"}}, '
            '"required": ["a"], "z": 1}',
        ),
    ],
)
def test_open(bytes_tokenizer: Tokenizer, schema: Any, text: str) -> None:
    """Where a schema says so, and where several of its parts describe one object."""
    assert accepts(Grammar.from_json_schema(schema, bytes_tokenizer), text)


TEXTS = {"type": "string"}
FLAG = {"type": "boolean"}
NAMED = {"type": "string", "enum": ["a", "b"]}
RECORD = {"type": "object", "additionalProperties": FLAG}


@pytest.mark.parametrize(
    ("schema", "right", "wrong"),
    [
        ({**RECORD, "propertyNames": TEXTS}, '{"z": true}', '{"z": 1}'),
        ({**A, "propertyNames": {}, "additionalProperties": False}, '{"a": 1}', '{"z": 1}'),
        ({**RECORD, "propertyNames": NAMED}, '{"b": true}', '{"z": true}'),
        ({**RECORD, "propertyNames": NAMED}, "{}", '{"b": 1}'),
        (
            {**RECORD, "propertyNames": NAMED, "required": ["a", "b"]},
            '{"a": true, "b": false}',
            '{"a": true}',
        ),
        ({**A, "propertyNames": {"enum": ["b", "a"]}}, '{"b": "any", "a": 1}', '{"a": "any"}'),
        ({**A, "propertyNames": NAMED, "additionalProperties": False}, '{"a": 1}', '{"a": 1, "b"'),
        ({**RECORD, "propertyNames": {"const": "a"}}, '{"a": true}', '{"b": true}'),
        ({**RECORD, "propertyNames": {"pattern": "^a[0-9]$"}}, '{"a1": true}', '{"b1": true}'),
        (
            {**RECORD, "propertyNames": {"$ref": "#/$defs/x"}, "$defs": {"x": NAMED}},
            '{"a": true}',
            '{"z": true}',
        ),
        ({"allOf": [{"propertyNames": NAMED}, A]}, '{"a": 1, "b": 1}', '{"a": 1, "z": 1}'),
    ],
)
def test_names(bytes_tokenizer: Tokenizer, schema: Any, right: str, wrong: str) -> None:
    """As zod writes a ``record``; of llguidance's own it is refused."""
    grammar = Grammar.from_json_schema(schema, bytes_tokenizer)
    assert accepts(grammar, right)
    assert not accepts(grammar, wrong)


@pytest.mark.parametrize(
    "names",
    [
        {"maxLength": 3},
        False,
        {"type": "number"},
        {"enum": ["a", 1]},
        {"pattern": "a", "maxLength": 3},
        {"enum": ["a"], "pattern": "a"},
    ],
)
def test_names_that_nothing_else_says(bytes_tokenizer: Tokenizer, names: Any) -> None:
    schema = {**RECORD, "propertyNames": names}
    with pytest.raises(GrammarError, match="propertyNames"):
        Grammar.from_json_schema(schema, bytes_tokenizer)
    made = Grammar.from_json_schema(schema, bytes_tokenizer, lenient=True)
    assert accepts(made, '{"z": true}')
    assert any("propertyNames" in warning for warning in made.warnings)
