"""``--grammar FILE`` and ``--json-schema FILE``: what every answer of a command must obey."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import click

from treadle.cli.load import read_text
from treadle.cli.options import packed
from treadle.errors import GrammarError

EXISTING = click.Path(exists=True, dir_okay=False, readable=False, path_type=Path)

constraint_options = packed(
    "constraint",
    ["grammar", "json_schema"],
    [
        click.option(
            "--grammar", type=EXISTING, metavar="FILE", help="Write only what this grammar allows."
        ),
        click.option(
            "--json-schema", type=EXISTING, metavar="FILE", help="Write JSON of this schema."
        ),
    ],
)


@dataclass(frozen=True)
class Constraint:
    """The text of a file, by the name of the setting of ``Model.generate`` that takes it."""

    setting: str  # "grammar" or "json_schema"
    file: Path
    text: str


def read_constraint(files: dict[str, Path | None]) -> Constraint | None:
    """Read the one that was given; both are wrong usage. Raises OSError, FileError."""
    given = [(setting, file) for setting, file in files.items() if file is not None]
    if len(given) > 1:
        raise click.UsageError("--grammar and --json-schema exclude each other")
    return next((Constraint(name, file, read_text(str(file))) for name, file in given), None)


def constrained(constraint: Constraint | None) -> dict[str, Any]:
    """The settings of ``Model.generate`` for it."""
    given = {constraint.setting: constraint.text} if constraint else {}
    return {"grammar": None, "json_schema": None} | given


@contextmanager
def named(constraint: Constraint | None) -> Iterator[None]:
    """Say in an error about a grammar or a schema which file it is in."""
    try:
        yield
    except GrammarError as error:
        raise GrammarError(f"{constraint.file}: {error}" if constraint else str(error)) from error
