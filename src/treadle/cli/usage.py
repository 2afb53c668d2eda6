"""What is wrong usage, and the options that many commands have."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

import click


@contextmanager
def as_usage(*kinds: type[Exception]) -> Iterator[None]:
    """Errors of these kinds within are wrong usage."""
    try:
        yield
    except kinds as error:
        raise click.UsageError(str(error)) from error
