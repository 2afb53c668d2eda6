from __future__ import annotations

import io
import json
import sys

import pytest
from hypothesis import given
from hypothesis import strategies as st

from treadle.base.humanize import n_bytes, scaled
from treadle.cli.ui.table import heading, print_json, print_table, printable, say, shorten, typed
from treadle.errors import TreadleError


@pytest.mark.slow
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


COLUMNS = ["label", "kernel", "shape", "n "]
ROW = ("L0.attn", "rope_norm_f16_n_head8_n_head_kv4_head_dim128_rope_dims128_local", "64×64", 12)


def shown(capsys: pytest.CaptureFixture[str]) -> list[str]:
    lines = capsys.readouterr().out.splitlines()
    assert max(map(len, lines)) <= 80
    return lines


def test_a_terminal_folds_long_words_where_they_are_joined(
    terminal: int, capsys: pytest.CaptureFixture[str]
) -> None:
    print_table(COLUMNS, [ROW, ("猫" * 4, "short", "", 1)], optional=["shape"], folding="kernel")
    head, *lines = shown(capsys)
    assert head.split() == ["label", "kernel", "shape", "n"]
    assert lines[0].split() == [
        "L0.attn",
        "rope_norm_f16_n_head8_n_head_kv4_head_dim128_rope_dims128_",
        "64×64",
        "12",
    ]
    assert lines[1].split() == ["local"]
    assert len(lines) == 3


def test_a_terminal_leaves_out_what_it_has_no_room_for_and_says_so(
    terminal: int, capsys: pytest.CaptureFixture[str]
) -> None:
    row = ("l" * 30, ROW[1], "s" * 30, 7)
    print_table(COLUMNS, [row], optional=["shape", "label"], folding="kernel")
    head, *lines = shown(capsys)
    assert head.split() == ["label", "kernel", "n"]
    assert lines[-1] == "(shape: in a wider terminal, in a pipe, and with --json)"
    print_table(COLUMNS, [("x" * 90, ROW[1], "s", 7)], folding="kernel")  # nothing to leave out
    assert "x" * 20 in shown(capsys)[1]


def test_a_pipe_has_everything(capsys: pytest.CaptureFixture[str]) -> None:
    print_table(COLUMNS, [("l" * 70, ROW[1], "s" * 30, 7)], optional=["shape"], folding="kernel")
    head, line = capsys.readouterr().out.splitlines()
    assert head.split() == ["label", "kernel", "shape", "n"]
    assert line.split() == ["l" * 70, ROW[1], "s" * 30, "7"]


def test_long_lines_wrap_on_a_terminal_alone(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    text = "  key    " + "word-and-word " * 6 + "end"
    say(text, indent=" " * 9)
    assert capsys.readouterr().out == text + "\n"
    monkeypatch.setattr("treadle.cli.ui.table.terminal_width", lambda: 80)
    say(text, indent=" " * 9)
    first, second = shown(capsys)
    assert first.startswith("  key    word-and-word")
    assert second.startswith(" " * 9 + "word-and-word")
    assert f"{first} {second.strip()}" == text


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


def test_json_has_null_where_a_number_is_not_finite(capsys: pytest.CaptureFixture[str]) -> None:
    print_json({"é\udcff": [1.5, float("inf"), -float("inf"), float("nan")]})
    assert capsys.readouterr().out == '{"é�": [1.5, null, null, null]}\n'


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
        ("lower context= or n_sequences=, or set kv_bytes=", "lower -c, or set --kv-mib"),
        ("close a session, or raise kv_tokens=", "close a session, or raise --kv-mib"),
        ("kv_bytes=100: expected", "kv_bytes=100: expected"),
        ("context=0: expected at least 1", "context=0: expected at least 1"),
    ],
)
def test_keywords_of_the_library_become_flags(said: str, text: str) -> None:
    assert typed(TreadleError(said)) == text
