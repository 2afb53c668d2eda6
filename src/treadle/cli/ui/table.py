"""What the commands print: tables and numbers for people, JSON for programs."""

from __future__ import annotations

import codecs
import json
import os
import re
import sys
from collections.abc import Callable, Iterable, Sequence
from typing import Any, Literal, TextIO

from treadle.base.humanize import n_bytes as n_bytes
from treadle.base.humanize import n_weights as n_weights
from treadle.base.humanize import scaled as scaled
from treadle.base.humanize import why
from treadle.errors import printable as printable

CONTROL = re.compile(r"(?!\r\n)[\x00-\x08\x0b-\x1f\x7f-\x9f]")  # but of \n, \t, \r before \n
# Settings of treadle.load, where messages tell what to change, and the options that set them.
SETTINGS = (
    (re.compile(r"\bcontext=(?: or n_sequences=)?(?![^\s,.;:)])"), "-c"),
    (re.compile(r"\bkv_(?:bytes|tokens)=(?![^\s,.;:)])"), "--kv-mib"),
)
SHOWN = 1000  # characters of a cell on a terminal
GAP = 2  # columns between two cells
FOLDED = 24  # columns that a cell of long words has at least, before others are left out


def print_table(
    headers: Sequence[str],
    rows: Iterable[Sequence[object]],
    *,
    optional: Sequence[str] = (),
    folding: str = "",
) -> None:
    """Print rows under ``headers``; columns of numbers (header ends in a space) to the right.

    In a pipe every row is one line, whole. On a terminal long cells are cut, and the table takes no
    more than its width: the column ``folding`` breaks its cells after ``_``, then the ``optional``
    columns are left out, the first of them first, and a line below tells so; what is still too wide
    folds.
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
    """The columns that are shown in ``room``, by their numbers, and the rows with folded cells."""
    from rich.cells import cell_len

    wide = [
        max(map(cell_len, column))
        for column in zip([header.strip() for header in headers], *lines, strict=True)
    ]
    shown, at = list(range(len(headers))), headers.index(folding) if folding else None
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
    """A long word in lines of at most ``width``, broken after ``_`` where there is one."""
    lines = []
    while len(word) > width:
        at = word.rfind("_", 1, width) + 1 or width
        lines.append(word[:at])
        word = word[at:]
    return "\n".join([*lines, word])


def terminal_width() -> int | None:
    """Columns of the terminal that standard output is; None where it is none."""
    from shutil import get_terminal_size

    return get_terminal_size().columns if sys.stdout.isatty() else None


def columns(stream: TextIO) -> int:
    """Cells of a row of the terminal that ``stream`` is, as it is now."""
    try:
        return os.get_terminal_size(stream.fileno()).columns or 80
    except (OSError, ValueError):
        return 80


def say(text: str, indent: str = "") -> None:
    """Print one line; on a terminal, in as many as its width asks for, the later ones indented."""
    width = terminal_width()
    if width is None or len(text) <= width:
        print(text)
        return
    from textwrap import wrap

    # wrap() makes one space of several only at a break, so columns in the first line stay.
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
    """Write what should be known of the work to standard error."""
    print(f"treadle: {printable(text)}", file=sys.stderr)


def print_json(value: object) -> None:
    """Print one JSON document; bytes that were no UTF-8 become replacement characters in it, and
    numbers that are not finite, which JSON does not have, null.
    """
    try:
        text = json.dumps(value, ensure_ascii=False, allow_nan=False)
    except ValueError:
        value = json.loads(json.dumps(value), parse_constant=lambda name: None)
        text = json.dumps(value, ensure_ascii=False)
    text = text.encode("utf-8", "surrogateescape").decode("utf-8", "replace")
    text = re.sub("[\x7f-\x9f]", lambda c: f"\\u{ord(c[0]):04x}", text)  # terminals obey them too
    encoding = getattr(sys.stdout, "encoding", None) or "utf-8"
    if codecs.lookup(encoding).name != "utf-8":  # it lacks letters, and would show "?" for them
        text = json.dumps(json.loads(text))
    print(text)


def show(report: Any, as_json: bool, print_report: Callable[[Any], object]) -> None:
    """Print a report, for programs or for people."""
    (print_json if as_json else print_report)(report)


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
    write(harmless(text) if sys.stdout.isatty() else text)


def write(text: str) -> None:
    """Write to standard output, at once."""
    sys.stdout.write(text)
    sys.stdout.flush()


def typed(error: Exception) -> str:
    """What an error says: the library's, with the command line's flags in place of keywords, or the
    system's.
    """
    if isinstance(error, OSError):
        return f"{error.filename}: {why(error)}" if error.filename else why(error)
    text = str(error)
    for setting, option in SETTINGS:
        text = setting.sub(option, text)
    return text


def shorten(text: str, width: int) -> str:
    """Cut a long text, and say how long it was."""
    return text if len(text) <= width else f"{text[: width - 1]}… ({len(text)} characters)"
