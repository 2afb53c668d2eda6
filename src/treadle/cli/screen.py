"""Where an answer is shown: a pipe gets its exact text, a terminal wrapped words or Markdown."""

from __future__ import annotations

import os
import re
import sys
from typing import Protocol, TextIO

from treadle.cli.table import is_dumb

# An answer could steer the terminal with them. A newline and a tab do no harm.
CONTROL = re.compile(r"(?!\r\n)[\x00-\x08\x0b-\x1f\x7f-\x9f]")


class Screen(Protocol):
    """Where one answer goes, piece by piece."""

    def show(self, piece: str) -> None:
        """Write what can be written once ``piece`` has come."""

    def end(self) -> None:
        """Write the rest, and end the line."""


def open_screen(*, markdown: bool = False) -> Screen:
    """Where the next answer is shown on standard output."""
    if not sys.stdout.isatty():
        return Pipe()
    if markdown and not is_dumb():
        from treadle.cli.markdown import Rendered

        return Rendered()
    return Wrapped()


class Pipe:
    """The exact text, and a newline after it."""

    def show(self, piece: str) -> None:
        """Write ``piece``."""
        write(piece)

    def end(self) -> None:
        """End the line."""
        write("\n")


class Wrapped:
    """Words wrapped at spaces; control characters as escapes."""

    def __init__(self) -> None:
        from treadle.cli.wrap import Wrap

        self._wrap = Wrap(lambda: columns(sys.stdout))

    def show(self, piece: str) -> None:
        """Write the words that are complete."""
        write(self._wrap.feed(harmless(piece)))

    def end(self) -> None:
        """Write the last word."""
        write(self._wrap.end() + "\n")


def folded(text: str) -> str:
    """A remark as standard error shows it: a terminal gets its words wrapped."""
    if not sys.stderr.isatty():
        return text
    from treadle.cli.wrap import Wrap

    wrap = Wrap(lambda: columns(sys.stderr))
    return wrap.feed(harmless(text)) + wrap.end()


def harmless(text: str) -> str:
    """Control characters as the escapes that Python writes for them."""
    return CONTROL.sub(lambda found: found[0].encode("unicode_escape").decode(), text)


def columns(stream: TextIO) -> int:
    """Cells of a row of the terminal, as it is now."""
    try:
        return os.get_terminal_size(stream.fileno()).columns or 80
    except (OSError, ValueError):
        return 80


def write(text: str) -> None:
    """Write to standard output, at once."""
    sys.stdout.write(text)
    sys.stdout.flush()
