"""Schemas of arguments in notations that are no JSON: what may be written is what they allow."""

from __future__ import annotations

import json
import re
from random import Random
from typing import Any

import pytest
from llguidance import LLMatcher, LLTokenizer

from treadle.chat.tools.argument_readers import OwnReader, TagReader
from treadle.chat.tools.call_grammar import _arguments, calls_behind
from treadle.chat.tools.formats import QUOTE, ROWS
from treadle.chat.tools.grammar_rules import GrammarRules
from treadle.chat.tools.schemas import MAX_WAYS, by_name, odd_names
from treadle.chat.tools.unquoted_text import not_beginning, without
from treadle.errors import GrammarError

BYTES = LLTokenizer("byte")
ROW = {row.name: row for row in ROWS}
TEXT = {"type": "string"}
NUMBER = {"type": "integer"}
END = "</function>"


def tag_reader(schema: dict[str, Any]) -> TagReader:
    tags = ROW["tags"].tags
    assert tags is not None
    return TagReader(schema, tags)


class Plain:
    """A tokenizer without control tokens."""

    def cut(self, text: str) -> list[str]:
        return [text] if text else []


def allows(row: str, schema: dict[str, Any], text: str) -> bool:
    rules: Any = GrammarRules(Plain())  # type: ignore[arg-type]
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
COLOUR = {"a": {"$ref": "#/$defs/C", "default": "red"}, "b": {"allOf": [{"$ref": "#/$defs/T"}]}}
BY_REFERENCE = {
    "properties": COLOUR,
    "required": ["a"],
    "$defs": {"C": {"enum": ["red", "blue"], "type": "string"}, "T": TEXT},
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
        (
            BY_REFERENCE,
            [tag("a", "red"), tag("a", "blue") + tag("b", "x")],
            [tag("a", '"red"'), tag("a", "green")],
        ),
    ],
)
def test_tags(schema: dict[str, Any], allowed: list[str], refused: list[str]) -> None:
    for text in allowed:
        assert allows("tags", schema, text + END)
    for text in refused:
        assert not allows("tags", schema, text + END)


@pytest.mark.parametrize("value", [NEVER, False, {"enum": []}])
def test_a_parameter_that_cannot_be_and_must(value: Any) -> None:
    with pytest.raises(GrammarError, match="parameter 'a': its schema allows no value"):
        allows("tags", {"properties": {"a": value}, "required": ["a"]}, END)


def test_an_error_names_the_tool() -> None:
    tools = {"look": {"properties": {"a": False}, "required": ["a"]}}
    with pytest.raises(
        GrammarError, match="tool 'look': parameter 'a': its schema allows no value"
    ):
        calls_behind(ROW["tags"], tools, Plain())  # type: ignore[arg-type]


def test_too_many_alternatives() -> None:
    choice = {"anyOf": [A_NUMBER, B_NUMBER]}
    with pytest.raises(GrammarError, match=f"alternatives .at most {MAX_WAYS}"):
        allows("tags", {"anyOf": [choice] * (MAX_WAYS // 2 + 1)}, END)
    assert by_name({"anyOf": [choice] * 99}) == {}  # a reader has to read what comes


def test_a_schema_that_is_itself() -> None:
    with pytest.raises(GrammarError, match="endlessly recursive"):
        allows("tags", {"$ref": "#"}, END)


def test_texts_by_reference_are_read_as_texts() -> None:
    written = tag("a", "red") + tag("b", "1") + END
    assert tag_reader(BY_REFERENCE).take(written, True) == ('{"a": "red", "b": "1"}', "")


WORDS = {"$defs": {"C": {"enum": ["red", "None"], "type": "string"}}}


@pytest.mark.parametrize(
    ("value", "texts", "nulls", "refused"),
    [
        (
            {"anyOf": [TEXT, {"type": "null"}], "default": None},
            ["x", '"x"', "5", "nul", "nullify", "null\n", "[1]", ""],
            ["null", "None"],
            [],
        ),
        ({"type": ["string", "null"]}, ["x", "null "], ["null"], []),
        (
            {"oneOf": [{"type": "string", "maxLength": 3}, {"type": "null"}]},
            ["x", "nul"],
            ["null"],
            ["abcd", "nulls"],
        ),
        ({"type": ["string", "null"], "pattern": "^[a-z]{6,9}$"}, ["abcdef"], ["null"], ["x"]),
        ({"enum": ["red", None]}, ["red"], ["null"], ["nul", "blue", '"red"']),
        ({"anyOf": [{"$ref": "#/$defs/C"}, {"type": "null"}]}, ["red", "None"], ["null"], ["x"]),
        (
            {"anyOf": [{"$ref": "#/$defs/C"}, {"type": "string", "maxLength": 1}]},
            ["red", "x"],
            [],
            ["rex", "null"],
        ),
    ],
)
def test_texts_and_null(value: Any, texts: list[str], nulls: list[str], refused: list[str]) -> None:
    """As pydantic has ``Optional[str]``: without quotes, as models learnt it; null is a word."""
    schema = {"properties": {"a": value}, "required": ["a"], **WORDS}
    for text in (*texts, *nulls):
        whole = tag("a", text) + END
        assert allows("tags", schema, whole) or text == "None"
        expected = json.dumps({"a": None if text in nulls else text})
        assert tag_reader(schema).take(whole, True)[0] == expected
        reader = tag_reader(schema)
        told = ""
        held = ""
        for char in whole:
            made, held = reader.take(held + char, False)
            told += made
        assert told + reader.take(held, True)[0] == expected
    for text in refused:
        assert not allows("tags", schema, tag("a", text) + END)


def test_a_text_that_may_be_null_comes_in_pieces() -> None:
    reader = tag_reader({"properties": {"a": {"type": ["string", "null"]}}})
    assert reader.take("<parameter=a>\nnul", False) == ('{"a": ', "nul")
    assert reader.take("nulls and", False) == ('"nulls and', "")
    assert reader.take(" so", False) == (" so", "")


OTHERS: list[tuple[Any, list[tuple[str, Any]], list[str]]] = [
    # What may be a text beside others: values as they are written, what they are, what is refused.
    (
        {"type": ["string", "integer"]},
        [
            ("x", "x"),
            ('"x"', '"x"'),
            ("5", 5),
            ("-3", -3),
            ("5.5", "5.5"),
            ("0x10", "0x10"),
            ("1_0", "1_0"),
            ("True", "True"),
            ("[1]", "[1]"),
            ("(1)", "(1)"),
            ("", ""),
            ("two\nlines", "two\nlines"),
            ("1e999", "1e999"),
        ],
        [],
    ),
    (
        {"type": ["string", "object"]},
        [
            ("x", "x"),
            ("{}", {}),
            ('{"a": [1, "b"]}', {"a": [1, "b"]}),
            ("{a}", "{a}"),
            ('{"a": 1', '{"a": 1'),
            ("5", "5"),
            ("{'a': None}", {"a": None}),
            ('{"a": "b', '{"a": "b'),
        ],
        ['{"a": "@"}'],
    ),
    ({"type": ["object", "array"]}, [('["@", {"a": "\\"@"}]', ["@", {"a": '"@'}])], ["x", "5"]),
    (
        {"anyOf": [TEXT, {"type": "array", "items": NUMBER}]},
        [("x", "x"), ("[1, 2]", [1, 2]), ('["a"]', '["a"]'), ("[1", "[1")],
        [],
    ),
    (
        {"anyOf": [TEXT, {"type": "boolean"}, {"type": "null"}]},
        [
            ("x", "x"),
            ("true", True),
            ("False", False),
            ("None", None),
            ("null", None),
            ("nul", "nul"),
        ],
        [],
    ),
    (
        {"type": ["string", "number"], "maxLength": 2},
        [("ab", "ab"), ("123", 123), ("1.5", 1.5)],
        ["abc", '"abc"'],
    ),
    (
        {"anyOf": [{"type": "string", "maxLength": 1}, {"$ref": "#/$defs/P"}]},
        [("a", "a"), ('{"p": "@\\n"}', {"p": "@\n"})],
        ["{}", "ab"],
    ),
    (
        {"anyOf": [{"type": "string", "maxLength": 4}, {"$ref": "#/$defs/P"}]},
        [("a", "a"), ('{"p": "longer@"}', {"p": "longer@"})],
        ["abcde", '{"p"'],
    ),
    ({"enum": ["red", 1, None]}, [("red", "red"), ("1", 1), ("null", None)], ["2", '"red"']),
    ({}, [("x", "x"), ("5", 5), ('{"a": 1}', {"a": 1}), ("None", None), ('"x"', '"x"')], []),
    (True, [("x", "x"), ("5", 5)], []),
]
WITH_P = {
    "$defs": {
        "P": {
            "type": "object",
            "properties": {"p": TEXT},
            "required": ["p"],
            "additionalProperties": False,
        }
    }
}


@pytest.mark.parametrize(("value", "said", "refused"), OTHERS, ids=range(len(OTHERS)))
@pytest.mark.parametrize("row", ["tags", "seed", "invoke", "param", "arg", "arg-tight", "arg-hy"])
def test_texts_beside_other_values(row: str, value: Any, said: Any, refused: list[str]) -> None:
    """Texts are as they are written, as their templates print them; others are JSON. "@" is the
    mark behind a value.
    """
    schema = {"properties": {"a": value, "b": NUMBER}, "required": ["a"], **WITH_P}
    tags = ROW[row].tags
    assert tags is not None

    def whole(text: str) -> str:
        parts = tags.open, "a", tags.then, tags.gap, text, tags.gap, tags.close, tags.behind
        return f"{''.join(parts)}{tags.end}"

    for text, found in said:
        expected = json.loads(json.dumps({"a": found}).replace("@", tags.close))
        text = text.replace("@", tags.close)
        assert allows(row, schema, whole(text)), text
        for size in (1, 3, 1000):
            reader = TagReader(schema, tags)
            made = ""
            held = ""
            for at in range(0, len(whole(text)), size):
                more, held = reader.take(held + whole(text)[at : at + size], False)
                made += more
            assert (json.loads(made), held) == (expected, ""), text
    for text in refused:
        assert not allows(row, schema, whole(text.replace("@", tags.close))), text


def test_a_parameter_that_is_perhaps_itself() -> None:
    """It is written as JSON, as before its alternatives were looked at."""
    own = {"anyOf": [{"$ref": "#/$defs/A"}, NUMBER, TEXT]}
    schema = {"properties": {"a": {"$ref": "#/$defs/A"}}, "$defs": {"A": own}}
    assert by_name(schema) == schema["properties"]
    assert tag_reader(schema).take(tag("a", "5") + END, True)[0] == '{"a": 5}'


def test_values_of_alternatives_are_read_by_their_schemas() -> None:
    reader = tag_reader({"oneOf": [A_NUMBER, {"properties": {"b": TEXT}}]})
    text, _ = reader.take(tag("a", "1") + tag("b", "2") + END, True)
    assert json.loads(text) == {"a": 1, "b": "2"}


def test_gemmas_alternatives_have_what_all_have() -> None:
    assert allows("gemma", EITHER, '{a:<|"|>x<|"|>}')
    assert allows("gemma", EITHER, '{b:<|"|>x<|"|>}')
    for text in ("{}", "null", "3"):
        assert not allows("gemma", EITHER, text)
    assert not allows("gemma", {"properties": {"a": False}}, "{a:1}")


OF_TEXTS: list[tuple[dict[str, Any], list[str], list[str]]] = [
    ({"minLength": 2, "maxLength": 3}, ["ab", "é\n", "\n\n", "a</"], ["", "a", "abcd"]),
    ({"minLength": 5, "maxLength": 1}, ["a", "abcdef"], []),  # nothing can follow it
    ({"minLength": 50_000}, ["a"], []),  # no grammar can
    ({"maxLength": 50_000, "pattern": "b"}, ["b", "abc" * 9], ["", "a" * 99]),
    ({"pattern": r"^\d{2}$"}, ["12"], ["1", "123", "a12", "٣٣"]),
    ({"pattern": r"^a|\\.|b$"}, ["ax", "xb", "x\\y"], ["xa", "bx", "."]),
    ({"pattern": "a/[/|$^]"}, ["a//", "xa/|x", "a/$"], ["a/", "a|"]),
    ({"pattern": r"^[\w-]+$"}, ["a_-9"], ["é", "a b"]),
    ({"pattern": "(?i)^ab$"}, ["aB"], ["aBc"]),
    ({"pattern": r"^\$a\^$"}, ["$a^"], ["a"]),
    ({"pattern": "^a\nb$"}, ["a\nb"], ["anb"]),
    ({"pattern": "(^a|b)c"}, ["ac", "x"], []),  # an anchor within
    ({"allOf": [{"pattern": "^a"}, {"maxLength": 2}]}, ["a", "ab"], ["b", "abc"]),
    ({"format": "date"}, ["2024-02-29"], ["2023-02-29", "x"]),
    ({"format": "uuid"}, ["123e4567-e89b-12d3-a456-426614174000"], ["123e4567"]),
    ({"format": "ipv4"}, ["127.0.0.1"], ["127.0.0.256", "1.2.3"]),
    ({"format": "colour"}, ["x"], []),
]


@pytest.mark.parametrize(("sizes", "allowed", "refused"), OF_TEXTS)
@pytest.mark.parametrize("row", ["tags", "gemma"])
def test_sizes_and_patterns_of_texts(
    row: str, sizes: dict[str, Any], allowed: list[str], refused: list[str]
) -> None:
    """As of texts in JSON; without quotes, they end at the first mark."""
    schema = {"properties": {"a": {**TEXT, **sizes}}, "required": ["a"]}
    mark = "\n</parameter>" if row == "tags" else QUOTE

    def written(value: str) -> str:
        return tag("a", value) + END if row == "tags" else f"{{a:{QUOTE}{value}{QUOTE}}}"

    for value in allowed:
        assert allows(row, schema, written(value))
    for value in [*refused, f"a{mark}bcd"]:
        assert not allows(row, schema, written(value))


@pytest.mark.parametrize("mark", ["\n</parameter>", QUOTE, "]]></param>", "]]>", "aaab"])
def test_texts_without_a_mark(mark: str) -> None:
    regex = re.compile(without(mark)[1:-1])
    random = Random(1)
    for _ in range(5000):
        cuts = [mark[: random.randrange(len(mark) + 1)] for _ in range(4)]
        text = "".join(part + random.choice(["", "x", *mark]) for part in cuts)
        assert bool(regex.fullmatch(text)) == (mark not in text)


@pytest.mark.parametrize("mark", ["<![CDATA[", "{", "aab"])
def test_texts_that_do_not_begin_with_a_mark(mark: str) -> None:
    regex = re.compile(not_beginning(mark)[1:-1])
    random = Random(1)
    for _ in range(1000):
        text = mark[: random.randrange(len(mark) + 1)] + random.choice(["", "x", "\n", *mark])
        assert bool(regex.fullmatch(text)) == (not text.startswith(mark))


def test_a_mark_that_is_a_control_token() -> None:
    class Marked(Plain):
        def cut(self, text: str) -> list[Any]:
            before, found, _ = text.partition(QUOTE)
            return [*([before] if before else []), *([7] if found else [])]

    rules: Any = GrammarRules(Marked())  # type: ignore[arg-type]
    rules.literal = json.dumps
    schema = {"type": "object", "properties": {"a": {**TEXT, "maxLength": 3}}, "required": ["a"]}
    source = rules.source(_arguments(rules, ROW["gemma"], schema))
    assert re.search(r"T\d+: \(/\(\?s:.\{0,3\}\)/\) \"\"$", source, re.M)
    assert "<[7]>" in source


@pytest.mark.parametrize(
    ("schema", "allowed", "refused"),
    [
        ({"type": "integer", "minimum": 3, "maximum": 12}, ["3", "12"], ["2", "13", "-3"]),
        ({"type": "number", "exclusiveMinimum": 0}, ["0.5"], ["0", "-1"]),
        ({"type": "integer", "multipleOf": 5}, ["0", "-15"], ["3"]),
        ({"type": ["integer", "null"], "minimum": 3}, ["3", "null"], ["2"]),
        ({"allOf": [{"type": "integer"}, {"minimum": 3}]}, ["3"], ["2"]),
        ({"type": "array", "items": NUMBER}, ["[]", "[1]", "[1,2,3]"], ["[1,]", "[,1]"]),
        ({"type": "array", "items": NUMBER, "minItems": 1}, ["[1]", "[1,2]"], ["[]"]),
        ({"type": "array", "items": NUMBER, "maxItems": 0}, ["[]"], ["[1]"]),
        ({"type": "array", "items": NUMBER, "maxItems": 1}, ["[]", "[1]"], ["[1,2]"]),
        ({"type": "array", "items": NUMBER, "minItems": 1, "maxItems": 1}, ["[1]"], ["[]"]),
        ({"type": "array", "prefixItems": [NUMBER], "maxItems": 1}, ["[]", "[1]"], ["[1,2]"]),
        (
            {"type": "array", "items": NUMBER, "minItems": 2, "maxItems": 3},
            ["[1,2]", "[1,2,3]"],
            ["[]", "[1]", "[1,2,3,4]"],
        ),
        (
            {"type": "array", "prefixItems": [NUMBER, {"type": "null"}], "items": NUMBER},
            ["[]", "[1]", "[1,null]", "[1,null,2]"],
            ["[null]", "[1,2]"],
        ),
        (
            {
                "type": "array",
                "prefixItems": [NUMBER, {"type": "null"}],
                "minItems": 2,
                "items": False,
            },
            ["[1,null]"],
            ["[]", "[1]", "[1,null,2]"],
        ),
        (
            {"type": "array", "prefixItems": [NUMBER] * 3, "minItems": 1, "maxItems": 2},
            ["[1]", "[1,2]"],
            ["[]", "[1,2,3]"],
        ),
        ({"type": "object", "required": ["z"]}, ["{z:1}"], ["{}"]),
        (
            {"type": "object", "properties": {"b": NUMBER}, "required": ["z"]},
            ["{z:1}", "{b:1,z:2}"],
            ["{b:1}"],
        ),
        (NEVER, ["7"], []),  # as far as its type goes
    ],
)
def test_gemmas_sizes(schema: dict[str, Any], allowed: list[str], refused: list[str]) -> None:
    whole = {"properties": {"a": schema}, "required": ["a"]}
    for text in allowed:
        assert allows("gemma", whole, f"{{a:{text}}}")
    for text in refused:
        assert not allows("gemma", whole, f"{{a:{text}}}")


def test_gemmas_names_with_a_colon() -> None:
    schema = {"properties": {"a:b": TEXT, "o": {"type": "object", "properties": {"x:y": NUMBER}}}}
    text = '{a:b:<|"|>a:c<|"|>,o:{x:y:3}}'
    assert allows("gemma", schema, text)
    assert odd_names(schema) == {"a:b", "x:y"}
    for size in (1, 2, 3, 50):
        reader = OwnReader(odd_names(schema))
        held = ""
        made = ""
        for at in range(0, len(text), size):
            said, held = reader.take(held + text[at : at + size], False)
            made += said
        assert json.loads(made) == {"a:b": "a:c", "o": {"x:y": 3}}


@pytest.mark.parametrize("row", ["tags", "gemma"])
@pytest.mark.parametrize("required", [5, True, None, "ab", [5], {"a": 1}])
def test_required_that_is_no_list_of_names(row: str, required: Any) -> None:
    with pytest.raises(GrammarError, match=r"its 'required' is .*: expected a list of names"):
        allows(row, {"properties": {"a": TEXT}, "required": required}, "")
