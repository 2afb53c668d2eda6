"""What ``/set`` shows and changes while a chat lasts: sampling, and how answers end and look."""

from __future__ import annotations

import dataclasses
import shlex
from dataclasses import dataclass
from difflib import get_close_matches
from typing import Any

import click

from treadle.cli.generation_options import EXISTING, FILES, GenerationOptions, read_constraint
from treadle.cli.options import KNOBS, build_sampling, token_limit
from treadle.errors import SamplingError

WHEN_FULL = ("refuse", "drop")
SWITCH = {"on": True, "yes": True, "true": True, "off": False, "no": False, "false": False}


@dataclass(frozen=True)
class Setting:
    """One of them: how its value is typed, what it is by default."""

    name: str
    kind: Any  # click's type of one value
    default: Any
    multiple: bool = False
    names: tuple[str, ...] = ()  # others that it answers to

    def parse(self, text: str) -> Any:
        """The value that was typed. Raises click.UsageError, ValueError."""
        if self.is_default(text):
            return self.default
        if self.kind is bool:
            if text.lower() not in SWITCH:
                raise ValueError(f"'{text}' is neither on nor off")
            return SWITCH[text.lower()]
        kind = click.types.convert_type(self.kind)
        if self.multiple:
            words = (word.replace("\\n", "\n").replace("\\t", "\t") for word in shlex.split(text))
            return tuple(kind.convert(word, None, None) for word in words)
        return kind.convert(text, None, None)

    def is_default(self, text: str) -> bool:
        """Whether what was typed stands for the default: "none" does where nothing is that."""
        return text.lower() == "default" or (text.lower() == "none" and not self.default)

    def written(self, value: Any) -> str:
        """A value as it may be typed."""
        if value is None or value in ((), {}):
            return "none"
        if isinstance(value, bool):
            return "on" if value else "off"
        if isinstance(value, dict):
            return " ".join(f"{token}{bias:+g}" for token, bias in value.items())
        if isinstance(value, tuple) and self.multiple:
            return " ".join(map(quoted, value))
        if isinstance(value, tuple):
            return "; ".join(value)
        return f"{value:g}" if isinstance(value, float) else str(value)


@dataclass(frozen=True)
class Settings(GenerationOptions):
    """How the next answer is made and shown; one that differs is made by ``changed``."""

    when_full: str = WHEN_FULL[0]
    markdown: bool = False

    def value(self, name: str) -> Any:
        """What is set; of a grammar or a schema its file."""
        if name in FILES:
            mine = self.constraint is not None and self.constraint.setting == name
            return self.constraint.file if self.constraint and mine else None
        return getattr(self if name in OWN else self.sampling, name)

    def changed(self, name: str, text: str) -> Settings:
        """With another value, as it was typed.

        Raises SamplingError for a name that is none and a value out of range, click.UsageError and
        ValueError for one that cannot be read, OSError and FileError for a file.
        """
        setting = find(name)
        value = setting.parse(text)
        if setting.name in FILES:
            return dataclasses.replace(self, constraint=read_constraint({setting.name: value}))
        if setting.name in OWN:
            return dataclasses.replace(self, **{setting.name: value})
        if not setting.is_default(text):
            value = getattr(build_sampling({setting.name: value}), setting.name)
        return dataclasses.replace(
            self, sampling=dataclasses.replace(self.sampling, **{setting.name: value})
        )

    def line(self, setting: Setting) -> str:
        """Name and value; what differs from the default is marked, and says that."""
        value = self.value(setting.name)
        shown = f"{setting.name:<22}{setting.written(value)}"
        if value == setting.default:
            return f"  {shown}"
        return f"* {shown}  (default {setting.written(setting.default)})"

    def table(self) -> str:
        """All of them."""
        return "\n".join(map(self.line, SETTINGS.values()))


def quoted(text: str) -> str:
    """One of several texts."""
    if not text.isprintable() or text in ("none", "default"):
        return repr(text)
    return shlex.quote(text)


def plain(name: str) -> str:
    """A name that may be written as an option."""
    return name.lstrip("-").lower().replace("-", "_")


def find(name: str) -> Setting:
    """The setting that a name or an option stands for. Raises SamplingError."""
    known = {each: s for s in SETTINGS.values() for each in (s.name, *s.names)}
    if plain(name) in known:
        return known[plain(name)]
    near = get_close_matches(plain(name), known, n=1, cutoff=0.7)
    hint = f"did you mean {near[0]}?" if near else "/set lists what there is"
    raise SamplingError(f"no setting is called '{name}'; {hint}")


def _of_sampling() -> list[Setting]:
    names = ([plain(flag) for flag in knob.flags.split()] for knob in KNOBS)
    return [
        Setting(knob.field, knob.kind, knob.default, knob.multiple, tuple(flags))
        for knob, flags in zip(KNOBS, names, strict=True)
    ]


_OF_CHAT = [
    Setting("max_tokens", token_limit, None, names=("n",)),
    Setting("stop", str, (), multiple=True),
    *(Setting(name, EXISTING, None) for name in FILES),
    Setting("when_full", click.Choice(WHEN_FULL), WHEN_FULL[0]),
    Setting("markdown", bool, False),
]
SETTINGS = {setting.name: setting for setting in [*_of_sampling(), *_OF_CHAT]}
OWN = {each.name for each in dataclasses.fields(Settings)}
