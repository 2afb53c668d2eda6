"""Wrong usage: turns library errors into click's usage errors, and refuses options."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager

import click


@contextmanager
def as_usage(*kinds: type[Exception]) -> Iterator[None]:
    """Turn errors of these kinds in the block into click.UsageError."""
    try:
        yield
    except kinds as error:
        raise click.UsageError(str(error)) from error


def refuse_options(ctx: click.Context, names: Sequence[str], why: str) -> None:
    """Raise UsageError if one of these options was given."""
    from click.core import ParameterSource

    for param in ctx.command.params:
        given = ctx.get_parameter_source(str(param.name)) is ParameterSource.COMMANDLINE
        if param.name in names and given:
            name = param.opts[-1] if isinstance(param, click.Option) else str(param.name).upper()
            raise click.UsageError(f"{name} {why}")
