"""Environment variables of options: ``TREADLE_SERVE_PORT`` sets ``--port`` of ``treadle serve``.

Imported only if such a variable is set, or if help is requested.
"""

from __future__ import annotations

import os
from collections.abc import Iterator
from difflib import get_close_matches

import click

from treadle.base.caller_warnings import warn

PREFIX = "TREADLE_"
WITH_ARGUMENTS = {"serve": "MODEL"}  # commands whose argument has a variable, too: for containers


def name_variables(command: click.Command, name: str) -> None:
    """Let click read each option of the command ``name``, or of a group's commands, from
    environment variables too; the command line wins, and variables that an option has already still
    work. Warns of variables with the command's prefix that belong to no option.
    """
    known: list[str] = []
    for words, each in commands_of(command, name):
        prefix = prefix_of(words)
        for param in each.params:
            if variables := variables_of(param, prefix, WITH_ARGUMENTS.get(words)):
                own = [param.envvar] if isinstance(param.envvar, str) else list(param.envvar or ())
                param.envvar = list(dict.fromkeys([*variables, *own]))  # it may run twice
                known += variables
        each.epilog = epilog(each, prefix)
    for variable in os.environ:
        if variable.startswith(prefix_of(name)) and variable not in known:
            near = get_close_matches(variable, known, n=1, cutoff=0.8)
            hint = f"; did you mean {near[0]}?" if near else ""
            warn(f"the variable {variable} belongs to no option of treadle {name}{hint}")


def commands_of(command: click.Command, name: str) -> Iterator[tuple[str, click.Command]]:
    """Yield each command with the words that call it, such as "cluster serve": the command itself,
    or those of a group. ``name``: the words of ``command``.
    """
    if not isinstance(command, click.Group):
        yield name, command
        return
    for inner in command.commands.values():
        yield from commands_of(inner, f"{name} {inner.name}")


def prefix_of(words: str) -> str:
    """Return the prefix of a command's variables: ``TREADLE_CLUSTER_SERVE_`` of "cluster serve"."""
    return f"{PREFIX}{words.upper().translate({32: '_', 45: '_'})}_"


def variables_of(param: click.Parameter, prefix: str, argument: str | None = None) -> list[str]:
    """Return the variables of a parameter, one for each long spelling of an option: ``prefix`` and
    the spelling. ``argument``: the word that ends the variable of the command's argument; None: it
    has none.
    """
    if isinstance(param, click.Argument):
        return [prefix + argument] if argument else []
    if not isinstance(param, click.Option) or param.hidden or param.is_eager:
        return []
    long = [each.removeprefix("--") for each in param.opts if each.startswith("--")]
    return [prefix + each.upper().replace("-", "_") for each in long]


def epilog(command: click.Command, prefix: str) -> str | None:
    """Return the last lines of a command's help, which explain variables with one of its options as
    the example; None if no option has a variable. ``prefix``: as ``prefix_of`` returns it.
    """
    for param in command.params:
        for variable in variables_of(param, prefix):
            option = f"--{variable.removeprefix(prefix).lower().replace('_', '-')}"
            return f"Every option can be set by a variable: {option} by {variable}."
    return None


def named_in_error(error: click.UsageError, ctx: click.Context) -> click.UsageError:
    """Return a usage error that names the environment variable which set the wrong value. An error
    about no single option gets a list of all variables that were read.
    """
    param = error.param if isinstance(error, click.BadParameter) else None
    if param is not None:
        given = error.ctx or ctx
        source = given.get_parameter_source(str(param.name))
        if source is click.core.ParameterSource.ENVIRONMENT and (names := variables_set(param)):
            assert isinstance(error, click.BadParameter)
            error.param_hint = f"the variable {names[0]}"
        return error
    used = [name for each in ctx.command.params for name in variables_set(each)]
    if not used or isinstance(error, click.NoSuchOption):
        return error
    shown = f"{error.format_message().rstrip('.')} (variables that are set: {', '.join(used)})"
    return click.UsageError(shown, error.ctx or ctx)


def variables_set(param: click.Parameter) -> list[str]:
    """Return the names of a parameter's variables that are set and not empty."""
    names = [param.envvar] if isinstance(param.envvar, str) else list(param.envvar or ())
    return [name for name in names if os.environ.get(name)]
