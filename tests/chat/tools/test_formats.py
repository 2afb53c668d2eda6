"""Arguments that are no JSON: what a row's grammar allows is what its reader reads back."""

from __future__ import annotations

import ast
import json
import warnings
from functools import lru_cache
from random import Random
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from llguidance import LLMatcher

from tests.chat.tools.test_schemas import BYTES, ROW, Plain
from treadle.chat.tools.argument_readers import reader_of
from treadle.chat.tools.call_grammar import _arguments
from treadle.chat.tools.grammar_rules import GrammarRules
from treadle.chat.tools.schema_check import fulfils
from treadle.grammar.llguidance_limits import ReferencedSchemas

PYTHON = ["python", "python-lines"]
TAGGED = [name for name, row in ROW.items() if row.tags is not None]
ROWS = [*PYTHON, *TAGGED, "gemma"]


def matcher_of(row: str, schema: dict[str, Any]) -> LLMatcher:
    return _matcher_of(row, json.dumps(schema)).deep_copy()


@lru_cache(64)  # several texts of one schema come one after the other
def _matcher_of(row: str, written: str) -> LLMatcher:
    schema = json.loads(written)
    rules: Any = GrammarRules(Plain())  # type: ignore[arg-type]
    source = rules.source(_arguments(rules, ROW[row], {"type": "object", **schema}))
    matcher = LLMatcher(BYTES, LLMatcher.grammar_from_lark(source), log_level=0)
    assert not matcher.is_error(), matcher.get_error()
    return matcher


def allows(matcher: LLMatcher, text: str) -> bool:
    own = matcher.deep_copy()
    return bool(own.consume_tokens(BYTES.tokenize_str(text)) and own.is_accepting())


def read(row: str, schema: dict[str, Any], text: str, size: int) -> tuple[Any, str]:
    """What a reader makes of a text that comes so many characters at a time, and what is left."""
    reader = reader_of(ROW[row], schema)
    told = ""
    held = ""
    for at in range(0, len(text), size):
        made, held = reader.take(held + text[at : at + size], False)
        told += made
    assert reader.done, (text, told, held)
    return json.loads(told), held


def check(row: str, schema: dict[str, Any], text: str, expected: Any) -> None:
    assert allows(matcher_of(row, schema), text), text
    for size in (1, 3, max(len(text), 1)):
        assert read(row, schema, text, size) == (expected, ""), text


# -- texts of Python ------------------------------------------------------------------------------

ESCAPES = [
    (r"\x4", r"\x4"),
    (r"C:\xampp\users", r"C:\xampp\users"),
    (r"\d+\.py", r"\d+\.py"),
    (r"\U0001F600", "\U0001f600"),
    (r"\U0001F60", r"\U0001F60"),
    (r"\U00110000", r"\U00110000"),
    (r"\N{BULLET}\N{no such}\N{", "\u2022\\N{no such}\\N{"),
    (r"\N", r"\N"),
    (r"\N}", r"\N}"),
    (r"\0\07\101\1012\8", "\0\7AA2\\8"),
    (r"\777", "\u01ff"),
    (r"\a\b\f\n\r\t\v", "\a\b\f\n\r\t\v"),
    (r"\x41\u00e9\q", "A\u00e9\\q"),
    (r"\u12", r"\u12"),
    (r"\u", r"\u"),
    (r"\x", r"\x"),
    (r"\ud83d\ude00", "\U0001f600"),
    (r"\ud83d", "\ud83d"),
    (r"\ude00 \ud83dx", "\ude00 \ud83dx"),
    (r"\\x41", r"\x41"),
    (r"\"\'", "\"'"),
    ("a\\\nb", "ab"),
    ("two\nlines", "two\nlines"),
    (r"\/", r"\/"),
    (r"\x4\x41", r"\x4A"),
    (r"\1\x", "\1\\x"),
    ("", ""),
    (r"\\", "\\"),
]
TEXT: dict[str, Any] = {"properties": {"a": {"type": "string"}}, "required": ["a"]}


@pytest.mark.parametrize(("written", "text"), ESCAPES)
@pytest.mark.parametrize("row", PYTHON)
def test_escapes_of_python(row: str, written: str, text: str) -> None:
    """As Python has them; those that it lacks, or that are cut short, keep their backslash."""
    for quote in "'\"":
        check(row, TEXT, f"a={quote}{written}{quote})", {"a": text})
    array = {"properties": {"a": {"type": "array", "items": {"type": "string"}}}}
    if "\n" in written:  # which the literal of a list has not
        return
    check(row, array, f"a=['{written}', \"{written}\"])", {"a": [text, text]})
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        try:
            expected = ast.literal_eval(f"'{written}'")
        except SyntaxError:
            return
    assert text.encode("utf-16", "surrogatepass") == expected.encode("utf-16", "surrogatepass")


@pytest.mark.parametrize(
    ("written", "text"),
    [
        ("'''it's'''", "it's"),
        ('"""a"b\n"""', 'a"b\n'),
        ("''", ""),
        ("''''''", ""),
        ("'a' 'b'", "ab"),
        (r"'\'' '\x41'", "'A"),
        ("'a'\n\"b\"'''c'''", "abc"),
        (r"'''\''''", "'"),
    ],
)
def test_other_quotes_are_read(written: str, text: str) -> None:
    for size in (1, 2, 100):
        assert read("python", TEXT, f"a={written}, b=1)", size) == ({"a": text, "b": 1}, "")
        assert read("python", TEXT, f"b=[{written}])", size) == ({"b": [text]}, "")


def test_a_half_of_a_pair_is_written_as_an_escape() -> None:
    """UTF-8 has none."""
    for written in (r"a='\ud800')", r"a=['\ud800'])", r"a=('\ud800', {'\udfff': 1}))"):
        told, _ = reader_of(ROW["python"], TEXT).take(written, False)
        assert told.encode().decode() == told
        assert "\ud800" in str(json.loads(told)["a"][0])


# -- names ----------------------------------------------------------------------------------------

NAMES = [
    "my key",
    "a=b",
    "a,b",
    "a)b",
    "two\nlines",
    "a>b",
    " x",
    "x ",
    " ",
    'a"b',
    "a'b",
    "é",
    "a:b",
    "a</b",
    "a}",
    "{a",
    "a-b.c",
    "</arg_key>",
    "[",
    "x\\n",
    "-",
    "a\tb",
    '"a"',
    "#",
]


@pytest.mark.parametrize("name", NAMES)
@pytest.mark.parametrize("row", ROWS)
def test_names_of_properties(row: str, name: str) -> None:
    """The grammar makes models write a name as it is."""
    integer = {"type": "integer"}
    others = {
        "a": {"type": "string"},
        name: integer,
        "x": {"enum": ["b"]},
        f"{name}{name}": integer,
    }
    for properties in ({name: integer}, others):
        schema = {"properties": properties, "additionalProperties": False}
        values = {key: {"a": "v='b'"}.get(key, 5) for key in properties} | (
            {"x": "b"} if "x" in properties and properties["x"] != integer else {}
        )
        for said in ({name: 5}, values) if values != {name: 5} else (values,):
            check(row, schema, written_by(row, said), said)


def written_by(row: str, arguments: dict[str, Any]) -> str:
    """Arguments as a row's family writes them."""
    own = ROW[row]
    tags = ROW[row].tags
    if own.style == "own":
        return own_value(arguments)
    if tags is None:
        return ", ".join(f"{key}={value!r}" for key, value in arguments.items()) + ")"
    made = ""
    for key, value in arguments.items():
        said = value if isinstance(value, str) else json.dumps(value, ensure_ascii=False)
        then = tags.then if isinstance(value, str) or not tags.others else tags.others[0]
        made += f"{tags.open}{key}{then}{tags.gap}{said}{tags.gap}{tags.close}{tags.behind}"
    return made + tags.end


def own_value(value: Any) -> str:
    if isinstance(value, dict):
        pairs = sorted(value.items(), key=lambda pair: pair[0].lower())
        return f"{{{','.join(f'{key}:{own_value(each)}' for key, each in pairs)}}}"
    if isinstance(value, list):
        return f"[{','.join(map(own_value, value))}]"
    return f'<|"|>{value}<|"|>' if isinstance(value, str) else json.dumps(value)


# -- order ----------------------------------------------------------------------------------------

ORDERED: dict[str, Any] = {
    "properties": {
        "path": {"type": "string"},
        "all": {"type": "boolean"},
        "n": {"type": "integer"},
        "list": {"type": "array", "items": {"type": "string"}},
    },
    "required": ["n", "path"],
    "additionalProperties": False,
}


@pytest.mark.parametrize("row", [*PYTHON, *TAGGED])
def test_parameters_come_in_any_order(row: str) -> None:
    values: dict[str, Any] = {"list": ["x"], "all": True, "path": "p", "n": 2}
    for order in (["n", "path"], ["list", "n", "all", "path"], ["path", "n", "all"], [*values]):
        check(
            row,
            ORDERED,
            written_by(row, {key: values[key] for key in order}),
            {key: values[key] for key in order},
        )
    matcher = matcher_of(row, ORDERED)
    for order in ([], ["n"], ["path", "list", "all"]):
        assert not allows(matcher, written_by(row, {key: values[key] for key in order}))
    two = written_by(row, {"n": 2, "path": "p"})
    again = two.replace(written_by(row, {}), "") + (", n=2)" if row in PYTHON else "")
    if row in PYTHON:
        assert not allows(matcher, again)
    else:
        one = written_by(row, {"n": 2}).removesuffix(written_by(row, {}))
        assert not allows(matcher, f"{one}{one}{two}")


@pytest.mark.slow
@pytest.mark.parametrize("row", [*PYTHON, *TAGGED])
def test_many_parameters(row: str) -> None:
    """More than a rule can count keep the schema's order."""
    for n in (64, 65):
        names = [f"p{i}" for i in range(n)]
        properties = {name: {"type": "integer"} for name in names}
        schema = {"properties": properties, "required": names[5:7]}
        check(row, schema, written_by(row, dict.fromkeys(names, 1)), dict.fromkeys(names, 1))
        few = {"p5": 1, "p6": 2, "p60": 3}
        check(row, schema, written_by(row, few), few)
        backwards = dict(reversed(few.items()))
        assert allows(matcher_of(row, schema), written_by(row, backwards)) == (n <= 64)


# -- any schema -----------------------------------------------------------------------------------

SCALARS: Any = st.sampled_from(
    [
        {"type": "string"},
        {"type": "integer"},
        {"type": "number"},
        {"type": "boolean"},
        {"type": ["string", "null"]},
        {"type": ["integer", "null"]},
        {"enum": ["a", "it's", "\\n"]},
        {"type": "string", "maxLength": 5},
        {"type": "string", "pattern": "^[a-c]+$"},
        {"type": "integer", "minimum": -3, "maximum": 12},
        {"type": "string", "minLength": 2},
        {"type": ["string", "integer"]},
        {"const": "x"},
        {"enum": [1, None]},
    ]
)
NAME: Any = st.sampled_from(["a", "b c", "d=e", "f>g", "k"])


def objects(inner: Any) -> Any:
    properties = st.dictionaries(NAME, inner, max_size=3)
    return st.tuples(properties, st.booleans()).map(
        lambda made: {
            "type": "object",
            "properties": made[0],
            "additionalProperties": False,
            "required": list(made[0])[: 1 + made[1]],
        }
    )


def arrays(inner: Any) -> Any:
    return inner.map(lambda each: {"type": "array", "items": each, "maxItems": 3})


SCHEMAS: Any = st.recursive(SCALARS, lambda s: st.one_of(objects(s), arrays(s)), max_leaves=5)
WHOLE: Any = objects(SCHEMAS)
LIKED = "ab'\"\\\\\\\nxuN{}[](),:=<>/!C0147 nté"
ENDS = "'\"])}>"


def walked(matcher: LLMatcher, random: Random, most: int = 400) -> str | None:
    """A text of a grammar, by chance; None where it does not come to an end soon."""
    matcher = matcher.deep_copy()
    out = bytearray()
    liked = [byte for byte in LIKED.encode()]
    while len(out) < most:
        if matcher.is_accepting():
            return bytes(out).decode()
        forced = matcher.compute_ff_bytes()
        if forced:
            assert matcher.consume_tokens(list(forced))
            out += forced
            continue
        bits = np.unpackbits(np.frombuffer(matcher.compute_bitmask(), np.uint8), bitorder="little")
        allowed = set(np.flatnonzero(bits[:256]).tolist())
        few = [
            byte for byte in (ENDS.encode() if random.random() < 0.5 else liked) if byte in allowed
        ]
        byte = random.choice(few or sorted(allowed))
        assert matcher.consume_token(byte), matcher.get_error()
        out.append(byte)
    return None


@pytest.mark.slow
@settings(max_examples=12, deadline=None)
@given(WHOLE, st.integers(0, 2**32))
@pytest.mark.parametrize("row", ROWS)
def test_what_a_grammar_allows_is_read_back(row: str, schema: Any, seed: int) -> None:
    random = Random(seed)
    matcher = matcher_of(row, schema)
    parts = ReferencedSchemas(schema)
    for _ in range(3):
        text = walked(matcher, random)
        if text is None:
            continue
        found = [read(row, schema, text, size) for size in (1, 4, max(len(text), 1))]
        assert found[0] == found[1] == found[2], text
        arguments, rest = found[0]
        assert rest == "", text
        assert fulfils(arguments, {"type": "object", **schema}, parts), (text, arguments)
        if row in PYTHON:
            same_as_python(text, arguments)


def same_as_python(text: str, arguments: Any) -> None:
    """Where Python reads a call, it has the same arguments."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        try:
            call: Any = ast.parse(f"f({text}", mode="eval").body
            expected = {each.arg: ast.literal_eval(each.value) for each in call.keywords}
        except (SyntaxError, ValueError):
            return
    assert json.loads(json.dumps(arguments)) == json.loads(json.dumps(expected)), text


VALUES: Any = st.recursive(
    st.none()
    | st.booleans()
    | st.integers(-9, 9)
    | st.text(max_size=6)
    | st.floats(allow_nan=False, allow_infinity=False),
    lambda inner: (
        st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=3), inner, max_size=3)
    ),
    max_leaves=6,
)


def schema_of(value: Any) -> dict[str, Any]:
    """A schema that a value fulfils."""
    if isinstance(value, list):
        kinds = [schema_of(each) for each in value]
        return {"type": "array", "items": {"anyOf": kinds} if kinds else {"type": "integer"}}
    if isinstance(value, dict):
        properties = {key: schema_of(each) for key, each in value.items()}
        return {
            "type": "object",
            "properties": properties,
            "required": list(value),
            "additionalProperties": False,
        }
    named = {str: "string", bool: "boolean", int: "integer", float: "number", type(None): "null"}
    return {"type": named[type(value)]}


@pytest.mark.slow
@settings(max_examples=25, deadline=None)
@given(st.dictionaries(NAME, VALUES, min_size=1, max_size=3))
@pytest.mark.parametrize("row", PYTHON)
def test_what_python_prints_is_allowed_and_read_back(row: str, arguments: Any) -> None:
    schema = schema_of(arguments)
    as_json = ", ".join(f"{key}={json.dumps(each)}" for key, each in arguments.items()) + ")"
    check(row, schema, written_by(row, arguments), arguments)
    told, _ = reader_of(ROW[row], schema).take(as_json, False)
    assert json.loads(told) == arguments


PRINTED: list[tuple[Any, str, Any]] = [
    ({"type": ["integer", "null"]}, "None", None),
    ({"anyOf": [{"type": "integer"}, {"type": "null"}]}, "None", None),
    ({"type": "boolean"}, "True", True),
    ({"type": "array", "items": {"type": "string"}}, "['a', \"it's\"]", ["a", "it's"]),
    ({"type": "array", "items": {"type": "boolean"}}, "[True, False]", [True, False]),
    ({"type": "object", "additionalProperties": {"type": "string"}}, "{'k': 'v'}", {"k": "v"}),
    ({"type": "object"}, "{'k': [1, None, {'l': True}]}", {"k": [1, None, {"l": True}]}),
    ({}, "{'k': 'v'}", {"k": "v"}),
    ({"type": "string", "maxLength": 4}, "'abcd'", "abcd"),
    ({"type": "string", "maxLength": 4}, r"'a\x41\n\''", "aA\n'"),
    ({"type": "string", "pattern": "^a+$"}, "'aa'", "aa"),
    ({"type": "string", "format": "date"}, "'2026-11-28'", "2026-11-28"),
    ({"enum": ["a", 1]}, "'a'", "a"),
    ({"$ref": "#/$defs/T"}, "{'v': 1, 'up': {'v': 2}}", {"v": 1, "up": {"v": 2}}),
    ({"anyOf": [{"type": "string"}, {"type": "array"}]}, "['a']", ["a"]),
]
TREE = {
    "type": "object",
    "properties": {"v": {"type": "integer"}, "up": {"$ref": "#/$defs/T"}},
    "required": ["v"],
    "additionalProperties": False,
}


@pytest.mark.parametrize(("schema", "written", "value"), PRINTED)
@pytest.mark.parametrize("row", PYTHON)
def test_what_templates_of_python_rows_print(
    row: str, schema: Any, written: str, value: Any
) -> None:
    whole = {"properties": {"a": schema, "b": {"type": "integer"}}, "$defs": {"T": TREE}}
    check(row, whole, f"a={written})", {"a": value})
    check(row, whole, f"a={written}, b=1)", {"a": value, "b": 1})


@pytest.mark.parametrize(
    ("schema", "written"),
    [
        ({"type": "string", "maxLength": 2}, "'abc'"),
        ({"type": "string", "minLength": 2}, "'a'"),
        ({"type": "string", "minLength": 2}, r"'\x41'"),
        ({"type": "integer"}, "None"),
        ({"type": "array", "items": {"type": "string"}, "maxItems": 1}, "['a', 'b']"),
        (
            {
                "type": "object",
                "properties": {"k": {"type": "integer"}},
                "additionalProperties": False,
                "required": ["k"],
            },
            "{'l': 1}",
        ),
        ({"type": "array", "items": {"type": "integer"}, "uniqueItems": True}, "['a']"),
        ({"type": "string", "pattern": "^a+$"}, "'ab'"),
        ({"enum": ["a"]}, "'b'"),
        ({"type": "integer", "maximum": 3}, "4"),
        ({"type": "array", "items": {"type": "integer", "maximum": 3}}, "[4]"),
    ],
)
def test_literals_of_python_obey_schemas(schema: Any, written: str) -> None:
    assert not allows(matcher_of("python", {"properties": {"a": schema}}), f"a={written})")


# -- marks within values --------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("text", "limits"),
    [
        ("a</param>b", {}),
        ("a]]>b</param>", {}),
        ("]]", {}),
        ("", {}),
        ("<![CDATA[", {}),
        ("a</param>b", {"maxLength": 20}),
        ("]]></para", {"maxLength": 20}),
        ("]", {"minLength": 1}),
        ("a</param>", {"enum": ["a</param>", "b"]}),
        ("null", {"type": ["string", "null"]}),
    ],
)
def test_texts_in_quotes_of_their_own(text: str, limits: Any) -> None:
    """MiniCPM 5's CDATA: what it has within is the text."""
    schema = {"properties": {"a": {"type": "string", **limits}, "b": {"type": "integer"}}}
    begin = f'<param name="a"><![CDATA[{text}]]></param>'
    behind = '<param name="b">1</param>'
    check("param", schema, f"{begin}</function>", {"a": text})
    check("param", schema, f"{begin}{behind}</function>", {"a": text, "b": 1})


@pytest.mark.parametrize("row", TAGGED)
@pytest.mark.parametrize(
    ("schema", "value"),
    [
        ({"type": "array", "items": {"type": "string"}}, ["@", 'a"@\\', "b"]),
        ({"type": "object"}, {"@": "a@b", "k": [{"l": "@@"}]}),
        ({"type": ["array", "object"]}, {"k": "@"}),
    ],
)
def test_a_mark_within_json_does_not_end_it(row: str, schema: Any, value: Any) -> None:
    tags = ROW[row].tags
    assert tags is not None
    value = json.loads(json.dumps(value).replace("@", tags.gap.replace("\n", "") + tags.close))
    whole = {"properties": {"a": schema, "b": {"type": "string"}}}
    check(row, whole, written_by(row, {"a": value}), {"a": value})
    check(row, whole, written_by(row, {"a": value, "b": "x"}), {"a": value, "b": "x"})


@pytest.mark.parametrize("row", TAGGED)
def test_values_as_templates_print_them(row: str) -> None:
    """MiniCPM 5's and Seed-OSS's print what is no text as Python does."""
    kinds: dict[str, Any] = {
        "a": {"type": "boolean"},
        "b": {"type": "null"},
        "c": {"type": ["integer", "null"]},
        "d": {"type": ["boolean", "integer"]},
        "e": {"type": "array"},
        "f": {"type": "object"},
    }
    mark = ROW[row].tags.close  # type: ignore[union-attr]
    values = {
        "a": True,
        "b": None,
        "c": None,
        "d": False,
        "e": ["it's", f'"{mark}', True],
        "f": {"k": [None, f"{mark}'"]},
    }
    said = {key: str(value) for key, value in values.items()}
    text = written_by(row, said)
    tags = ROW[row].tags
    if tags is not None and tags.others:  # a tag that says that its value is no text
        text = text.replace(tags.then, tags.others[0])
    check(row, {"properties": kinds}, text, values)


def test_what_gemma_prints_of_null() -> None:
    check("gemma", {"properties": {"a": {"type": ["integer", "null"]}}}, "{a:None}", {"a": None})


@pytest.mark.parametrize("row", TAGGED)
def test_white_space_between_parameters_may_be_left_out(row: str) -> None:
    schema = {"properties": {"a": {"type": "string"}, "b": {"type": "integer"}}}
    tags = ROW[row].tags
    assert tags is not None
    text = written_by(row, {"a": "x", "b": 1}).replace(tags.close + tags.behind, tags.close)
    check(row, schema, text, {"a": "x", "b": 1})


@pytest.mark.parametrize(
    ("schema", "written", "value"),
    [
        ({"type": ["string", "integer"]}, ("true", "5"), "5"),
        ({"type": ["string", "integer"]}, ("false", "5"), 5),
        ({"type": ["string", "null"]}, ("true", "null"), "null"),
        ({"type": ["string", "null"]}, ("false", "null"), None),
        ({}, ("true", "[1]"), "[1]"),
        ({}, ("false", "[1]"), [1]),
        ({"enum": ["a", 1]}, ("true", "a"), "a"),
    ],
)
@pytest.mark.parametrize("row", ["dsml-functions", "dsml-tools"])
def test_a_tag_says_whether_a_value_is_a_text(
    row: str, schema: Any, written: tuple[str, str], value: Any
) -> None:
    whole = {"properties": {"a": schema}}
    text = '<｜DSML｜parameter name="a" string="{}">{}</｜DSML｜parameter>\n</｜DSML｜invoke>'
    check(row, whole, text.format(*written), {"a": value})


@pytest.mark.parametrize("row", ["dsml-functions", "dsml-tools"])
def test_a_tag_that_is_wrong_about_its_value(row: str) -> None:
    """No grammar allows one; the schema decides."""
    text = '<｜DSML｜parameter name="a" string="{}">5</｜DSML｜parameter>\n</｜DSML｜invoke>'
    for kind, said, value in (("integer", "true", 5), ("string", "false", "5")):
        schema = {"properties": {"a": {"type": kind}}}
        assert not allows(matcher_of(row, schema), text.format(said))
        assert read(row, schema, text.format(said), 1) == ({"a": value}, "")
