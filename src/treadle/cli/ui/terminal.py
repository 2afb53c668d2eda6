"""Where the lines of a chat come from: an editor on a terminal, or the lines of a pipe."""

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
    """A source of entries."""

    def read(self) -> str:
        """Return the next entry, which may have several lines; EOFError at the end."""

    def discard(self) -> None:
        """Drop what was typed and not yet read, as a terminal does on Ctrl-C."""


class PipedLines:
    """Entries from a stream: a line each, joined to the next by a backslash at its end."""

    def __init__(self, stream: Iterable[str]) -> None:
        self._entries = join_continued(stream)

    def read(self) -> str:
        """Return the next entry; EOFError at the end."""
        return next_entry(self._entries)

    def discard(self) -> None:
        """Nothing: nobody types here, and Ctrl-C ends the chat."""


def next_entry(entries: Iterator[str]) -> str:
    """The next of them; EOFError at the end."""
    for entry in entries:
        return entry
    raise EOFError


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

    def __init__(self, keys: KeyboardGuard) -> None:
        self._keys = keys

    def read(self) -> str:
        """Return the next entry; EOFError at the end, KeyboardInterrupt on Ctrl-C."""
        with self._keys.lent(shown=True):
            return next_entry(join_continued(self._typed()))

    def discard(self) -> None:
        """Nothing: the terminal itself keeps the lines, and drops them on Ctrl-C."""

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
    """Entries from the terminal, with as much comfort as it has."""
    return PlainLines(keys) if is_dumb() else Editor(commands, keys)


class KeyboardGuard:
    """The keyboard while a chat lasts, as a context manager: what is typed during an answer is not
    shown in it. It waits, Enter too, for the next prompt; Ctrl-C throws it away.

    The terminal is as it was whenever somebody else has it: at the end, however that comes, and
    while the chat is suspended. Does nothing where standard input is no terminal.
    """

    def __init__(self) -> None:
        self._terminal: Terminal | None = None
        self._handlers: dict[int, Any] = {}
        self._mine = True

    def __enter__(self) -> KeyboardGuard:
        """Take the keyboard."""
        with contextlib.suppress(OSError, ValueError):  # no descriptor
            self._terminal = SYSTEM.terminal(sys.stdin.fileno())
        if self._terminal is not None:
            for number in SYSTEM.STOPS:
                self._handlers[number] = signal.signal(number, self._stop)
            if SYSTEM.GOES_ON is not None:
                number = SYSTEM.GOES_ON
                self._handlers[number] = signal.signal(number, self._go_on)
            self._show(False)
        return self

    def __exit__(self, *_: object) -> None:
        """Give the keyboard back."""
        if self._terminal is not None:
            self._show(True)
            for number, handler in self._handlers.items():
                signal.signal(number, handler)
            self._terminal = None

    @contextmanager
    def lent(self, *, shown: bool = False) -> Iterator[None]:
        """Within, somebody reads the keyboard, and sets the terminal up; ``shown``: somebody for
        whom the terminal itself must show what is typed.
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
            # An editor reads keys, the others whole lines.
            self._terminal.show(wanted, lines=is_dumb())

    def _stop(self, number: int, _: object) -> None:
        """Ctrl-Z, Ctrl-\\: leave the terminal as it was, and do what the signal would have done."""
        self._show(True)
        signal.signal(number, signal.SIG_DFL)
        signal.raise_signal(number)  # back from here when the chat goes on
        signal.signal(number, self._stop)
        self._go_on()

    def _go_on(self, *_: object) -> None:
        """Also after a stop that nobody can catch."""
        if self._mine:
            self._show(False)


class Editor:
    """Entries typed at a terminal: history, editing, several lines. Draws on standard error.

    Enter sends; Alt-Enter, or Enter after a backslash, starts a new line; a paste keeps its lines.
    """

    def __init__(self, commands: Iterable[str], keys: KeyboardGuard) -> None:
        self._session, self._keys = build_session(commands), keys

    def read(self) -> str:
        """Return what was typed; EOFError on Ctrl-D, KeyboardInterrupt on Ctrl-C."""
        with self._keys.lent():
            return self._session.prompt()

    def discard(self) -> None:
        """Drop the keys behind the last entry: several lines that came at once, without a mark of
        a paste, were read by the editor together.
        """
        from prompt_toolkit.input.typeahead import clear_typeahead

        clear_typeahead(self._session.app.input)


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
        enable_suspend=True,  # Ctrl-Z
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
