"""State of ``treadle chat``: messages, commands, statistics; no terminal, no model.

Lines go in through `Conversation.enter`; an `Outcome` says what to print and whether the model
answers next. The model's answer comes back through `Conversation.answered`.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import field
from difflib import get_close_matches
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from treadle.base.fast_classes import dataclass
from treadle.base.humanize import counted, listed
from treadle.cli.media_files import (
    MediaFile,
    dropped_files,
    message_parts,
    open_media_file,
    split_paths,
    usage_text,
)
from treadle.cli.settings import SETTINGS, AnswerSettings, find
from treadle.cli.transcript import CALLS, REASONING, Message, path_of, read_record, write_record
from treadle.cli.ui.table import typed
from treadle.errors import FileError, TreadleError, why
from treadle.files.target import check_target

if TYPE_CHECKING:
    from treadle.chat.tools import ToolCall
    from treadle.scheduler.output import Timings
    from treadle.scheduler.request import MediaUsage

OTHER_ROLE = {"user": "assistant", "assistant": "user"}


@dataclass(frozen=True)
class Outcome:
    """Result of one input line. ``note``: text to print. ``ask``: the model answers next.
    ``leave``: the chat ends. ``failed``: the line could not be executed, and ``note`` says why.
    """

    note: str = ""
    ask: bool = False
    leave: bool = False
    failed: bool = False


@dataclass(frozen=True)
class AnswerCost:
    """Token counts and times of one answer."""

    timings: Timings
    n_context: int  # tokens in the context after it
    n_ctx: int  # tokens that the context can hold
    media: Sequence[MediaUsage] = ()  # pictures and sounds of the prompt

    def __str__(self) -> str:
        """Return the line printed below an answer."""
        prompt = f"prompt {prefill_text([self])}"
        context = f"context {self.n_context} of {self.n_ctx}"
        return "; ".join(filter(None, (decode_text([self]), prompt, self.media_text, context)))

    @property
    def media_text(self) -> str:
        """The prompt's pictures and sounds, and the seconds of encoding them, as text; "" without
        any.
        """
        return usage_text(self.media, self.timings.media_s) if self.media else ""

    @property
    def n_read(self) -> int:
        """Prompt tokens that were prefilled: those that were not cached."""
        return self.timings.n_prompt - self.timings.n_cached


def decode_text(turns: Sequence[AnswerCost]) -> str:
    """Return the number of tokens generated in these answers and the decode speed as text. The
    speed excludes each answer's first token, which comes from the prefill.
    """
    n = sum(turn.timings.n_generated for turn in turns)
    n_timed = sum(max(0, turn.timings.n_generated - 1) for turn in turns)
    return with_speed(counted(n, "token"), n_timed, sum(turn.timings.decode_s for turn in turns))


def prefill_text(turns: Sequence[AnswerCost]) -> str:
    """Return the number of prompt tokens prefilled for these answers and their speed as text."""
    n = sum(turn.n_read for turn in turns)
    return with_speed(str(n), n, sum(turn.timings.prefill_s for turn in turns))


def with_speed(text: str, n_timed: int, seconds: float) -> str:
    """Append the speed to ``text``: ``n_timed`` tokens over ``seconds``, in tokens per second;
    nothing if ``n_timed`` is 0.
    """
    return f"{text}, {n_timed / seconds:.1f} tokens/s" if seconds > 0 and n_timed else text


@dataclass
class Conversation:
    """The messages of a chat, and the slash commands that change them.

    ``check`` is called before settings change, and raises for those that the model cannot use;
    ``look`` is called before a picture or sound is attached, returns its size as text, and raises
    for one that the model cannot read.
    """

    system: str = ""
    messages: list[Message] = field(default_factory=list)
    prefill: str = ""  # the required beginning of the next answer
    settings: AnswerSettings = field(default_factory=AnswerSettings)
    check: Callable[[AnswerSettings], None] = lambda settings: None
    look: Callable[[MediaFile], str] = lambda file: ""
    attached: list[MediaFile] = field(default_factory=list)  # for the next message
    n_dropped: int = 0  # oldest messages, no longer in the prompt
    turns: list[AnswerCost] = field(default_factory=list)
    # ``messages``, ``n_dropped`` and ``attached`` as they were before the current line.
    _before: tuple[list[Message], int, list[MediaFile]] | None = None
    _saved: Path | None = None  # the last file written by /save

    # -- input ---------------------------------------------------------------------------------

    def enter(self, line: str) -> Outcome:
        """Handle one entry: a message, a command that begins with a slash (a message may begin with
        "//" for "/"), or only paths of pictures and sounds, which are attached.
        """
        if not line.strip():
            return Outcome()
        self._before = list(self.messages), self.n_dropped, list(self.attached)
        if files := dropped_files(line):
            return self.attach(files)
        if line.startswith("/") and not line.startswith("//"):
            name, _, argument = line[1:].partition(" ")
            return self.command(name.strip().lower(), argument.strip())
        text = line.removeprefix("/")
        try:
            content = message_parts(text, self.attached) if self.attached else text
        except click.UsageError as error:
            return Outcome(str(error), failed=True)
        self.messages.append({"role": "user", "content": content})
        self.attached = []
        return Outcome(ask=True)

    def command(self, name: str, argument: str) -> Outcome:
        """Execute the slash command ``/name argument``."""
        act = COMMANDS.get(name)
        if act is None:
            near = get_close_matches(name, COMMANDS)
            hint = f"did you mean /{near[0]}?" if near else "/help lists the commands"
            if "/" in name:
                hint = "a path alone sends a picture, // at the start stands for a slash"
            return Outcome(f"unknown command /{name}; {hint}", failed=True)
        if argument and name in ALONE:
            return Outcome(f"/{name} takes nothing behind it, found '{argument}'", failed=True)
        return act(self, argument)

    # -- prompts and answers --------------------------------------------------------------------

    def request(self, n_dropped: int | None = None) -> list[Message]:
        """Return the messages for the model, without the first ``n_dropped`` (None: as many as are
        dropped now). A prefill is added as the beginning of the assistant's next message.
        """
        said = self.messages[self.n_dropped if n_dropped is None else n_dropped :]
        head = [{"role": "system", "content": self.system}] if self.system else []
        if said and said[0]["role"] == "assistant":  # after /swap
            # Many templates refuse a conversation that does not begin with the user.
            head.append({"role": "user", "content": ""})
        tail = [{"role": "assistant", "content": self.prefill}] if self.prefill else []
        return head + said + tail

    def turn_ends(self) -> list[int]:
        """Return the numbers of messages that may be dropped from the start: each leaves a user's
        message first.
        """
        first = self.n_dropped + 1
        return [i for i in range(first, len(self.messages)) if self.messages[i]["role"] == "user"]

    def answered(
        self,
        text: str,
        turn: AnswerCost | None = None,
        reasoning: str = "",
        calls: Sequence[ToolCall] = (),
    ) -> None:
        """Record an answer: its ``text`` after the prefill, its cost ``turn`` (None: not counted),
        ``reasoning`` that later prompts include, and tool calls whose results follow as messages.
        """
        more: dict[str, Any] = {REASONING: reasoning} if reasoning else {}
        if calls:
            more[CALLS] = [
                {"id": id, "type": "function", "function": {"name": name, "arguments": arguments}}
                for id, name, arguments in calls
            ]
        self.messages.append({"role": "assistant", "content": self.prefill + text, **more})
        self.prefill = ""
        if not calls:  # else the answer to this line follows the results
            self._before = None
        if turn is not None:
            self.turns.append(turn)

    def remove_calls(self) -> None:
        """Remove the tool calls from the last answer: they were not run."""
        if self.messages:
            self.messages[-1].pop(CALLS, None)

    def unanswered(self) -> None:
        """Undo the last line, which could not be answered: a message, or the change by /retry or
        /swap.
        """
        if self._before is not None:
            self.messages, self.n_dropped, self.attached = self._before
            self._before = None

    # -- the commands --------------------------------------------------------------------------

    def set_system(self, text: str) -> Outcome:
        """Set the system prompt to TEXT; alone, show it; with "", remove it."""
        if not text:
            return Outcome(self.system or "no system prompt is set: /system TEXT sets one")
        self.system = "" if text in ('""', "''") else text
        return Outcome("system prompt set" if self.system else "system prompt removed")

    def attach(self, files: Sequence[MediaFile]) -> Outcome:
        """Attach files to the next message."""
        try:
            sizes = [self.look(file) for file in files]
        except TreadleError as error:
            return Outcome(typed(error), failed=True)
        self.attached += files
        named = [
            f"{file.name} ({size})" if size else file.name
            for file, size in zip(files, sizes, strict=True)
        ]
        return Outcome(f"{listed(named, 5)}: with your next message; /undo removes it")

    def add_picture(self, names: str) -> Outcome:
        """Send the picture in FILE with the next message; alone, list what is sent."""
        if not names:
            files = [file.source for file in self.attached]
            return Outcome("\n".join(files) or "no picture or sound is attached")
        try:
            return self.attach([open_media_file(name) for name in split_paths(names)])
        except TreadleError as error:
            return Outcome(typed(error), failed=True)

    def add_sound(self, names: str) -> Outcome:
        """Send the sound in FILE with the next message."""
        return self.add_picture(names)

    def undo(self, _: str) -> Outcome:
        """Remove what is attached, or the last message and its answer."""
        if self.attached:
            n = len(self.attached)
            self.attached = []
            return Outcome(f"{counted(n, 'file')} removed; the messages stay")
        if not self.messages:
            return Outcome("nothing to undo")
        while self.messages and self.messages.pop()["role"] != "user":
            pass
        if self.n_dropped >= len(self.messages):  # use the remaining messages again
            self.n_dropped = 0
        return Outcome(f"undone; {self.count()}")

    def clear(self, _: str) -> Outcome:
        """Remove all messages; the system prompt and the settings stay."""
        self.messages = []
        self.attached = []
        self.prefill = ""
        self.n_dropped = 0
        return Outcome("cleared" + ("; the system prompt stays" if self.system else ""))

    def retry(self, _: str) -> Outcome:
        """Regenerate the last answer."""
        if self.messages and self.messages[-1]["role"] == "assistant":
            self.messages.pop()
        if not self.messages:
            return Outcome("there is no message to answer yet")
        return Outcome(ask=True)

    def save(self, name: str) -> Outcome:
        """Write the conversation to FILE, as JSON."""
        if not name:
            return Outcome("/save needs a file name", failed=True)
        try:
            path = path_of(name)
            check_target(path, force=True)
            if path.exists() and path.absolute() != self._saved:
                read_record(path)  # raises FileError rather than overwrite another kind of file
            write_record(path, self.system, self.messages)
        except OSError as error:
            return Outcome(f"cannot write {path}: {why(error)}", failed=True)
        except FileError as error:
            return Outcome(f"not saved: {error}", failed=True)
        self._saved = path.absolute()
        return Outcome(f"{self.count()} saved to {path}")

    def load(self, name: str) -> Outcome:
        """Continue the conversation in FILE."""
        if not name:
            return Outcome("/load needs a file name", failed=True)
        try:
            path = path_of(name)
            self.system, self.messages = read_record(path)
        except OSError as error:
            return Outcome(f"cannot read {path}: {why(error)}", failed=True)
        except FileError as error:
            return Outcome(str(error), failed=True)
        self.prefill = ""
        self.n_dropped = 0
        return Outcome(f"{self.count()} loaded from {path}")

    def swap(self, _: str) -> Outcome:
        """Swap roles: you continue as the assistant, the model as the user."""
        self.n_dropped = 0  # it counted calls and results, which are removed
        self.messages = [
            {"role": OTHER_ROLE[m["role"]], "content": m["content"]}
            for m in self.messages
            if m["role"] in OTHER_ROLE and not m.get(CALLS)
        ]
        # The last answer is now the user's message, and the model replies to it.
        ask = bool(self.messages) and self.messages[-1]["role"] == "user"
        return Outcome("roles swapped", ask=ask)

    def set_prefill(self, text: str) -> Outcome:
        """Begin the next answer with TEXT; without TEXT, remove the prefill."""
        self.prefill = text
        if not text:
            return Outcome("prefill removed")
        return Outcome(
            "the next answer begins with this text; /retry applies it to the last answer"
        )

    def set(self, line: str) -> Outcome:
        """Change a setting: NAME VALUE ("default" puts it back); alone, show all."""
        if not line:
            return Outcome(self.settings.table())
        name, _, value = line.replace("=", " ", "=" in line.split()[0]).partition(" ")
        try:
            setting = find(name)
            if value.strip():
                settings = self.settings.changed(name, value.strip())
                self.check(settings)
                self.settings = settings
        except (TreadleError, OSError) as error:
            return Outcome(typed(error), failed=True)
        except (click.UsageError, ValueError) as error:
            return Outcome(f"{name}: {str(error).rstrip('.')}", failed=True)
        return Outcome(self.settings.line(SETTINGS[setting.name]))

    def stats(self, _: str) -> Outcome:
        """Show the speed and the context used: the last answer, and all of them."""
        if not self.turns:
            return Outcome("no answer yet")
        n_cached = sum(turn.timings.n_cached for turn in self.turns)
        return Outcome(
            f"last answer: {self.turns[-1]}\n"
            f"{counted(len(self.turns), 'answer')}: generated {decode_text(self.turns)}; "
            f"prompts {prefill_text(self.turns)}; "
            f"{counted(n_cached, 'prompt token')} reused from the cache"
        )

    def help(self, _: str) -> Outcome:
        """Show this list."""
        lines = [f"/{name:<9}{act.__doc__}" for name, act in COMMANDS.items() if name != "exit"]
        lines += [
            "",
            "A file dropped on the terminal, which is its path alone on a line, is /image.",
            "Alt-Enter, or a backslash at the end of a line, starts a new line.",
            "Ctrl-C stops the answer, Ctrl-Z suspends, Ctrl-D exits. // at the start stands for a "
            "slash.",
        ]
        return Outcome("\n".join(lines))

    def leave(self, _: str) -> Outcome:
        """Exit (so does Ctrl-D)."""
        return Outcome(leave=True)

    def count(self) -> str:
        """Return the number of messages with its noun: ``2 messages``."""
        return counted(len(self.messages), "message")


ALONE = frozenset(("clear", "undo", "retry", "swap", "stats"))  # commands without an argument
COMMANDS: dict[str, Callable[[Conversation, str], Outcome]] = {
    "system": Conversation.set_system,
    "clear": Conversation.clear,
    "undo": Conversation.undo,
    "retry": Conversation.retry,
    "save": Conversation.save,
    "load": Conversation.load,
    "swap": Conversation.swap,
    "prefill": Conversation.set_prefill,
    "image": Conversation.add_picture,
    "audio": Conversation.add_sound,
    "set": Conversation.set,
    "stats": Conversation.stats,
    "help": Conversation.help,
    "quit": Conversation.leave,
    "exit": Conversation.leave,
}
