"""Record a command in a terminal as an SVG that plays once, in the time that it really took.

    pip install pyte
    python tools/record_demo.py docs/demo.svg -- treadle run --stats "def fibonacci(n):"

The README's is of a real model, which tools/fetch_models.py puts into the cache:

    cd ~/.cache/treadle-models
    python .../tools/record_demo.py .../docs/demo.svg --shell -- \\
        'echo "What is photosynthesis?" | treadle chat SmolLM2-135M-Instruct.Q4_1.gguf --seed 1' \\
        --temp 0.2 --top-p 0.9 --repeat-penalty 1.1

With ``--shell`` the words are one line for sh. The picture stands alone: a page that shows it as an
image animates it too. With ``prefers-reduced-motion`` it shows the end. The times are those of the
run.
"""

from __future__ import annotations

import argparse
import os
import pty
import select
import shlex
import sys
import textwrap
import time
from collections.abc import Sequence
from dataclasses import dataclass
from html import escape
from pathlib import Path

import pyte

COLUMNS = 88  # characters
CELL = 8.4  # pixels
LINE = 19
PAD = 16
TYPED = 0.035  # seconds a character of the command
COLOURS = {"default": "#d4d7dd", "green": "#7ec699", "red": "#ff7b72", "brown": "#e3b341"}
COLOURS |= {"blue": "#79b8ff", "cyan": "#76d9e6", "magenta": "#d2a8ff", "black": "#8b949e"}


@dataclass
class Run:
    """Text of one colour in one row, and when it is seen: from ``on`` to ``off``, in seconds."""

    row: int
    column: int
    text: str
    colour: str
    on: float
    off: float | None = None


def record(command: Sequence[str], rows: int) -> tuple[list[tuple[float, bytes]], int]:
    """Return what a command wrote to a terminal, pieces with their seconds, and its exit status."""
    environment = {**os.environ, "TERM": "xterm-256color", "COLUMNS": str(COLUMNS)}
    pid, terminal = pty.fork()
    if pid == 0:
        os.execvpe(command[0], list(command), environment)
    import fcntl
    import struct
    import termios

    fcntl.ioctl(terminal, termios.TIOCSWINSZ, struct.pack("HHHH", rows, COLUMNS, 0, 0))
    pieces: list[tuple[float, bytes]] = []
    began = time.monotonic()
    while True:
        select.select([terminal], [], [])
        try:
            piece = os.read(terminal, 65536)
        except OSError:  # Linux says so when the command has closed its side
            piece = b""
        if not piece:
            break
        pieces.append((time.monotonic() - began, piece))
    return pieces, os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1])


def play(pieces: Sequence[tuple[float, bytes]], rows: int, start: float) -> list[Run]:
    """The runs of text that a terminal shows; what is overwritten goes off."""
    screen = pyte.Screen(COLUMNS, rows)
    stream = pyte.ByteStream(screen)
    shown: dict[tuple[int, int], Run] = {}
    runs: list[Run] = []
    for seconds, piece in pieces:
        stream.feed(piece)
        at = round(start + seconds, 3)
        now = {(run.row, run.column): run for row in range(rows) for run in _runs(screen, row, at)}
        for key, run in list(shown.items()):
            new = now.get(key)
            if new is None or (new.text, new.colour) != (run.text, run.colour):
                run.off = at
                del shown[key]
        for key, run in now.items():
            if key not in shown:
                shown[key] = run
                runs.append(run)
    return runs


def _runs(screen: pyte.Screen, row: int, at: float) -> list[Run]:
    """One row's words: a word is the unit, so that a growing line keeps what it had."""
    out: list[Run] = []
    line = screen.buffer[row]
    for column in range(COLUMNS):
        cell = line[column]
        if cell.data.isspace() or not cell.data:
            continue
        last = out[-1] if out else None
        joined = last is not None and last.column + len(last.text) == column
        if last is not None and joined and last.colour == cell.fg:
            last.text += cell.data
        else:
            out.append(Run(row, column, cell.data, cell.fg, at))
    return out


def svg(runs: Sequence[Run], command: str, end: float, title: str) -> str:
    """The picture: a terminal window whose text comes on as it was written."""
    lines = textwrap.wrap(command, COLUMNS - 6, break_long_words=False, subsequent_indent="    ")
    typing = " \\\n".join(lines)
    rows = max([run.row for run in runs], default=0) + 1 + len(lines)
    width = COLUMNS * CELL + 2 * PAD
    height = rows * LINE + 3 * PAD
    typed = []
    for i, character in enumerate(typing):
        row = typing.count("\n", 0, i)
        column = i - typing.rfind("\n", 0, i) - 1
        if not character.isspace():
            typed.append(Run(row, 2 + column, character, "default", round(TYPED * i, 3)))
    moved = [Run(r.row + len(lines), r.column, r.text, r.colour, r.on, r.off) for r in runs]
    body = "\n".join(map(_text, [*typed, *moved]))
    return f"""<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {width:g} {height:g}" \
width="{width:g}" height="{height:g}" role="img">
<title>{escape(title)}</title>
<style>
text {{ font: 14px ui-monospace, "DejaVu Sans Mono", Menlo, Consolas, monospace; white-space: pre }}
.r {{ visibility: hidden; animation: on 0s forwards }}
.b {{ visibility: hidden; animation: on 0s forwards, off 0s forwards }}
@keyframes on {{ to {{ visibility: visible }} }}
@keyframes off {{ to {{ visibility: hidden }} }}
@media (prefers-reduced-motion) {{ .r {{ animation: none; visibility: visible }} \
.b {{ animation: none }} }}
</style>
<rect width="100%" height="100%" rx="8" fill="#16191f"/>
<text x="{PAD}" y="{PAD + LINE}" fill="#7ec699">$</text>
{body}
</svg>
"""


def _text(run: Run) -> str:
    x = PAD + run.column * CELL
    y = PAD + (run.row + 1) * LINE
    delays = f"{run.on:g}s" if run.off is None else f"{run.on:g}s,{run.off:g}s"
    return (
        f'<text class="{"r" if run.off is None else "b"}" x="{x:g}" y="{y:g}" '
        f'textLength="{len(run.text) * CELL:g}" fill="{COLOURS.get(run.colour, "#d4d7dd")}" '
        f'style="animation-delay:{delays}">{escape(run.text)}</text>'
    )


def main(argv: Sequence[str] | None = None) -> int:
    """Run, record, draw."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument("out", type=Path)
    parser.add_argument("--rows", type=int, default=40, help="of the terminal; it must not scroll")
    parser.add_argument("--title", default="a recording of treadle in a terminal")
    parser.add_argument("--shell", action="store_true", help="the words are a line for sh")
    parser.add_argument("command", nargs="+")
    args = parser.parse_args(argv)
    line = " ".join(args.command)
    pieces, status = record(["sh", "-c", line] if args.shell else args.command, args.rows)
    if status:
        print(f"{shlex.join(args.command)} ended with {status}", file=sys.stderr)
        return 1
    command = " ".join(f'"{w}"' if " " in w else w for w in args.command)
    if args.shell:
        command = line
    start = TYPED * len(command) + 0.4
    runs = play(pieces, args.rows, start)
    end = max(seconds for seconds, _ in pieces) + start
    args.out.write_text(svg(runs, command, end, args.title), "utf-8")
    print(f"{args.out}: {len(runs)} runs of text, {end:.1f} s", file=sys.stderr)
    return 0


if __name__ == "__main__":
    sys.exit(main())
