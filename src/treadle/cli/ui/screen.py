"""Output of an answer: a pipe gets the exact text, a terminal wrapped words or Markdown."""

from __future__ import annotations

import sys
from typing import Protocol

from treadle.cli.ui.table import columns, harmless, is_dumb, write


class Screen(Protocol):
    """Writes one answer to standard output, piece by piece."""

    def show(self, piece: str) -> None:
        """Append ``piece``; write as much of the answer as is final."""

    def end(self) -> None:
        """Write the rest, and end the line."""


def open_screen(*, markdown: bool = False) -> Screen:
    """Return a screen for the next answer: plain for a pipe, on a terminal wrapped words or
    Markdown.
    """
    if not sys.stdout.isatty():
        return PlainOutput()
    if markdown and not is_dumb():
        from treadle.cli.ui.markdown import RichReply

        return RichReply()
    return WrappedScreen()


class PlainOutput:
    """Writes the exact text, and a newline at the end."""

    def show(self, piece: str) -> None:
        """Write ``piece``."""
        write(piece)

    def end(self) -> None:
        """End the line."""
        write("\n")


class WrappedScreen:
    """Wraps words at spaces, for a terminal; control characters are escaped."""

    def __init__(self) -> None:
        from treadle.cli.ui.wrap import WordWrap

        self._wrap = WordWrap(lambda: columns(sys.stdout))

    def show(self, piece: str) -> None:
        """Append ``piece``; write the words that are complete."""
        write(self._wrap.feed(harmless(piece)))

    def end(self) -> None:
        """Write the last word."""
        write(self._wrap.end() + "\n")


def folded(text: str) -> str:
    """Return a message wrapped to the width of standard error, if that is a terminal."""
    if not sys.stderr.isatty():
        return text
    from treadle.cli.ui.wrap import WordWrap

    wrap = WordWrap(lambda: columns(sys.stderr))
    return wrap.feed(text) + wrap.end()
