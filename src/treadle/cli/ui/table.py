"""Output of commands: tables, lines and numbers for people, JSON for programs.

``emit`` writes text to standard output, ``remark`` a message to standard error.
"""

from __future__ import annotations

import codecs
import json
import os
import re
import sys
from collections.abc import Callable, Iterable, Sequence
from typing import Any, Literal, TextIO

from treadle.errors import printable as printable
from treadle.errors import why

CONTROL = r"(?!\r\n)[\x00-\x08\x0b-\x1f\x7f-\x9f]"  # except \n, \t, and \r before \n
# Settings of treadle.load in messages that advise to change them, and their options.
SETTINGS = (
    (r"\bcontext=(?: or n_sequences=)?(?![^\s,.;:)])", "-c"),
    (r"\bkv_(?:bytes|tokens)=(?![^\s,.;:)])", "--kv-mib"),
)
SHOWN = 1000  # characters of a cell on a terminal
GAP = 2  # columns between two cells
FOLDED = 24  # least width of the folding column before other columns are omitted


def print_table(
    headers: Sequence[str],
    rows: Iterable[Sequence[object]],
    *,
    optional: Sequence[str] = (),
    folding: str = "",
) -> None:
    """Print rows under ``headers``; columns of numbers (header ends in a space) are right-aligned.

    In a pipe every row is one whole line. On a terminal long cells are truncated, and the table
    fits the width: first the column ``folding`` breaks its cells after ``_``, then ``optional``
    columns are omitted in their order, with a note below; if it is still too wide, cells fold.
    """
    from rich.console import Console
    from rich.table import Table
    from rich.text import Text

    room = terminal_width()
    longest = sys.maxsize if room is None else SHOWN
    lines = [[shorten(printable(str(cell)), longest) for cell in row] for row in rows]
    shown: Sequence[int] = range(len(headers))
    left_out = []
    if room is not None:
        shown, lines = fitted(headers, lines, room, optional, folding)
        left_out = [header.strip() for i, header in enumerate(headers) if i not in shown]
    style = "bold" if is_styled(sys.stdout) else ""
    table = Table(box=None, pad_edge=False, header_style=style, padding=(0, GAP, 0, 0))
    for i in shown:
        justify: Literal["left", "right"] = "right" if headers[i].endswith(" ") else "left"
        table.add_column(Text(headers[i].strip()), justify=justify, overflow="fold")
    for row in lines:
        table.add_row(*(Text(row[i]) for i in shown))
    console = Console(width=1_000_000 if room is None else room, highlight=False)
    with console.capture() as captured:
        console.print(table, soft_wrap=room is None, crop=False)
    for line in captured.get().splitlines():
        print(line.rstrip())
    if left_out:
        say(f"({', '.join(left_out)}: in a wider terminal, in a pipe, and with --json)")


def fitted(
    headers: Sequence[str],
    lines: list[list[str]],
    room: int,
    optional: Sequence[str],
    folding: str,
) -> tuple[Sequence[int], list[list[str]]]:
    """Return the indexes of the columns to show in ``room`` columns of the terminal, and the rows
    (``lines``) with their ``folding`` cells broken; ``optional`` and ``folding``: as of
    ``print_table``. The rest may still be too wide.
    """
    from rich.cells import cell_len

    wide = [
        max(map(cell_len, column))
        for column in zip([header.strip() for header in headers], *lines, strict=True)
    ]
    shown = list(range(len(headers)))
    at = headers.index(folding) if folding else None
    least = [min(w, FOLDED) if i == at else w for i, w in enumerate(wide)]
    for header in optional:
        if sum(least[i] + GAP for i in shown) - GAP > room and header in headers:
            shown.remove(headers.index(header))
    if at in shown:
        rest = max(FOLDED, room - sum(wide[i] + GAP for i in shown if i != at))
        lines = [
            [fold(cell, rest) if i == at else cell for i, cell in enumerate(row)] for row in lines
        ]
    return shown, lines


def fold(word: str, width: int) -> str:
    """Break a long word into lines of at most ``width`` characters, after ``_`` if possible."""
    lines = []
    while len(word) > width:
        at = word.rfind("_", 1, width) + 1 or width
        lines.append(word[:at])
        word = word[at:]
    return "\n".join([*lines, word])


def terminal_width() -> int | None:
    """Return the columns of standard output's terminal; None if it is not a terminal."""
    from shutil import get_terminal_size

    return get_terminal_size().columns if sys.stdout.isatty() else None


def columns(stream: TextIO) -> int:
    """Return the current width of the terminal ``stream`` in columns; 80 if it is none."""
    try:
        return os.get_terminal_size(stream.fileno()).columns or 80
    except (OSError, ValueError):
        return 80


def say(text: str, indent: str = "") -> None:
    """Print one line. A terminal gets it wrapped to its width, later lines after ``indent``."""
    width = terminal_width()
    if width is None or len(text) <= width:
        print(text)
        return
    from textwrap import wrap

    # wrap() drops spaces only at line breaks, so columns in the first line stay aligned.
    lines = wrap(
        text,
        max(width, 40),
        subsequent_indent=indent,
        break_long_words=False,
        break_on_hyphens=False,
        drop_whitespace=True,
    )
    for line in lines:
        print(line)


def remark(text: str) -> None:
    """Write a message about the work to standard error, after "treadle: "."""
    print(f"treadle: {printable(text)}", file=sys.stderr)


def print_json(value: object) -> None:
    """Print one JSON document. Bytes that were not UTF-8 become replacement characters; numbers
    that are not finite, which JSON lacks, become null.
    """
    try:
        text = json.dumps(value, ensure_ascii=False, allow_nan=False)
    except ValueError:
        value = json.loads(json.dumps(value), parse_constant=lambda name: None)
        text = json.dumps(value, ensure_ascii=False)
    text = text.encode("utf-8", "surrogateescape").decode("utf-8", "replace")
    text = re.sub("[\x7f-\x9f]", lambda c: f"\\u{ord(c[0]):04x}", text)  # terminals obey them too
    encoding = getattr(sys.stdout, "encoding", None) or "utf-8"
    if codecs.lookup(encoding).name != "utf-8":  # it lacks letters: escape all but ASCII
        text = json.dumps(json.loads(text))
    print(text)


def show(report: Any, as_json: bool, print_report: Callable[[Any], object]) -> None:
    """Print a report, as JSON or with ``print_report``."""
    (print_json if as_json else print_report)(report)


def heading(text: str) -> None:
    """Print a title line above a table."""
    text = printable(text)
    print(f"\x1b[1m{text}\x1b[0m" if is_styled(sys.stdout) else text)


def is_styled(stream: TextIO) -> bool:
    """Return whether ``stream`` is a terminal that shows bold and dim text, and NO_COLOR is not
    set.
    """
    return stream.isatty() and not os.environ.get("NO_COLOR") and not is_dumb()


def is_dumb() -> bool:
    """Return whether the terminal does not interpret escape sequences (TERM is "dumb" or
    "unknown").
    """
    return os.environ.get("TERM", "").lower() in ("dumb", "unknown")


def harmless(text: str) -> str:
    """Escape control characters except newlines and tabs: a model's output may contain any."""
    return re.sub(CONTROL, lambda found: found[0].encode("unicode_escape").decode(), text)


def emit(text: str) -> None:
    """Write a model's output to standard output at once; on a terminal, control characters are
    escaped.
    """
    write(harmless(text) if sys.stdout.isatty() else text)


def write(text: str) -> None:
    """Write to standard output and flush."""
    sys.stdout.write(text)
    sys.stdout.flush()


def typed(error: Exception) -> str:
    """Return an error's message for a command-line user: settings of ``treadle.load`` in it become
    options; the system's errors get the file's name.
    """
    if isinstance(error, OSError):
        return f"{error.filename}: {why(error)}" if error.filename else why(error)
    text = str(error)
    for setting, option in SETTINGS:
        text = re.sub(setting, option, text)
    return text


def shorten(text: str, width: int) -> str:
    """Cut a text that is longer than ``width`` characters, and append its length."""
    return text if len(text) <= width else f"{text[: width - 1]}… ({len(text)} characters)"
