"""Markdown block by block: what is shown when, and in the end the same as all at once."""

from __future__ import annotations

import pytest

from treadle.cli.ui.markdown import RichReply, draw

TEXT = """\
# Title

A **paragraph** with `code` and [a link](https://example.com/x), which
goes on.

1. first
2. second
   goes on

   and has a paragraph
3. third

* one
  * nested
* two

```python
def f(x):
    return 1

    # after a gap
```

| a | b |
|---|---|
| 1 | 2 |

> quoted

---

The end."""


@pytest.fixture(autouse=True)
def narrow(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("treadle.cli.ui.markdown.columns", lambda stream: 40)


def shown(capsys: pytest.CaptureFixture[str]) -> list[str]:
    rows = [row.rstrip() for row in capsys.readouterr().out.split("\n")]
    return [row for row in rows if row]


@pytest.mark.parametrize("step", [1, 5, 1000])
def test_in_the_end_it_is_what_rich_makes_of_the_whole(
    step: int, capsys: pytest.CaptureFixture[str]
) -> None:
    screen = RichReply()
    for at in range(0, len(TEXT), step):
        screen.show(TEXT[at : at + step])
    screen.end()
    assert shown(capsys) == [row.rstrip() for row in draw(TEXT) if row.strip()]


def test_blocks_items_and_lines_of_code_come_when_they_are_complete(
    capsys: pytest.CaptureFixture[str],
) -> None:
    screen = RichReply()
    steps = [
        ("Some *words* that\n", []),
        ("go on.\n", []),
        ("\n- one\n", ["Some words that go on."]),
        ("- two\n", [" \u2022 one"]),
        ("\n```python\n", [" \u2022 two"]),
        ("x = 1\n", [" x = 1"]),
        ("y = [\n", [" y = ["]),
        ("```\n", []),
        ("Then", []),
    ]
    for piece, rows in steps:
        screen.show(piece)
        assert shown(capsys) == rows, piece
    screen.end()
    assert shown(capsys) == ["Then"]


def test_links_show_their_address_and_control_characters_do_nothing(
    capsys: pytest.CaptureFixture[str],
) -> None:
    screen = RichReply()
    screen.show("[your bank](https://evil.example) \x1b[2J")
    screen.end()
    assert shown(capsys) == ["your bank (https://evil.example) \\x1b[2J"]


def test_an_empty_answer_is_an_empty_line(capsys: pytest.CaptureFixture[str]) -> None:
    RichReply().end()
    assert capsys.readouterr().out == "\n"
