"""Where the lines of a chat come from: an editor on a terminal, or the lines of a pipe."""

from __future__ import annotations

import os
import sys
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Protocol

from treadle.cli.table import is_dumb, is_styled

if TYPE_CHECKING:
    from prompt_toolkit import PromptSession


class Lines(Protocol):
    """A source of entries."""

    def read(self) -> str:
        """Return the next entry, which may have several lines; EOFError at the end."""


class PipedLines:
    """Entries from a stream: a line each, joined to the next by a backslash at its end."""

    def __init__(self, stream: Iterable[str]) -> None:
        self._entries = join_continued(stream)

    def read(self) -> str:
        """Return the next entry; EOFError at the end."""
        entry = next(self._entries, None)
        if entry is None:
            raise EOFError
        return entry


def join_continued(lines: Iterable[str]) -> Iterator[str]:
    """Join each line that ends with a backslash to the one after it."""
    parts: list[str] = []
    for line in lines:
        line = line.rstrip("\r\n")
        if line.endswith("\\"):
            parts.append(line[:-1])
            continue
        yield "\n".join([*parts, line])
        parts = []
    if parts:
        yield "\n".join(parts)


class PlainLines:
    """Entries typed at a terminal that has no escapes: a prompt, and the terminal's own editing."""

    def read(self) -> str:
        """Return the next entry; EOFError at the end, KeyboardInterrupt on Ctrl-C."""
        parts: list[str] = []
        while True:
            print("  " if parts else "> ", end="", file=sys.stderr, flush=True)
            line = sys.stdin.readline()
            if not line and not parts:
                raise EOFError
            text = line.rstrip("\r\n")
            parts.append(text.removesuffix("\\"))
            if not text.endswith("\\"):
                return "\n".join(parts)


def open_lines(commands: Iterable[str]) -> Lines:
    """Entries from the terminal, with as much comfort as it has."""
    return PlainLines() if is_dumb() else Editor(commands)


class Editor:
    """Entries typed at a terminal: history, editing, several lines. Draws on standard error.

    Enter sends; Alt-Enter, or Enter after a backslash, starts a new line; a paste keeps its lines.
    """

    def __init__(self, commands: Iterable[str]) -> None:
        self._session = build_session(commands)

    def read(self) -> str:
        """Return what was typed; EOFError on Ctrl-D, KeyboardInterrupt on Ctrl-C."""
        return self._session.prompt()


def build_session(commands: Iterable[str]) -> PromptSession[str]:
    """Set up prompt_toolkit, which takes 90 ms to import and is not needed for a pipe."""
    from prompt_toolkit import PromptSession
    from prompt_toolkit.completion import WordCompleter
    from prompt_toolkit.formatted_text import ANSI
    from prompt_toolkit.history import FileHistory, InMemoryHistory
    from prompt_toolkit.key_binding import KeyBindings, KeyPressEvent
    from prompt_toolkit.output import create_output

    keys = KeyBindings()

    @keys.add("escape", "enter")
    def _(event: KeyPressEvent) -> None:
        event.current_buffer.insert_text("\n")

    @keys.add("enter")
    def _(event: KeyPressEvent) -> None:
        buffer = event.current_buffer
        if buffer.document.current_line_before_cursor.endswith("\\"):
            buffer.delete_before_cursor()
            buffer.insert_text("\n")
        else:
            buffer.validate_and_handle()

    history = history_file()
    return PromptSession(
        ANSI("\x1b[1m>\x1b[0m ") if is_styled(sys.stderr) else "> ",
        multiline=True,
        key_bindings=keys,
        history=FileHistory(str(history)) if history else InMemoryHistory(),
        completer=WordCompleter([f"/{name}" for name in commands], sentence=True),
        complete_while_typing=False,
        prompt_continuation="  ",
        output=create_output(stdout=sys.stderr),
    )


def history_file() -> Path | None:
    """Return the file of earlier entries, made if need be; None where none can be written."""
    try:
        state = os.environ.get("XDG_STATE_HOME") or Path.home() / ".local" / "state"
        folder = Path(state) / "treadle"
        path = folder / "chat_history"
        folder.mkdir(mode=0o700, parents=True, exist_ok=True)
        path.touch(mode=0o600)  # what one says to a model is nobody else's business
    except (OSError, RuntimeError):  # RuntimeError: nobody knows where home is
        return None
    return path
