"""Objects that say nothing of further keys have none."""

from __future__ import annotations

from typing import Any

import pytest

from tests.text.vocabularies import accepts
from treadle.text.grammar import Grammar
from treadle.text.tokenizer import Tokenizer


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
        ({**B, "$ref": "#/$defs/x", "$defs": {"x": {"$ref": "#/$defs/y"}, "y": A}},
         '{"b": 1, "a": 1}'),
        ({"allOf": [an_object(o=A), an_object(o=B)]}, '{"o": {"a": 1, "b": 1}}'),
        ({"enum": [{**A, "z": 1}]},
         '{"type": "object", "properties": {"a": {"type": "integer"}}, "required": ["a"], "z": 1}'),
    ],
)  # fmt: skip
def test_open(bytes_tokenizer: Tokenizer, schema: Any, text: str) -> None:
    """Where a schema says so, and where several of its parts describe one object."""
    assert accepts(Grammar.from_json_schema(schema, bytes_tokenizer), text)
