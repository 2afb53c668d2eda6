"""Options of answers: their defaults (chat template, its variables, reasoning, sampling, seed), and
those of one answer, which ``run`` and ``chat`` share.
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import field, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeVar

import click

from treadle.base.fast_classes import dataclass
from treadle.cli.load import read_text
from treadle.cli.options import (
    SAMPLING_OPTIONS,
    AnswerOption,
    as_usage,
    build_sampling,
    option,
    packed,
    token_limit,
)
from treadle.errors import GrammarError, TreadleError
from treadle.sampling.settings import Sampling

if TYPE_CHECKING:
    from treadle.api.model import Model


REASONING = ("auto", "on", "off")  # the same as in template.variables; a test compares


def json_object(text: str) -> dict[str, Any]:
    """Parse a JSON object. Raises click.BadParameter for anything else."""
    try:
        value = json.loads(text)
    except ValueError as error:
        raise click.BadParameter(f"{text!r:.80} is not JSON: {error}") from None
    except RecursionError:
        raise click.BadParameter("JSON is nested too deeply") from None
    if not isinstance(value, dict):
        raise click.BadParameter(
            f"{text!r:.80} is not a JSON object: expected variables by name, such as "
            '{"enable_thinking": false}'
        )
    return value


CHAT_TEMPLATE = click.option(
    "--chat-template",
    "--chat-template-file",
    metavar="FILE|NAME",
    help="A file with a chat template (jinja2), the name of a built-in one, or of another one in "
    "the model's file (tool_use), to replace the model's own.",
)
_TEMPLATE = (
    CHAT_TEMPLATE,
    click.option(
        "--chat-template-kwargs",
        metavar="JSON",
        type=json_object,
        help="Variables of the chat template, such as '{\"enable_thinking\": false}'.",
    ),
    click.option(
        "--reasoning",
        type=click.Choice(REASONING),
        help="Whether the model reasons before it answers; auto, the default, leaves it to the "
        "template.",
    ),
    click.option(
        "--reasoning-budget",
        type=click.IntRange(-1),
        metavar="N",
        help="Most tokens of reasoning in an answer: 0 for none, -1, the default, for no limit.",
    ),
    click.option(
        "--reasoning-budget-message",
        metavar="TEXT",
        help="Written into the model's reasoning where the budget ends it.",
    ),
    click.option(
        "--reasoning-preserve/--no-reasoning-preserve",
        default=None,
        help="Keep the reasoning of earlier answers in the prompt, if the chat template has a "
        "variable for it; by default the template decides.",
    ),
    click.option(  # llama.cpp needs it to render templates
        "--jinja", is_flag=True, hidden=True, expose_value=False
    ),
    click.option(
        "--strict",
        is_flag=True,
        default=None,
        help="Refuse pictures and sounds that the model cannot read. By default a sentence says "
        "that they were left out, and the conversation goes on.",
    ),
)
_OF_REASONING = (
    "reasoning",
    "reasoning_budget",
    "reasoning_budget_message",
    "reasoning_preserve",
)
_NAMES = ("chat_template", "chat_template_kwargs", *_OF_REASONING, "strict")
MAX_TOKENS = click.option(
    "-n",
    "--max-tokens",
    type=click.IntRange(1),
    metavar="N",
    help="Token limit of answers whose request has none; by default the end of the context.",
)


def build_defaults(values: Mapping[str, Any]) -> dict[str, Any]:
    """Return keyword arguments of ``treadle.load`` for the options that were given. Raises
    click.UsageError for invalid ones, before a model is loaded.
    """
    from treadle.api.options import read_defaults

    given = {name: values[name] for name in _NAMES if values.get(name) is not None}
    asked = {knob.name: values[knob.name] for knob in SAMPLING_OPTIONS if knob.name in values}
    named = [name for name, value in asked.items() if value not in (None, ())]
    if named:
        made = build_sampling(asked)
        given["sampling"] = {name: getattr(made, name) for name in named}
    with as_usage(TreadleError):
        read_defaults(**given)
    return given


def option_names(defaults: Mapping[str, Any]) -> str:
    """Return the option spellings of the settings in ``defaults``:
    ``--chat-template, --reasoning``.
    """
    return ", ".join(f"--{name.replace('_', '-')}" for name in defaults)


def for_other_machines(defaults: dict[str, Any]) -> dict[str, Any]:
    """Return ``defaults`` with the chat template's text in place of its file, which other machines
    may lack.
    """
    if "chat_template" not in defaults:
        return defaults
    from treadle.chat.template.override import choose_template

    chosen = choose_template(defaults["chat_template"])
    return {**defaults, "chat_template": chosen.builtin or chosen.named or chosen.source}


# Decorators that add the options and pass the settings of ``load`` as ``defaults``.
template_options = packed("defaults", _NAMES, _TEMPLATE, build_defaults)
default_options = packed(
    "defaults",
    (*_NAMES, *(knob.name for knob in SAMPLING_OPTIONS)),
    (*_TEMPLATE, *map(option, SAMPLING_OPTIONS)),
    build_defaults,
)


# -- of one answer --------------------------------------------------------------------------------

EXISTING = click.Path(exists=True, dir_okay=False, readable=False, path_type=Path)
FILES = ("grammar", "json_schema")
MAX_BYTES = 16 << 20  # of one file: as many as a server accepts in a body
Options = TypeVar("Options", bound="GenerationOptions")


@dataclass(frozen=True)
class ConstraintFile:
    """A file's text, and the setting of ``Model.generate`` that takes it."""

    setting: str  # "grammar" or "json_schema"
    file: Path
    text: str


@dataclass(frozen=True)
class GenerationOptions:
    """Settings of one answer, from the command line."""

    sampling: Sampling = field(default_factory=Sampling)
    given: tuple[str, ...] = ()  # fields set by options; the others are the model file's
    usual: Sampling = field(default_factory=Sampling)  # the model file's sampling
    max_tokens: int | None = None  # None: no limit but the context
    stop: tuple[str, ...] = ()  # strings that end the answer
    constraint: ConstraintFile | None = None

    def with_model_defaults(self: Options, model: Model) -> Options:
        """Return a copy whose sampling is the one that the model file recommends, except for fields
        that options set.
        """
        usual = model.sampling
        given = {name: getattr(self.sampling, name) for name in self.given}
        return replace(self, sampling=replace(usual, **given), usual=usual)

    def settings(self) -> dict[str, Any]:
        """Return keyword arguments of ``Model.generate``."""
        rule = self.constraint
        return {
            "sampling": self.sampling,
            "max_tokens": self.max_tokens,
            "stop": self.stop,
            **dict.fromkeys(FILES),
            **({rule.setting: rule.text} if rule else {}),
        }

    @contextmanager
    def naming_file(self) -> Iterator[None]:
        """Prefix errors about a grammar or a schema with the name of its file."""
        try:
            yield
        except GrammarError as error:
            where = f"{self.constraint.file}: " if self.constraint else ""
            raise GrammarError(f"{where}{error}") from error


def read_constraint(files: Mapping[str, Path | None]) -> ConstraintFile | None:
    """Read the grammar or schema file of ``files`` (setting to path), if one is given. Raises
    click.UsageError if both are, OSError or FileError for a file that cannot be read.
    """
    given = [(setting, file) for setting in FILES if (file := files.get(setting)) is not None]
    if len(given) > 1:
        raise click.UsageError("--grammar and --json-schema exclude each other")
    return next(
        (ConstraintFile(name, file, read_text(str(file), MAX_BYTES)) for name, file in given), None
    )


def build_options(values: dict[str, Any]) -> GenerationOptions:
    """Build the generation options from the command line's values."""
    constraint = read_constraint(values)
    asked = {each.name: values[each.name] for each in SAMPLING_OPTIONS}
    given = tuple(name for name, value in asked.items() if value not in (None, ()))
    return GenerationOptions(
        build_sampling(asked),
        given,
        max_tokens=values["max_tokens"],
        stop=values["stop"],
        constraint=constraint,
    )


# Options of an answer's end and format; all others are SAMPLING_OPTIONS.
ANSWER_OPTIONS = (
    AnswerOption(
        "max_tokens",
        "-n --max-tokens",
        "Token limit of the answer; -1, the default, for no limit.",
        token_limit,
        metavar="N",
    ),
    AnswerOption(
        "stop", "--stop", "End before TEXT; may be repeated.", str, multiple=True, otherwise=()
    ),
    AnswerOption("grammar", "--grammar", "Generate only what this grammar allows.", EXISTING),
    AnswerOption(
        "json_schema", "--json-schema", "Generate JSON that matches this schema.", EXISTING
    ),
)
_OPTIONS = (*ANSWER_OPTIONS, *SAMPLING_OPTIONS)
# A decorator that adds the options and passes them as ``options``.
generation_options = packed(
    "options", [each.name for each in _OPTIONS], [option(each) for each in _OPTIONS], build_options
)
