"""Arguments that are no JSON, in pieces: what clients are given is JSON."""

from __future__ import annotations

import json
from typing import Any

import pytest

from tests.chat.tools.families import TOOLS, row
from treadle.chat.tools import AnswerMarks, ParsedOutput
from treadle.chat.tools.argument_readers import ArgumentReader, PythonReader, TagReader
from treadle.chat.tools.arguments import value_of

PYTHON: list[tuple[str, Any]] = [
    (")", {}),
    ("a=1)", {"a": 1}),
    ("a=1,)", {"a": 1}),
    ("a = 1 , b='x, y)' )", {"a": 1, "b": "x, y)"}),
    ("""a="it's", b='say "so"')""", {"a": "it's", "b": 'say "so"'}),
    (r"""a='\'', b="\"", c='\\')""", {"a": "'", "b": '"', "c": "\\"}),
    (r"a='\n\t\x41\u00e9\ud83d\ude00\q')", {"a": "\n\tA\u00e9\U0001f600\\q"}),
    ("a='two\nlines')", {"a": "two\nlines"}),
    ("a=True, b=None, c=false, d=null)", {"a": True, "b": None, "c": False, "d": None}),
    ("a=[1, (2, 3)], b={'c': ['d)', True]})", {"a": [1, [2, 3]], "b": {"c": ["d)", True]}}),
    ('a={"b": [true, null]}, c=-1.5e3)', {"a": {"b": [True, None]}, "c": -1500.0}),
    ("a=word, b=f(1), c=1+1)", {"a": "word", "b": "f(1)", "c": "1+1"}),
    ("1, a=2)", {"a": 2}),
    ("a={1, 2}, b=nan, c=1j)", {"a": "{1, 2}", "b": "nan", "c": "1j"}),
]


def in_pieces(reader: ArgumentReader, text: str, size: int) -> tuple[str, str]:
    """What is told of a text that comes so many characters at a time, and what is left of it."""
    told = held = ""
    for at in range(0, len(text), size):
        held += text[at : at + size]
        if not reader.done:
            made, held = reader.take(held, False)
            told += made
    return told, held


@pytest.mark.parametrize(("written", "expected"), PYTHON)
def test_arguments_as_python_has_them(written: str, expected: Any) -> None:
    for size in (1, 2, 3, 7, len(written)):
        reader = PythonReader()
        told, held = in_pieces(reader, f"{written}, g(b=2)", size)
        assert reader.done
        assert json.loads(told) == expected
        assert held == ", g(b=2)"


def test_a_text_of_python_comes_character_by_character() -> None:
    reader = PythonReader()
    assert reader.take("a='", False) == ('{"a": "', "")
    assert reader.take("b", False) == ("b", "")
    assert reader.take("\\", False) == ("", "")
    assert reader.take("n", False) == ("\\n", "")
    assert reader.take("'", False) == ("", "")  # another text may go on with it
    assert reader.take(")", False) == ('"}', "")


@pytest.mark.parametrize(
    ("written", "expected"),
    [
        ("[1]", [1]),
        ("['a']", ["a"]),
        ("True", True),
        ("None", None),
        ("'a\nb'", "a\nb"),
        ("(1, 2)", [1, 2]),
        ("x", "x"),
        ("", ""),
        ("1e999", "1e999"),
        ("NaN", "NaN"),
        ("b'1'", "b'1'"),
        ("[" * 5000, "[" * 5000),
        ("__import__('os')", "__import__('os')"),
    ],
)
def test_values(written: str, expected: Any) -> None:
    assert value_of(written) == expected


ARGUMENTS: dict[str, Any] = {"text": "a\n", "list": ["x"], "n": 2}


@pytest.mark.parametrize("name", ["seed", "invoke", "arg", "arg-tight", "arg-hy"])
@pytest.mark.parametrize("white", ["", "\n", "  \n"])
def test_tags_with_more_white_space_or_less(name: str, white: str) -> None:
    """Between tags; within a value each line break counts."""
    tags = row(name).tags
    assert tags is not None
    then = white.join(tags.then.split("\n"))
    values = {"text": "a\n", "list": "['x']", "n": "2"}
    written = "".join(f"{tags.open}{k}{then}{v}{tags.close}{white}" for k, v in values.items())
    for size in (1, 5, len(written)):
        reader = TagReader(TOOLS["f"], tags)
        told, held = in_pieces(reader, f"{white}{written}{tags.end} and", size)
        assert (json.loads(told), held) == (ARGUMENTS, " and")


@pytest.mark.parametrize(
    ("written", "text"),
    [
        ("<![CDATA[a</param>]]>", "a</param>"),
        ("<![CDATA[]]>", ""),
        ("<![CDA", "<![CDA"),
        ("a]]>", "a]]>"),
        ("", ""),
        ("<![CDATA[]]]>", "]"),
        ("<b>", "<b>"),
    ],
)
def test_texts_in_quotes_or_not(written: str, text: str) -> None:
    tags = row("param").tags
    assert tags is not None
    for size in (1, 2, 100):
        reader = TagReader(TOOLS["f"], tags)
        whole = f'<param name="text">{written}</param></function>'
        assert in_pieces(reader, whole, size) == (json.dumps({"text": text}), "")


def told(name: str, text: str) -> ParsedOutput:
    marks = AnswerMarks(row=row(name), tools=TOOLS)
    return ParsedOutput.of(marks.scanner().feed(text, last=True))


@pytest.mark.parametrize(
    ("name", "text"),
    [
        ("by-name", 'such as {"f": {}}'),
        ("toolcall", '{"name": "f", "arguments": {"text": ""}}'),
        ("python", "f(text='')"),
        ("arg", "<tool_call>h\n</tool_call>"),
        ("kimi", "<|tool_call_begin|>functions.h:0<|tool_call_argument_begin|>{}<|tool_call_end|>"),
    ],
)
def test_what_is_no_call(name: str, text: str) -> None:
    found = told(name, text)
    assert (found.content, found.calls) == (text, [])


def test_calls_without_the_mark_around_them() -> None:
    text = '<|tool_call_begin|>functions.f:3<|tool_call_argument_begin|>{"text": "a"}'
    (call,) = told("kimi", f"so {text}<|tool_call_end|>").calls
    assert (call.id, call.name, call.arguments) == ("functions.f:3", "f", '{"text": "a"}')
