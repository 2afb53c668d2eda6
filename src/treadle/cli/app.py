"""The click group of all commands: imports the called command's file, and turns every outcome into
an exit code.

Of other packages only click is imported at the top, because a start must be quick
(docs/dependencies.md has what each import costs).
"""

from __future__ import annotations

import errno
import io
import os
import sys
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from importlib import import_module
from typing import Any

import click

import treadle
from treadle.base.caller_warnings import warnings_to
from treadle.base.gc_pause import imports_kept
from treadle.errors import TreadleError, printable

# Help lines for ``treadle --help`` and shell completion, which import no command.
SECTIONS = {
    "Run": {
        "run": "Complete a prompt.",
        "chat": "Chat with a model.",
        "serve": "Serve a model over HTTP.",
        "launch": "Start a coding agent on a local model.",
        "batch": "Answer a file of requests.",
        "cluster": "Serve a model from several machines.",
        "transcribe": "Transcribe sound, or translate it into English.",
        "embed": "Compute embedding vectors of texts.",
        "rerank": "Rank documents by how well they answer a query.",
    },
    "Models": {
        "pull": "Download a model.",
        "warm": "Compile a model's kernels before its first use.",
        "list": "List the models on this machine.",
        "show": "Show what a model is, and what it needs.",
        "rm": "Remove models from this machine.",
        "ps": "Show what a running server has loaded.",
        "inspect": "Show a model file's contents and unsupported parts.",
        "plan": "Show the steps of a model's forward pass.",
        "diff": "Say at which step two models part.",
        "tokenize": "Show the tokens of a text and their ids.",
    },
    "Measure": {
        "bench": "Benchmark prefill and decode speed against this machine's peaks.",
        "perplexity": "Measure the perplexity and KL divergence of a model on a text.",
        "doctor": "Report what this machine can do, and what limits it.",
        "check": "Prove that this machine computes what it should.",
        "tune": "Find and save the fastest tile sizes for this machine.",
        "kernels": "List the compiled kernels, or show the code of one.",
    },
    "Convert": {
        "convert": "Convert any checkpoint to one GGUF file.",
        "quantize": "Write a model file in smaller formats.",
        "imatrix": "Compute an importance matrix from a text.",
        "control-vector": "Make a control vector from pairs of texts.",
        "bundle": "Pack treadle and a model into one executable file.",
    },
}
COMMANDS = {name: text for section in SECTIONS.values() for name, text in section.items()}

TAB = "\t"
_HELP = {"-h", "--help"}
_ASKED = "treadle.asked"  # key in click's ``meta``: the command's name, the command, its arguments
# Exit codes; the last two are 128 + the signal's number.
DONE = 0
FAILED = 1
USAGE = 2
INTERRUPTED = 130
READER_GONE = 141


class Commands(click.Group):
    """Click group of all commands. It has their help lines, and imports
    ``treadle/cli/commands/NAME.py``, whose ``command`` it runs, only when NAME is called.
    """

    def list_commands(self, ctx: click.Context) -> list[str]:
        """Return every command's name, in the order of the help text."""
        return list(COMMANDS)

    def format_commands(self, ctx: click.Context, formatter: click.HelpFormatter) -> None:
        """Write the commands of the help text in sections."""
        width = max(map(len, COMMANDS))
        for title, commands in SECTIONS.items():
            with formatter.section(title):
                formatter.write_dl([(f"{name:<{width}}", text) for name, text in commands.items()])

    def resolve_command(
        self, ctx: click.Context, args: list[str]
    ) -> tuple[str | None, click.Command | None, list[str]]:
        """Return the called command's name, the command, which is imported now, and its arguments.
        Raises click.UsageError, with a suggestion, for an unknown name.
        """
        if args[0] not in COMMANDS and not ctx.resilient_parsing:
            raise click.UsageError(unknown_command(args[0]), ctx)
        name, command, rest = super().resolve_command(ctx, args)
        if name:
            with imports_kept():
                module = name.replace("-", "_")
                command = import_module(f"treadle.cli.commands.{module}").command
            prefix = f"TREADLE_{module.upper()}_"
            if _HELP & set(rest) or any(variable.startswith(prefix) for variable in os.environ):
                from treadle.cli.environment import name_variables

                name_variables(command, name)
            ctx.meta[_ASKED] = name, command, [*rest]  # click takes its arguments away
        return name, command, rest

    def make_context(self, *args: Any, **settings: Any) -> click.Context:
        """Parse the command line, whose arguments are those of click's ``Command.make_context``;
        --help and --version are printed here.
        """
        with outcomes():
            return super().make_context(*args, **settings)

    def invoke(self, ctx: click.Context) -> Any:
        """Run the called command and return its result. A usage error gets that command's context
        and, if an environment variable set the wrong value, the variable's name.
        """
        with outcomes():
            try:
                result = super().invoke(ctx)
            except click.UsageError as error:
                asked = _asked(ctx)
                error.ctx = error.ctx or asked
                said = advised(error, ctx) or with_range(error) or error
                if "treadle.cli.environment" not in sys.modules:
                    raise said from None
                raise sys.modules["treadle.cli.environment"].named_in_error(said, asked) from None
            sys.stdout.flush()
            return result


def _asked(ctx: click.Context) -> click.Context:
    """Return the context of the called command, for an error that has none: click sets none if an
    option lacks its value.
    """
    name, command, rest = ctx.meta.get(_ASKED, ("", None, []))
    while command is not None:
        ctx = click.Context(command, parent=ctx, info_name=name)
        name, rest = (rest[0], rest[1:]) if rest else ("", [])
        command = command.get_command(ctx, name) if isinstance(command, click.Group) else None
    return ctx


@contextmanager
def outcomes() -> Iterator[None]:
    """Turn Ctrl-C in the block into exit code 130, a closed pipe into 141, and a closed standard
    output into an error: click's own codes differ.
    """
    try:
        yield
    except KeyboardInterrupt:
        if sys.stderr.isatty():  # the terminal has printed ^C within a line
            print(file=sys.stderr)
        raise click.exceptions.Exit(INTERRUPTED) from None
    except OSError as error:
        if error.errno == errno.EBADF and error.filename is None:
            discard_stdout()
            raise click.ClickException("standard output is closed") from error
        if error.errno != errno.EPIPE:
            raise
        discard_stdout()
        raise click.exceptions.Exit(READER_GONE) from None


def advised(error: click.UsageError, ctx: click.Context) -> click.UsageError | None:
    """Return a usage error that says what to use in place of another program's option; None if
    ``error`` is about none. ``ctx``: the group's context.
    """
    if not isinstance(error, click.NoSuchOption | click.BadParameter):
        return None
    from treadle.cli.foreign_options import advice

    _, _, rest = ctx.meta.get(_ASKED, ("", None, []))
    own = error.ctx.command.get_params(error.ctx) if error.ctx else []
    said = advice(rest, {name for param in own for name in (*param.opts, *param.secondary_opts)})
    return None if said is None else click.UsageError(said, error.ctx)


def with_range(error: click.UsageError) -> click.BadParameter | None:
    """Return an error with the option's range for one about a text that is no number, which lacks
    it in click's words; None for other errors.
    """
    if not isinstance(error, click.BadParameter) or error.param is None:
        return None
    kind = error.param.type
    found, is_no_number, _ = error.message.partition(" is not a valid ")
    if not isinstance(kind, click.IntRange | click.FloatRange) or not is_no_number:
        return None
    what = "whole number" if isinstance(kind, click.IntRange) else "number"
    least = "" if kind.min is None else f" {'more than' if kind.min_open else 'from'} {kind.min}"
    most = "" if kind.max is None else f"{' to' if least else ' up to'} {kind.max}"
    text = f"{found}: expected a {what}{least}{most}"
    return click.BadParameter(text, error.ctx, error.param, error.param_hint)


def unknown_command(name: str) -> str:
    """Return the error message for an unknown command ``name``, with a suggestion."""
    from difflib import get_close_matches

    from treadle.cli.foreign_options import COMMANDS as OF_OTHERS

    if name.endswith(".gguf") or name.startswith("hf:") or os.path.isfile(name):
        return f"'{name}' is a model, not a command: try 'treadle run {name} PROMPT'"
    if own := OF_OTHERS.get(name):
        said = f"did you mean '{own}'?" if own in COMMANDS else own
        return f"no such command '{name}'; {said}"
    if os.path.isdir(name):
        return f"'{name}' is a folder, not a command: try 'treadle run {name} PROMPT'"
    # Never suggest ``rm``, which removes models.
    near = get_close_matches(name, [known for known in COMMANDS if known != "rm"])
    if near:
        return f"no such command '{name}'; did you mean '{near[0]}'?"
    return f"no such command '{name}'; commands: {', '.join(COMMANDS)}"


def discard_stdout() -> None:
    """Redirect standard output to the null device, so that the interpreter's last flush cannot
    fail.
    """
    with open(os.devnull, "w") as nothing:
        try:
            os.dup2(nothing.fileno(), sys.stdout.fileno())
        except (io.UnsupportedOperation, ValueError):  # a captured stream has no descriptor
            sys.stdout = io.StringIO()


def show_version(ctx: click.Context, param: click.Parameter, value: bool) -> None:
    """Print the version and stop if ``value``: callback of ``--version``."""
    if value and not ctx.resilient_parsing:
        click.echo(f"treadle {treadle.__version__}")
        ctx.exit()


@click.command(
    cls=Commands,
    commands=[click.Command(name, short_help=text) for name, text in COMMANDS.items()],
    context_settings={"help_option_names": ["-h", "--help"], "max_content_width": 100},
)
@click.option(
    "--version",
    is_flag=True,
    is_eager=True,
    expose_value=False,
    callback=show_version,
    help="Print the version.",
)
def app() -> None:
    """Run large language models on the machine you have.

    A MODEL is a GGUF file, a Hugging Face folder, hf:OWNER/REPO, which is downloaded once, or the
    short name of a downloaded model, as `treadle list` shows it.
    """


def invoke(argv: Sequence[str] | None) -> int:
    """Run the command line, and return its exit code. Results go to standard output; errors and
    warnings to standard error.
    """
    if isinstance(sys.stdout, io.TextIOWrapper) and sys.stdout.encoding.lower() != "utf-8":
        sys.stdout.reconfigure(errors="replace")
    args = None if argv is None else list(argv)
    told = set[str]()

    def tell(message: str) -> None:
        """Write a warning; repeated ones are written once."""
        if message not in told:
            told.add(message)
            fail(message, kind="warning")

    try:
        with warnings_to(tell):
            result = app.main(args=args, prog_name="treadle", standalone_mode=False)
        return result if isinstance(result, int) else DONE
    except (click.Abort, KeyboardInterrupt):
        return INTERRUPTED
    except click.exceptions.NoArgsIsHelpError as error:
        return complain(error.format_message(), USAGE)
    except click.UsageError as error:
        command = error.ctx.command_path if error.ctx else "treadle"
        message = printable(error.format_message().rstrip("."), keep=TAB)
        return complain(f"treadle: error: {message}\nSee '{command} --help'.", USAGE)
    except click.ClickException as error:
        return fail(error.format_message(), error.exit_code)
    except (TreadleError, OSError) as error:
        from treadle.cli.ui.table import typed

        return fail(typed(error))
    except MemoryError:
        return fail("out of memory")
    except ImportError as error:
        if not (error.path or "").endswith((".so", ".pyd")):
            raise
        return fail(f"{error} (too little memory, or an incomplete file)")  # under ulimit -v, say


def fail(message: str, code: int = FAILED, kind: str = "error") -> int:
    """Write ``message``, an error or a warning (``kind``), to standard error, and return the exit
    code ``code``. It is one line, even if a file name in it has line breaks.
    """
    return complain(f"treadle: {kind}: {printable(message, keep=TAB)}", code)


def complain(message: str, code: int) -> int:
    """Write ``message`` to standard error and return the exit code ``code``."""
    try:
        print(printable(message, keep="\n\t"), file=sys.stderr, flush=True)
    except OSError:  # standard error is closed; only the exit code is left
        sys.stderr = io.StringIO()
    return code
