from __future__ import annotations

import io
import json
import sys

import pytest
from hypothesis import given
from hypothesis import strategies as st

from treadle.cli.table import (
    heading,
    n_bytes,
    print_json,
    print_table,
    printable,
    scaled,
    shorten,
    typed,
)
from treadle.errors import TreadleError


@given(st.text())
def test_printable_text_cannot_steer_a_terminal(text: str) -> None:
    shown = printable(text)
    assert shown.isprintable()
    assert text == shown or not text.isprintable()


def test_printable_keeps_what_it_can() -> None:
    assert printable("naïve 猫 \x1b[31m\n") == "naïve 猫 \\x1b[31m\\n"


@pytest.mark.parametrize(
    ("shown", "expected"),
    [
        (scaled(0), "0"),
        (scaled(999, "B/s"), "999 B/s"),
        (scaled(1500), "1.5 k"),
        (scaled(42.4e9, "B/s"), "42.4 GB/s"),
        (scaled(730e9, "op/s"), "730 Gop/s"),
        (scaled(1e21), "1000000 P"),
        (n_bytes(1023), "1023 B"),
        (n_bytes(1.1 * 2**30), "1.1 GiB"),
        (shorten("abcdef", 6), "abcdef"),
        (shorten("abcdefg", 6), "abcde… (7 characters)"),
    ],
)
def test_numbers_for_people(shown: str, expected: str) -> None:
    assert shown == expected


def test_rows_of_a_pipe_are_whole_lines(capsys: pytest.CaptureFixture[str]) -> None:
    print_table(["name", "n "], [("x" * 300, 5), ("[bold]y\x1b", 12345)])
    lines = capsys.readouterr().out.splitlines()
    assert lines[0].split() == ["name", "n"]
    assert lines[1] == "x" * 300 + "  " + "    5"
    assert lines[2] == "[bold]y\\x1b" + " " * 289 + "  12345"


@pytest.mark.parametrize(
    ("encoding", "written"),
    [
        ("utf-8", '["é猫😀�"]'),
        ("UTF8", '["é猫😀�"]'),
        ("latin-1", r'["\u00e9\u732b\ud83d\ude00\ufffd"]'),
    ],
)
def test_json_loses_no_letter(encoding: str, written: str, monkeypatch: pytest.MonkeyPatch) -> None:
    stream = io.BytesIO()
    monkeypatch.setattr("sys.stdout", io.TextIOWrapper(stream, encoding, errors="replace"))
    print_json(["é猫😀\udcff"])
    sys.stdout.flush()
    assert stream.getvalue().decode(encoding) == written + "\n"
    assert json.loads(stream.getvalue()) == ["é猫😀�"]


@pytest.mark.parametrize("name", ["NO_COLOR", "TERM"])
def test_no_escapes_where_they_are_not_wanted(
    name: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.delenv("NO_COLOR", raising=False)
    monkeypatch.setenv("TERM", "xterm")
    monkeypatch.setattr("sys.stdout.isatty", lambda: True)
    heading("one")
    assert "\x1b[1m" in capsys.readouterr().out
    monkeypatch.setenv(name, "dumb")
    heading("one")
    print_table(["name", "n "], [("x", 5)])
    assert "\x1b" not in capsys.readouterr().out


@pytest.mark.parametrize(
    ("said", "text"),
    [
        ("raise it with context=, or shorten", "raise it with -c, or shorten"),
        ("lower context= or n_sequences=", "lower -c"),
        ("context=0: expected at least 1", "context=0: expected at least 1"),
    ],
)
def test_keywords_of_the_library_become_flags(said: str, text: str) -> None:
    assert typed(TreadleError(said)) == text
