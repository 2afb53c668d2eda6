"""Options for defaults of answers: chat template, its variables, reasoning, sampling, seed."""

from __future__ import annotations

import json
from collections.abc import Mapping
from typing import Any

import click

from treadle.cli.options import SAMPLING_OPTIONS, build_sampling, option, packed
from treadle.cli.usage import as_usage
from treadle.errors import TreadleError

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
    from treadle.api.defaults import read_defaults

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
