"""Schemas of arguments in notations that are no JSON: what may be written is what they allow."""

from __future__ import annotations

import json
from typing import Any

import pytest
from llguidance import LLMatcher, LLTokenizer

from treadle.errors import GrammarError
from treadle.speech.arguments import OwnReader, TagReader
from treadle.speech.constraint import Rules, _arguments, calls_behind
from treadle.speech.rows import ROWS
from treadle.speech.schemas import MAX_WAYS, by_name, with_colons

BYTES = LLTokenizer("byte")
ROW = {row.name: row for row in ROWS}
TEXT, NUMBER = {"type": "string"}, {"type": "integer"}
END = "</function>"


class Plain:
    """A tokenizer without control tokens."""

    def cut(self, text: str) -> list[str]:
        return [text] if text else []


def allows(row: str, schema: dict[str, Any], text: str) -> bool:
    rules: Any = Rules(Plain())  # type: ignore[arg-type]
    source = rules.source(_arguments(rules, ROW[row], {"type": "object", **schema}))
    matcher = LLMatcher(BYTES, LLMatcher.grammar_from_lark(source), log_level=0)
    assert not matcher.is_error(), matcher.get_error()
    return bool(matcher.consume_tokens(BYTES.tokenize_str(text)) and matcher.is_accepting())


def tag(name: str, value: str) -> str:
    return f"<parameter={name}>\n{value}\n</parameter>\n"


A_NUMBER = {"properties": {"a": NUMBER}, "required": ["a"]}
B_NUMBER = {"properties": {"b": NUMBER}, "required": ["b"]}
EITHER = {
    "properties": {"a": TEXT, "b": TEXT},
    "anyOf": [{"required": ["a"]}, {"required": ["b"]}],
}
NEVER = {"type": "integer", "minimum": 5, "maximum": 1}


@pytest.mark.parametrize(
    ("schema", "allowed", "refused"),
    [
        (EITHER, [tag("a", "x"), tag("b", "x"), tag("a", "x") + tag("b", "y")], [""]),
        ({"allOf": [A_NUMBER, B_NUMBER]}, [tag("a", "1") + tag("b", "2")], ["", tag("a", "1")]),
        ({"oneOf": [A_NUMBER, B_NUMBER]}, [tag("a", "1"), tag("b", "2")], ["", tag("a", "x")]),
        ({"$ref": "#/$defs/A", "$defs": {"A": A_NUMBER}}, [tag("a", "1")], ["", tag("a", "x")]),
        ({"properties": {"a": NEVER, "b": TEXT}}, ["", tag("b", "x")], [tag("a", "3")]),
        ({"properties": {"a": False, "b": TEXT}}, ["", tag("b", "x")], [tag("a", "3")]),
        ({"properties": {"a": {"enum": []}}}, [""], [tag("a", "x")]),
        ({"properties": {"a": TEXT}, "required": ["z"]}, [tag("z", "[1]")], ["", tag("a", "x")]),
    ],
)  # fmt: skip
def test_tags(schema: dict[str, Any], allowed: list[str], refused: list[str]) -> None:
    for text in allowed:
        assert allows("tags", schema, text + END)
    for text in refused:
        assert not allows("tags", schema, text + END)


@pytest.mark.parametrize("value", [NEVER, False, {"enum": []}])
def test_a_parameter_that_cannot_be_and_must(value: Any) -> None:
    with pytest.raises(GrammarError, match="parameter 'a': nothing fulfils its schema"):
        allows("tags", {"properties": {"a": value}, "required": ["a"]}, END)


def test_an_error_names_the_tool() -> None:
    tools = {"look": {"properties": {"a": False}, "required": ["a"]}}
    with pytest.raises(GrammarError, match="tool 'look': parameter 'a': nothing fulfils"):
        calls_behind(ROW["tags"], tools, Plain())  # type: ignore[arg-type]


def test_too_many_alternatives() -> None:
    choice = {"anyOf": [A_NUMBER, B_NUMBER]}
    with pytest.raises(GrammarError, match=f"alternatives .at most {MAX_WAYS}"):
        allows("tags", {"anyOf": [choice] * (MAX_WAYS // 2 + 1)}, END)
    assert by_name({"anyOf": [choice] * 99}) == {}  # a reader has to read what comes


def test_a_schema_that_is_itself() -> None:
    with pytest.raises(GrammarError, match="leads back to itself"):
        allows("tags", {"$ref": "#"}, END)


def test_values_of_alternatives_are_read_by_their_schemas() -> None:
    reader = TagReader({"oneOf": [A_NUMBER, {"properties": {"b": TEXT}}]})
    text, _ = reader.take(tag("a", "1") + tag("b", "2") + END, True)
    assert json.loads(text) == {"a": 1, "b": "2"}


def test_gemmas_alternatives_have_what_all_have() -> None:
    assert allows("gemma", EITHER, '{a:<|"|>x<|"|>}')
    assert allows("gemma", EITHER, '{b:<|"|>x<|"|>}')
    for text in ("{}", "null", "3"):
        assert not allows("gemma", EITHER, text)
    assert not allows("gemma", {"properties": {"a": False}}, "{a:1}")


def test_gemmas_names_with_a_colon() -> None:
    schema = {"properties": {"a:b": TEXT, "o": {"type": "object", "properties": {"x:y": NUMBER}}}}
    text = '{a:b:<|"|>a:c<|"|>,o:{x:y:3}}'
    assert allows("gemma", schema, text)
    assert with_colons(schema) == {"a:b", "x:y"}
    for size in (1, 2, 3, 50):
        reader, held, made = OwnReader(with_colons(schema)), "", ""
        for at in range(0, len(text), size):
            said, held = reader.take(held + text[at : at + size], False)
            made += said
        assert json.loads(made) == {"a:b": "a:c", "o": {"x:y": 3}}


@pytest.mark.parametrize("row", ["tags", "gemma"])
@pytest.mark.parametrize("required", [5, True, None, "ab", [5], {"a": 1}])
def test_required_that_is_no_list_of_names(row: str, required: Any) -> None:
    with pytest.raises(GrammarError, match=r"its 'required' is .*: expected a list of names"):
        allows(row, {"properties": {"a": TEXT}, "required": required}, "")
