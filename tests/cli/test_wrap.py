"""Words that wrap: by cells, at spaces, however the text is cut into pieces."""

from __future__ import annotations

import re

import pytest
from hypothesis import given
from hypothesis import strategies as st
from prompt_toolkit.utils import get_cwidth

from treadle.cli.ui.wrap import WordWrap


def wrapped(text: str, width: int, step: int = 1) -> str:
    wrap = WordWrap(lambda: width)
    pieces = [wrap.feed(text[at : at + step]) for at in range(0, len(text), step)]
    return "".join(pieces) + wrap.end()


@pytest.mark.parametrize(
    ("text", "rows"),
    [
        ("", [""]),
        ("one two three", ["one two", "three"]),
        ("one two\nthree", ["one two", "three"]),
        ("12345678 x", ["12345678", "x"]),  # exactly a row
        ("a 1234567890123 b", ["a", "1234567890123 b"]),  # the terminal parts what is too long
        ("a\n\n  b c d e f", ["a", "", "  b c d", "e f"]),
        ("- one two three", ["- one", "  two", "  three"]),
        ("12. one two", ["12. one", "    two"]),
        (
            "```\nlong lines stay\n```\none two three",
            ["```", "long lines stay", "```", "one two", "three"],
        ),
        (
            "~~~~\n```\n~~~\nlong lines stay\n~~~~\nand not these",
            ["~~~~", "```", "~~~", "long lines stay", "~~~~", "and not", "these"],
        ),
        ("    x = 1 + 2", ["    x = 1 + 2"]),  # indented as code is
        ("    - a two", ["    - a", "    two"]),
        ("| a | b | c |", ["| a | b | c |"]),
        ("\u4e2d\u6587\u5b57\u7b26\u4e2d\u6587", ["\u4e2d\u6587\u5b57\u7b26", "\u4e2d\u6587"]),
        ("\u4e2d\u6587\u5b57\u7b26\u3002", ["\u4e2d\u6587\u5b57", "\u7b26\u3002"]),
        ("abcdefg\u4e2d", ["abcdefg", "\u4e2d"]),
        ("cafe\u0301 cafe", ["cafe\u0301", "cafe"]),  # an accent takes no cell
        ("\U0001f600\U0001f600 \U0001f600xy", ["\U0001f600\U0001f600 \U0001f600", "xy"]),
    ],
)
@pytest.mark.parametrize("step", [1, 3, 100])
def test_rows_of_eight_cells(text: str, rows: list[str], step: int) -> None:
    assert wrapped(text, 8, step).split("\n") == rows


WORDS = st.lists(st.text("ab\u4e2de\u0301", min_size=1, max_size=5), max_size=30)


@pytest.mark.slow
@given(WORDS, st.integers(10, 40), st.integers(1, 7))
def test_no_row_is_too_long_and_no_letter_is_lost(words: list[str], width: int, step: int) -> None:
    text = " ".join(words)
    rows = wrapped(text, width, step).split("\n")
    assert all(get_cwidth(row) <= width for row in rows)
    assert re.sub(r"\s", "", "".join(rows)) == text.replace(" ", "")


@given(st.text("ab -`~|\t\n\u4e2d1."), st.integers(1, 30), st.integers(1, 9))
def test_pieces_do_not_matter(text: str, width: int, step: int) -> None:
    assert wrapped(text, width, step) == wrapped(text, width)
    kept = re.sub(r"\s", "", wrapped(text, width))
    assert kept == re.sub(r"\s", "", text)


def test_a_terminal_that_changes_its_size() -> None:
    width = 20
    wrap = WordWrap(lambda: width)
    shown = wrap.feed("one two three four five ")
    width = 8
    shown += wrap.feed("six seven eight nine ten ") + wrap.end()
    assert shown.split("\n")[0] == "one two three four"
    assert all(len(row) <= 8 for row in shown.split("\n")[2:])


def test_only_the_last_word_is_held_back() -> None:
    wrap = WordWrap(lambda: 80)
    assert [wrap.feed(piece) for piece in ("Once", " upon", " a", " ti", "me", "\n")] == [
        "",
        "Once",
        " upon",
        " a",
        "",
        " time\n",
    ]
