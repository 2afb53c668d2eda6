"""Output of an answer: a pipe gets the exact text, a terminal wrapped words or Markdown."""

from __future__ import annotations

import sys
from typing import Protocol

from treadle.cli.ui.table import columns, harmless, is_dumb, write


class Screen(Protocol):
    """Shows one answer, piece by piece."""

    def show(self, piece: str) -> None:
        """Write what can be written after ``piece``."""

    def end(self) -> None:
        """Write the rest, and end the line."""


def open_screen(*, markdown: bool = False) -> Screen:
    """Return the screen for the next answer on standard output."""
    if not sys.stdout.isatty():
        return PlainOutput()
    if markdown and not is_dumb():
        from treadle.cli.ui.markdown import RichReply

        return RichReply()
    return WrappedScreen()


class PlainOutput:
    """The exact text, and a newline after it."""

    def show(self, piece: str) -> None:
        """Write ``piece``."""
        write(piece)

    def end(self) -> None:
        """End the line."""
        write("\n")


class WrappedScreen:
    """Words wrapped at spaces; control characters as escapes."""

    def __init__(self) -> None:
        from treadle.cli.ui.wrap import WordWrap

        self._wrap = WordWrap(lambda: columns(sys.stdout))

    def show(self, piece: str) -> None:
        """Write the words that are complete."""
        write(self._wrap.feed(harmless(piece)))

    def end(self) -> None:
        """Write the last word."""
        write(self._wrap.end() + "\n")


def folded(text: str) -> str:
    """Wrap a message for standard error if that is a terminal."""
    if not sys.stderr.isatty():
        return text
    from treadle.cli.ui.wrap import WordWrap

    wrap = WordWrap(lambda: columns(sys.stderr))
    return wrap.feed(text) + wrap.end()
