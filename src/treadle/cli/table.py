"""What the commands print: tables and numbers for people, JSON for programs."""

from __future__ import annotations

import codecs
import json
import os
import re
import sys
from collections.abc import Iterable, Sequence
from typing import Literal, TextIO

from treadle.errors import printable as printable

CONTROL = re.compile(r"(?!\r\n)[\x00-\x08\x0b-\x1f\x7f-\x9f]")  # but of \n, \t, \r before \n
SHOWN = 1000  # characters of a cell on a terminal


def print_table(headers: Sequence[str], rows: Iterable[Sequence[object]]) -> None:
    """Print rows under ``headers``; columns of numbers (header ends in a space) to the right.

    On a terminal the cells fold to its width, and long ones are cut; in a pipe every row is one
    line, whole.
    """
    from rich.console import Console
    from rich.table import Table
    from rich.text import Text

    style = "bold" if is_styled(sys.stdout) else ""
    table = Table(box=None, pad_edge=False, header_style=style, padding=(0, 2, 0, 0))
    for header in headers:
        justify: Literal["left", "right"] = "right" if header.endswith(" ") else "left"
        table.add_column(Text(header.strip()), justify=justify, overflow="fold")
    width, shown = (None, SHOWN) if sys.stdout.isatty() else (1_000_000, sys.maxsize)
    for row in rows:
        table.add_row(*(Text(shorten(printable(str(cell)), shown)) for cell in row))
    console = Console(width=width, highlight=False)
    with console.capture() as captured:
        console.print(table, soft_wrap=width is not None, crop=False)
    for line in captured.get().splitlines():
        print(line.rstrip())


def print_json(value: object) -> None:
    """Print one JSON document; bytes that were no UTF-8 become replacement characters in it."""
    text = json.dumps(value, ensure_ascii=False)
    text = text.encode("utf-8", "surrogateescape").decode("utf-8", "replace")
    text = re.sub("[\x7f-\x9f]", lambda c: f"\\u{ord(c[0]):04x}", text)  # terminals obey them too
    encoding = getattr(sys.stdout, "encoding", None) or "utf-8"
    if codecs.lookup(encoding).name != "utf-8":  # it lacks letters, and would show "?" for them
        text = json.dumps(json.loads(text))
    print(text)


def heading(text: str) -> None:
    """Print a title line above a table."""
    text = printable(text)
    print(f"\x1b[1m{text}\x1b[0m" if is_styled(sys.stdout) else text)


def is_styled(stream: TextIO) -> bool:
    """Whether a stream is a terminal that wants text bold or dim."""
    return stream.isatty() and not os.environ.get("NO_COLOR") and not is_dumb()


def is_dumb() -> bool:
    """Whether the terminal says that it shows escapes as they are."""
    return os.environ.get("TERM", "").lower() in ("dumb", "unknown")


def harmless(text: str) -> str:
    """A model's words for a terminal: control characters escaped, for it can write any."""
    return CONTROL.sub(lambda found: found[0].encode("unicode_escape").decode(), text)


def emit(text: str) -> None:
    """Write a model's words to standard output, at once: exact into a pipe."""
    sys.stdout.write(harmless(text) if sys.stdout.isatty() else text)
    sys.stdout.flush()


def shorten(text: str, width: int) -> str:
    """Cut a long text, and say how long it was."""
    return text if len(text) <= width else f"{text[: width - 1]}… ({len(text)} characters)"


def scaled(number: float, unit: str = "", *, base: int = 1000) -> str:
    """Write a number with a prefix: 1.5e9 and "B/s" give ``1.5 GB/s``; base 1024 is Ki and Mi."""
    prefixes = ("", "k", "M", "G", "T", "P") if base == 1000 else ("", "Ki", "Mi", "Gi", "Ti", "Pi")
    power = 0
    while abs(number) >= base and power < len(prefixes) - 1:
        number /= base
        power += 1
    digits = 1 if power and abs(number) < 100 else 0
    return f"{number:.{digits}f} {prefixes[power]}{unit}".rstrip()


def n_bytes(number: float) -> str:
    """Write a size in bytes: ``1.1 GiB``."""
    return scaled(number, "B", base=1024)
