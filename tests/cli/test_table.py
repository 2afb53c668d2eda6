from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from treadle.cli.table import n_bytes, print_table, printable, scaled, shorten


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
