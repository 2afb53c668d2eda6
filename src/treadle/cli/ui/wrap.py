"""Streaming word wrap: text in pieces, terminal rows out.

A word is held back until its end is known. Wide characters take two cells and may break without a
space. Lines of code and tables are unchanged.
"""

from __future__ import annotations

import re
from collections.abc import Callable

FENCE = re.compile(r"[ \t]*(`{3,}|~{3,})([^`]*)$")  # opens or ends a code block
MARK = re.compile(r"[ \t]*(?:[-*+•]|\d{1,9}[.)])[ \t]+")  # begins a list item
VERBATIM = re.compile(r"[ \t]*(?:```|~~~|\|)")
CODE = re.compile(r"(?: {4}|\t)[ \t]*\S")  # lines indented as code
MAX_MARKER = 80  # first characters of a line, which determine its kind
# Typography of wide characters: those that may not begin a row, and may not end one.
CLOSING = frozenset(
    "、。，．・：；？！」』】）〕］｝〉》”’…ー々ぁぃぅぇぉっゃゅょァィゥェォッャュョ\u200d"
)
OPENING = frozenset("「『【（〔［｛〈《“‘\u200d")


class WordWrap:
    """Wraps text that arrives in pieces: ``feed`` and, at the end, ``end`` return what to write.
    ``width`` returns the cells of a row; it is called for each word, because terminals are resized.
    """

    def __init__(self, width: Callable[[], int]) -> None:
        from prompt_toolkit.utils import get_cwidth  # loaded with the editor

        self._width = width
        self._cells = get_cwidth
        self._column = 0  # cells used in this row
        self._line = ""  # this line's beginning, unwrapped
        self._pending = ""  # an incomplete word, and the space before it
        self._fence = ""  # the marks that opened the current code block
        self._long = False  # inside a word that is longer than a row

    def feed(self, text: str) -> str:
        """Append ``text``; return the output that is final now."""
        return "".join(map(self._take, text))

    def end(self) -> str:
        """Return the last word, which was held back."""
        return self._place()

    def _take(self, c: str) -> str:
        if c == "\n":
            written = self._place() + c
            self._fence = self._fence_after(self._line)
            self._line = ""
            self._column = 0
            self._long = False
            return written
        if len(self._line) < MAX_MARKER or self._fence:
            self._line += c
        if self._is_verbatim():
            held = self._pending
            self._pending = ""
            return held + c
        if c in " \t":
            written = self._place() if self._pending.strip() else ""
            self._pending = self._pending + c
            self._long = False
            return written
        written = self._place() if self._may_break(c) else ""
        self._pending += c
        if self._long or self._cells(self._pending) > self._width():
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
        """Return the indent, in cells, of the later rows of a list item; 0 for other lines."""
        mark = MARK.match(self._line)
        return mark.end() if mark else 0

    def _fence_after(self, line: str) -> str:
        """Return the mark of the code block that is open after ``line``, "" if none is."""
        found = FENCE.match(line)
        if not found:
            return self._fence
        marks, rest = found.groups()
        if not self._fence:
            return marks
        return "" if marks.startswith(self._fence) and not rest.strip() else self._fence

    def _may_break(self, c: str) -> bool:
        """Return whether a row may be broken between the held word and the character ``c``."""
        before = self._pending[-1:]
        if not before.strip() or c in CLOSING or before in OPENING:
            return False
        cells = self._cells(c)
        return cells == 2 or (cells == 1 and self._cells(before) == 2)

    def _place(self) -> str:
        """Return the held word, after a line break if it does not fit into this row."""
        word = self._pending.lstrip(" \t")
        if not word:
            self._pending = ""
            return ""
        gap = self._pending[: len(self._pending) - len(word)].expandtabs()
        self._pending = ""
        width = max(1, self._width())
        wide = self._cells(word)
        if self._column > width:  # the terminal was narrowed and broke this row itself
            self._column %= width
        if self._column and not self._long and self._column + len(gap) + wide > width:
            hang = min(self._hang(), width // 2)
            gap = "\n" + " " * hang
            self._column = hang
        else:
            self._column += len(gap)
        self._column += wide
        if self._column > width:
            self._column = (self._column - 1) % width + 1
        return gap + word
