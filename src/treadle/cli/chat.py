"""``treadle chat``: a conversation in the terminal; the answers alone are standard output."""

from __future__ import annotations

import io
import sys
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from treadle.cli.conversation import COMMANDS, Conversation, Turn, read_record
from treadle.cli.options import (
    ModelCommand,
    TokenLimit,
    build_sampling,
    load_options,
    sampling_options,
)
from treadle.cli.table import emit, is_styled, printable, typed
from treadle.cli.terminal import Lines, PipedLines, open_lines
from treadle.errors import ContextFullError, FileError, TreadleError

if TYPE_CHECKING:
    from treadle.generation import Generation
    from treadle.model import Model


@click.command(cls=ModelCommand)
@click.argument("model", required=False)
@click.option(
    "-n", "--max-tokens", type=TokenLimit(), metavar="N",
    help="Most tokens of one answer; -1, the default, for no limit.",
)  # fmt: skip
@click.option("--system", default="", metavar="TEXT", help="The system prompt.")
@click.option("--load", "record", metavar="FILE", help="Go on with a conversation that was saved.")
@load_options
@sampling_options
def command(
    model: str | None,
    max_tokens: int | None,
    system: str,
    record: str | None,
    load: dict[str, Any],
    sampling: dict[str, Any],
) -> None:
    """Talk with MODEL, or with the small model that ships inside the package.

    /help lists the commands: the system prompt, undo, retry, save, load, changed places, words put
    into the model's mouth. Ctrl-C stops an answer, Ctrl-D leaves. Without a terminal each line of
    standard input is a message.
    """
    from treadle.cli.load import load_model
    from treadle.cli.progress import ProgressBar

    settings = build_sampling(sampling)
    conversation = Conversation()
    if record:
        conversation.system, conversation.messages = read_record(Path(record))
    if system:
        conversation.system = system
    with ProgressBar() as progress:
        loaded = load_model(model, progress, **load)
        interactive = sys.stdin.isatty()
        if isinstance(sys.stdin, io.TextIOWrapper) and not interactive:
            sys.stdin.reconfigure(errors="replace")  # a byte that is no UTF-8 ends no chat
        lines = open_lines(COMMANDS) if interactive else PipedLines(sys.stdin)
        chat = Chat(loaded, conversation, max_tokens=max_tokens, sampling=settings)
        if interactive:
            note(f"{loaded.path.name}, context of {loaded.n_ctx} tokens. /help for the commands.")
        chat.run(lines, interactive=interactive)
    if chat.n_asked and not chat.n_answered and not interactive:
        raise click.exceptions.Exit(1)  # a script should know


class Chat:
    """The loop between a source of lines, a conversation and a model."""

    def __init__(self, model: Model, conversation: Conversation, **settings: Any) -> None:
        self.model = model
        self.conversation = conversation
        self.settings = settings
        self.session = model.session()  # keeps the cache from one turn to the next
        self.n_asked = self.n_answered = 0

    def run(self, lines: Lines, *, interactive: bool) -> None:
        """Read, answer, and read again, until the lines end or the person leaves."""
        while True:
            try:
                outcome = self.conversation.enter(lines.read())
            except EOFError:
                return
            except KeyboardInterrupt:
                if not interactive:
                    raise
                note("Ctrl-D leaves.")
                continue
            if outcome.note:
                fail(outcome.note) if outcome.failed else note(outcome.note)
            if outcome.leave:
                return
            if outcome.ask:
                self.answer(interactive=interactive)

    def answer(self, *, interactive: bool) -> None:
        """Stream the model's next answer, and record it; Ctrl-C keeps what was said so far."""
        conversation = self.conversation
        self.n_asked += 1
        reply: Any = None
        pieces: list[str] = []
        try:
            reply = self.model.chat(conversation.request(), session=self.session, **self.settings)
            emit(conversation.prefill)
            for piece in reply:
                pieces.append(piece)
                emit(piece)
        except KeyboardInterrupt:
            if not interactive:
                raise
            if not pieces:
                conversation.unanswered()
                emit("\n")
                note("stopped; the conversation is as it was before")
                return
        except ContextFullError as error:
            conversation.unanswered()
            fail(typed(error))
            note("The message was taken back: /undo frees some.")
            return
        except FileError:  # the model's file shrank: there is nobody to talk to
            if pieces:
                emit("\n")
            raise
        except TreadleError as error:  # a template that refuses these roles, say: talk goes on
            conversation.unanswered()
            fail(str(error))
            return
        self.n_answered += 1
        emit("\n")
        if reply.finish_reason == "context":
            note("the context is full: the answer stops here. /undo makes room.")
        turn = turn_of(self.model, reply)
        conversation.answered("".join(pieces), turn)
        note(str(turn))


def turn_of(model: Model, reply: Generation) -> Turn:
    """Take an answer's statistics from its `Generation`."""
    timings = reply.timings
    return Turn(
        n_prompt=timings.n_prompt,
        n_cached=timings.n_cached,
        prefill_s=timings.prefill_s,
        n_generated=timings.n_generated,
        decode_s=timings.decode_s,
        n_context=min(len(reply.prompt_ids) + len(reply.ids), model.n_ctx),  # the last is only said
        n_ctx=model.n_ctx,
    )


def fail(text: str) -> None:
    """Write an error that does not end the chat, as those that end a command are written."""
    note(f"treadle: error: {text}")


def note(text: str) -> None:
    """Write a remark to standard error, dim on a terminal."""
    text = printable(text, keep="\n\t")
    if is_styled(sys.stderr):
        text = f"\x1b[2m{text}\x1b[0m"
    print(text, file=sys.stderr, flush=True)
