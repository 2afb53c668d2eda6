"""Input of a chat: an editor on a terminal, or the lines of a pipe."""

from __future__ import annotations

import contextlib
import os
import signal
import sys
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any, Protocol

from treadle.cli.ui.table import is_dumb, is_styled
from treadle.system import SYSTEM

if TYPE_CHECKING:
    from prompt_toolkit import PromptSession

    from treadle.system.protocol import Terminal


class LineSource(Protocol):
    """A source of the user's entries: editor, terminal or pipe."""

    def read(self) -> str:
        """Return the next entry, which may have several lines. Raises EOFError at the end."""

    def discard(self) -> None:
        """Drop typed input that was not read yet; called on Ctrl-C."""


class PipedLines:
    """Entries from a stream, one a line; a line that ends with a backslash continues in the next
    one.
    """

    def __init__(self, stream: Iterable[str]) -> None:
        self._entries = join_continued(stream)

    def read(self) -> str:
        """Return the next entry. Raises EOFError at the end."""
        return next_entry(self._entries)

    def discard(self) -> None:
        """Do nothing: a pipe has no typed input."""


def next_entry(entries: Iterator[str]) -> str:
    """Return the next of ``entries``. Raises EOFError at the end."""
    for entry in entries:
        return entry
    raise EOFError


def join_continued(lines: Iterable[str]) -> Iterator[str]:
    """Yield entries: a line that ends with a backslash is joined to the next one by a newline."""
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
    """Entries from a terminal without escape sequences; the terminal itself edits lines."""

    def __init__(self, keys: KeyboardGuard) -> None:
        self._keys = keys

    def read(self) -> str:
        """Return the next entry. Raises EOFError at the end, KeyboardInterrupt on Ctrl-C."""
        with self._keys.lent(shown=True):
            return next_entry(join_continued(self._typed()))

    def discard(self) -> None:
        """Do nothing: the terminal holds unread lines, and drops them on Ctrl-C."""

    def _typed(self) -> Iterator[str]:
        prompt = "> "
        while True:
            print(prompt, end="", file=sys.stderr, flush=True)
            line = sys.stdin.readline()
            if line or prompt != "> ":
                yield line
            if not line:
                return
            prompt = "  "


def open_lines(commands: Iterable[str], keys: KeyboardGuard) -> LineSource:
    """Return an editor, or plain lines on a terminal without escape sequences. ``commands``: slash
    commands to complete; ``keys``: lends the keyboard for each entry.
    """
    return PlainLines(keys) if is_dumb() else Editor(commands, keys)


class KeyboardGuard:
    """Context manager that turns the terminal's echo off while an answer is written. Input typed
    meanwhile, Enter included, is kept for the next prompt; Ctrl-C drops it.

    Echo is restored at the end, also after an error, and while the chat is suspended. Does nothing
    if standard input is not a terminal.
    """

    def __init__(self) -> None:
        self._terminal: Terminal | None = None
        self._handlers: dict[int, Any] = {}
        self._mine = True

    def __enter__(self) -> KeyboardGuard:
        """Turn echo off and install signal handlers."""
        with contextlib.suppress(OSError, ValueError):  # no descriptor
            self._terminal = SYSTEM.terminal(sys.stdin.fileno())
        if self._terminal is not None:
            for number in SYSTEM.STOP_SIGNALS:
                self._handlers[number] = signal.signal(number, self._stop)
            if SYSTEM.CONTINUE_SIGNAL is not None:
                number = SYSTEM.CONTINUE_SIGNAL
                self._handlers[number] = signal.signal(number, self._go_on)
            self._show(False)
        return self

    def __exit__(self, *_: object) -> None:
        """Restore the terminal and the signal handlers."""
        if self._terminal is not None:
            self._show(True)
            for number, handler in self._handlers.items():
                signal.signal(number, handler)
            self._terminal = None

    @contextmanager
    def lent(self, *, shown: bool = False) -> Iterator[None]:
        """Let other code read the keyboard and set up the terminal within the block. ``shown``:
        turn echo on for it.
        """
        self._mine = False
        if shown:
            self._show(True)
        try:
            yield
        finally:
            self._mine = True
            self._show(False)

    def _show(self, wanted: bool) -> None:
        if self._terminal is not None and self._terminal.is_ours():
            # The editor reads keys, other readers whole lines.
            self._terminal.show(wanted, lines=is_dumb())

    def _stop(self, number: int, _: object) -> None:
        """Handle Ctrl-Z and Ctrl-\\: restore the terminal, then take the default action."""
        self._show(True)
        signal.signal(number, signal.SIG_DFL)
        signal.raise_signal(number)  # returns when the chat is resumed
        signal.signal(number, self._stop)
        self._go_on()

    def _go_on(self, *_: object) -> None:
        """Turn echo off again when the chat is resumed."""
        if self._mine:
            self._show(False)


class Editor:
    """Entries typed in an editor on the terminal, with history and several lines. It writes to
    standard error.

    Enter sends; Alt-Enter, or Enter after a backslash, starts a new line; pasted text keeps its
    lines.
    """

    def __init__(self, commands: Iterable[str], keys: KeyboardGuard) -> None:
        self._session = build_session(commands)
        self._keys = keys

    def read(self) -> str:
        """Return the entry. Raises EOFError on Ctrl-D, KeyboardInterrupt on Ctrl-C."""
        with self._keys.lent():
            return self._session.prompt()

    def discard(self) -> None:
        """Drop keys after the last entry: the editor may have read several lines at once, if the
        terminal does not mark pasted text.
        """
        from prompt_toolkit.input.typeahead import clear_typeahead

        clear_typeahead(self._session.app.input)


def build_session(commands: Iterable[str]) -> PromptSession[str]:
    """Set up prompt_toolkit's editor, with history and completion of ``commands``. It takes 90 ms
    to import, so it is not used for a pipe.
    """
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
        enable_suspend=True,  # Ctrl-Z
    )


def history_file() -> Path | None:
    """Return the file of the chat's history, created if needed; None if it cannot be written."""
    try:
        state = os.environ.get("XDG_STATE_HOME") or Path.home() / ".local" / "state"
        folder = Path(state) / "treadle"
        path = folder / "chat_history"
        folder.mkdir(mode=0o700, parents=True, exist_ok=True)
        path.touch(mode=0o600)  # private: it contains prompts
    except (OSError, RuntimeError):  # RuntimeError: the home folder is unknown
        return None
    return path
