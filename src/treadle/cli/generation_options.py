"""Generation options that ``run`` and ``chat`` share."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import field, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeVar

import click

from treadle.base.fast_dataclass import dataclass
from treadle.cli.load import read_text
from treadle.cli.options import (
    SAMPLING_OPTIONS,
    AnswerOption,
    build_sampling,
    option,
    packed,
    token_limit,
)
from treadle.errors import GrammarError
from treadle.sampling.settings import Sampling

if TYPE_CHECKING:
    from treadle.api.model import Model

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
