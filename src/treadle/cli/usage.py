"""Wrong usage: library errors as click's usage errors, and options that are refused."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager

import click


@contextmanager
def as_usage(*kinds: type[Exception]) -> Iterator[None]:
    """Turn errors of the classes ``kinds`` in the block into click.UsageError."""
    try:
        yield
    except kinds as error:
        raise click.UsageError(str(error)) from error


def refuse_options(ctx: click.Context, names: Sequence[str], why: str) -> None:
    """Raise click.UsageError with the reason ``why`` if one of the options ``names`` was typed."""
    from click.core import ParameterSource

    for param in ctx.command.params:
        given = ctx.get_parameter_source(str(param.name)) is ParameterSource.COMMANDLINE
        if param.name in names and given:
            name = param.opts[-1] if isinstance(param, click.Option) else str(param.name).upper()
            raise click.UsageError(f"{name} {why}")
