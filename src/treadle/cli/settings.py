"""Settings that ``/set`` shows and changes in a chat: sampling, end and display of answers."""

from __future__ import annotations

import dataclasses
from difflib import get_close_matches
from typing import Any

import click

from treadle.base.fast_classes import dataclass
from treadle.cli.answer_options import (
    ANSWER_OPTIONS,
    FILES,
    REASONING,
    GenerationOptions,
    read_constraint,
)
from treadle.cli.options import SAMPLING_OPTIONS, AnswerOption, build_sampling, plain
from treadle.errors import SamplingError

WHEN_FULL = ("refuse", "drop")


@dataclass(frozen=True)
class AnswerSettings(GenerationOptions):
    """Settings of the next answer and its display; ``changed`` makes modified copies."""

    when_full: str = WHEN_FULL[0]  # what a full context means for the next message
    markdown: bool = False  # render Markdown
    reasoning: str = REASONING[0]  # the mode
    show_reasoning: bool = False  # in full; else folded to a line

    def of_chat(self) -> dict[str, Any]:
        """Return keyword arguments of ``Model.chat`` beyond those of ``generate``."""
        return {} if self.reasoning == REASONING[0] else {"reasoning": self.reasoning}

    def value(self, name: str) -> Any:
        """Return a setting's value; for a grammar or a schema the path of its file."""
        if name in FILES:
            mine = self.constraint is not None and self.constraint.setting == name
            return self.constraint.file if self.constraint and mine else None
        return getattr(self if name in OWN else self.sampling, name)

    def default(self, setting: AnswerOption) -> Any:
        """Return a setting's default; for sampling the one that the model file recommends."""
        return getattr(self.usual, setting.name, setting.otherwise)

    def changed(self, name: str, text: str) -> AnswerSettings:
        """Return a copy in which the setting ``name`` has the typed value ``text``.

        Raises SamplingError for an unknown name and a value out of range, click.UsageError and
        ValueError for one that cannot be parsed, OSError and FileError for a file.
        """
        setting = find(name)
        value = self.default(setting) if text.lower() == "default" else setting.parse(text)
        if setting.name in FILES:
            return dataclasses.replace(self, constraint=read_constraint({setting.name: value}))
        if setting.name in OWN:
            return dataclasses.replace(self, **{setting.name: value})
        if not setting.is_default(text):
            value = getattr(build_sampling({setting.name: value}), setting.name)
        return dataclasses.replace(
            self, sampling=dataclasses.replace(self.sampling, **{setting.name: value})
        )

    def line(self, setting: AnswerOption) -> str:
        """Format a setting's name and value; a changed one gets an asterisk and its default."""
        value = self.value(setting.name)
        shown = f"{setting.name:<22}{setting.written(value)}"
        if value == (default := self.default(setting)):
            return f"  {shown}"
        return f"* {shown}  (default {setting.written(default)})"

    def table(self) -> str:
        """Format all settings, one a line."""
        return "\n".join(map(self.line, SETTINGS.values()))


def find(name: str) -> AnswerOption:
    """Return the setting that a name or an option's spelling means. Raises SamplingError if there
    is none.
    """
    known = {each: s for s in SETTINGS.values() for each in s.names}
    if plain(name) in known:
        return known[plain(name)]
    near = get_close_matches(plain(name), known, n=1, cutoff=0.7)
    hint = f"did you mean {near[0]}?" if near else "/set lists the settings"
    raise SamplingError(f"unknown setting '{name}'; {hint}")


_OF_CHAT = (
    AnswerOption("when_full", "", "", click.Choice(WHEN_FULL), otherwise=WHEN_FULL[0]),
    AnswerOption("markdown", "", "", otherwise=False),
    AnswerOption("reasoning", "", "", click.Choice(REASONING), otherwise=REASONING[0]),
    AnswerOption("show_reasoning", "", "", otherwise=False),
)
SETTINGS = {each.name: each for each in (*SAMPLING_OPTIONS, *ANSWER_OPTIONS, *_OF_CHAT)}
OWN = {each.name for each in dataclasses.fields(AnswerSettings)}
