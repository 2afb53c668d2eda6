"""Streaming Markdown: each block is rendered when it is complete.

A block is complete once another begins after it. List items count as blocks, so that a long list
appears item by item; a code block is shown line by line.
"""

from __future__ import annotations

import sys
from typing import TYPE_CHECKING, Any

from treadle.cli.ui.table import columns, harmless, write

if TYPE_CHECKING:
    from rich.markdown import Markdown


class RichReply:
    """Renders an answer's Markdown with rich. Links show their address, so that an answer cannot
    hide one.
    """

    def __init__(self) -> None:
        self._text = ""  # the incomplete blocks
        self._n_shown = 0  # rows of the first of them already on the screen
        self._before = False  # whether a block was shown before
        self._in_list = False  # whether the first one is a list item after another

    def show(self, piece: str) -> None:
        """Append ``piece`` to the text, and write the blocks that are complete."""
        self._text += harmless(piece)
        if "\n" in piece:
            self._draw_complete()

    def end(self) -> None:
        """Write the incomplete blocks that are left."""
        self._draw(self._text, whole=True)
        self._text = ""
        write("" if self._before else "\n")

    def _draw_complete(self) -> None:
        lines = self._text[: self._text.rindex("\n") + 1].splitlines(keepends=True)
        tokens: list[Any] = parse("".join(lines)).parsed
        blocks = [(t.type, t.map[0]) for t in tokens if t.level == 0 and t.map and t.nesting >= 0]
        if not blocks:
            return
        kind, start = blocks[-1]
        is_list = kind.endswith("_list_open")
        if is_list:
            start = max(t.map[0] for t in tokens if t.type == "list_item_open" and t.level == 1)
        if start:
            self._draw("".join(lines[:start]), whole=True)
            self._text = "".join(lines[start:]) + self._text[sum(map(len, lines)) :]
            self._in_list = is_list and blocks[-1][1] < start
        if kind == "fence" and tokens[-1].content.strip():
            self._draw("".join(lines[start:]), whole=False)

    def _draw(self, text: str, *, whole: bool) -> None:
        """Write those rows of ``text`` that are not on the screen yet. ``whole`` False: ``text`` is
        an open code block, whose last row, the margin, is not final and not written.
        """
        if not text.strip():
            return
        rows = draw(text)
        rows = rows if whole else rows[:-1]
        if not self._n_shown:
            if not text.lstrip().startswith(("```", "~~~")):  # their margins are coloured
                rows = trimmed(rows)
            if self._before and not self._in_list:
                write("\n")
        write("".join(f"{row}\n" for row in rows[self._n_shown :]))
        self._before, self._n_shown = True, 0 if whole else len(rows)


def trimmed(rows: list[str]) -> list[str]:
    """Return ``rows`` without blank ones at the top and bottom."""
    full = [i for i, row in enumerate(rows) if row.strip()]
    return rows[full[0] : full[-1] + 1] if full else []


def parse(text: str) -> Markdown:
    """Parse ``text`` into blocks."""
    from rich.markdown import Markdown

    return Markdown(text, hyperlinks=False)


def draw(text: str) -> list[str]:
    """Render ``text`` as rows for this terminal, with colours."""
    from rich.console import Console

    console = Console(file=sys.stdout, width=columns(sys.stdout))
    with console.capture() as captured:
        console.print(parse(text))
    return captured.get().rstrip("\n").split("\n")
