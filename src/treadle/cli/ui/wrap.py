"""Words that wrap at spaces, as they come: text in pieces, rows of a terminal out.

A word is held back until its end is known. Wide characters are two cells and may be parted without
a space. Lines of code, those of tables too, are left as they are.
"""

from __future__ import annotations

import re
from collections.abc import Callable

FENCE = re.compile(r"[ \t]*(`{3,}|~{3,})([^`]*)$")  # what opens or ends a block of code
MARK = re.compile(r"[ \t]*(?:[-*+•]|\d{1,9}[.)])[ \t]+")  # what begins an item of a list
VERBATIM = re.compile(r"[ \t]*(?:```|~~~|\|)")
CODE = re.compile(r"(?: {4}|\t)[ \t]*\S")  # lines that are indented as code is
SIGHT = 80  # characters of a line that tell what it is
# Typography of wide characters: what may not begin a row, and what may not end one.
CLOSING = frozenset(
    "、。，．・：；？！」』】）〕］｝〉》”’…ー々ぁぃぅぇぉっゃゅょァィゥェォッャュョ\u200d"
)
OPENING = frozenset("「『【（〔［｛〈《“‘\u200d")


class WordWrap:
    """``feed`` pieces, then ``end``; what they return is to be written. ``width`` gives the cells
    of a row, asked for each word: terminals change their size.
    """

    def __init__(self, width: Callable[[], int]) -> None:
        from prompt_toolkit.utils import get_cwidth  # loaded with the editor

        self._width, self._cells = width, get_cwidth
        self._column = 0  # cells taken of this row
        self._line = ""  # this line's beginning, as it came
        self._held = ""  # a word that may go on, and the space before it
        self._fence = ""  # what the open block of code began with
        self._long = False  # inside a word that is longer than a row

    def feed(self, text: str) -> str:
        """What can be written once ``text`` has come."""
        return "".join(map(self._take, text))

    def end(self) -> str:
        """What was held back."""
        return self._place()

    def _take(self, c: str) -> str:
        if c == "\n":
            written = self._place() + c
            self._fence = self._fence_after(self._line)
            self._line, self._column, self._long = "", 0, False
            return written
        if len(self._line) < SIGHT or self._fence:
            self._line += c
        if self._is_verbatim():
            held, self._held = self._held, ""
            return held + c
        if c in " \t":
            written = self._place() if self._held.strip() else ""
            self._held, self._long = self._held + c, False
            return written
        written = self._place() if self._may_part(c) else ""
        self._held += c
        if self._long or self._cells(self._held) > self._width():
            written += self._place()
            self._long = True
        return written

    def _is_verbatim(self) -> bool:
        if self._fence or VERBATIM.match(self._line):
            return True
        return bool(CODE.match(self._line)) and self._first_word_ended() and not self._hang()

    def _first_word_ended(self) -> bool:
        return len(self._line.split(maxsplit=1)) > 1 or self._line[-1:] in " \t"

    def _hang(self) -> int:
        """Cells that an item's later rows are indented by."""
        mark = MARK.match(self._line)
        return mark.end() if mark else 0

    def _fence_after(self, line: str) -> str:
        """What the open block began with, when ``line`` is over."""
        found = FENCE.match(line)
        if not found:
            return self._fence
        marks, rest = found.groups()
        if not self._fence:
            return marks
        return "" if marks.startswith(self._fence) and not rest.strip() else self._fence

    def _may_part(self, c: str) -> bool:
        """Whether a row may end between what is held and ``c``."""
        before = self._held[-1:]
        if not before.strip() or c in CLOSING or before in OPENING:
            return False
        cells = self._cells(c)
        return cells == 2 or (cells == 1 and self._cells(before) == 2)

    def _place(self) -> str:
        """Put the held word into this row, or the next."""
        word = self._held.lstrip(" \t")
        if not word:
            self._held = ""
            return ""
        gap = self._held[: len(self._held) - len(word)].expandtabs()
        self._held = ""
        width, wide = max(1, self._width()), self._cells(word)
        if self._column > width:  # the terminal is narrower now, and has parted this row itself
            self._column %= width
        if self._column and not self._long and self._column + len(gap) + wide > width:
            hang = min(self._hang(), width // 2)
            gap, self._column = "\n" + " " * hang, hang
        else:
            self._column += len(gap)
        self._column += wide
        if self._column > width:
            self._column = (self._column - 1) % width + 1
        return gap + word
