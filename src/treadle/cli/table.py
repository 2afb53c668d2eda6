"""What the commands print: tables and numbers for people, JSON for programs."""

from __future__ import annotations

import codecs
import json
import os
import re
import sys
from collections.abc import Iterable, Sequence
from typing import Literal, TextIO

from treadle.words import n_bytes, n_weights, scaled

__all__ = [
    "heading",
    "is_dumb",
    "is_styled",
    "n_bytes",
    "n_weights",
    "print_json",
    "print_table",
    "printable",
    "scaled",
    "shorten",
    "typed",
]
CONTEXT = re.compile(r"\bcontext=(?: or n_sequences=)?(?![^\s,.;:)])")  # of treadle.load


def print_table(headers: Sequence[str], rows: Iterable[Sequence[object]]) -> None:
    """Print rows under ``headers``; columns of numbers (header ends in a space) to the right.

    On a terminal the cells fold to its width; in a pipe every row is one line, whole.
    """
    from rich.console import Console
    from rich.table import Table
    from rich.text import Text

    style = "bold" if is_styled(sys.stdout) else ""
    table = Table(box=None, pad_edge=False, header_style=style, padding=(0, 2, 0, 0))
    for header in headers:
        justify: Literal["left", "right"] = "right" if header.endswith(" ") else "left"
        table.add_column(Text(header.strip()), justify=justify, overflow="fold")
    for row in rows:
        table.add_row(*(Text(printable(str(cell))) for cell in row))
    width = None if sys.stdout.isatty() else 1_000_000
    console = Console(width=width, highlight=False)
    with console.capture() as captured:
        console.print(table, soft_wrap=width is not None, crop=False)
    for line in captured.get().splitlines():
        print(line.rstrip())


def print_json(value: object) -> None:
    """Print one JSON document; bytes that were no UTF-8 become replacement characters in it."""
    text = json.dumps(value, ensure_ascii=False)
    text = text.encode("utf-8", "surrogateescape").decode("utf-8", "replace")
    encoding = getattr(sys.stdout, "encoding", None) or "utf-8"
    if codecs.lookup(encoding).name != "utf-8":  # it lacks letters, and would show "?" for them
        text = json.dumps(json.loads(text))
    print(text)


def heading(text: str) -> None:
    """Print a title line above a table."""
    print(f"\x1b[1m{text}\x1b[0m" if is_styled(sys.stdout) else text)


def is_styled(stream: TextIO) -> bool:
    """Whether a stream is a terminal that wants text bold or dim."""
    return stream.isatty() and not os.environ.get("NO_COLOR") and not is_dumb()


def is_dumb() -> bool:
    """Whether the terminal says that it shows escapes as they are."""
    return os.environ.get("TERM", "").lower() in ("dumb", "unknown")


def printable(text: str) -> str:
    """Escape control characters, which a file's strings may carry: they could steer a terminal."""
    if text.isprintable():
        return text
    return "".join(c if c.isprintable() else c.encode("unicode_escape").decode() for c in text)


def typed(error: Exception) -> str:
    """What an error of the library says, with the command line's flags in place of keywords."""
    return CONTEXT.sub("-c", str(error))


def shorten(text: str, width: int) -> str:
    """Cut a long text, and say how long it was."""
    return text if len(text) <= width else f"{text[: width - 1]}… ({len(text)} characters)"
