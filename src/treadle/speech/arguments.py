"""Arguments of a call, as they are written, to JSON: piece by piece."""

from __future__ import annotations

import json
import re
from collections.abc import Iterable, Mapping
from typing import Any, ClassVar

from treadle.answer import overlap
from treadle.speech.rows import QUOTE
from treadle.speech.schemas import by_name, choices, texts_of

NAMES, ARGUMENTS = ("name", "tool_name"), ("arguments", "parameters")  # keys of a call's object


class Reader:
    """Reads the arguments of one call. ``done`` once they are whole."""

    done = False

    def take(self, text: str, last: bool) -> tuple[str, str]:
        """The JSON of what is certain now, and what of ``text`` is still to be read."""
        raise NotImplementedError


class JsonReader(Reader):
    """An object of JSON, passed on as it is. It ends where its first bracket is closed, or
    ``depth`` brackets that were read before.
    """

    def __init__(self, depth: int = 0) -> None:
        self._depth, self._quoted, self._escaped = depth, False, False

    def take(self, text: str, last: bool) -> tuple[str, str]:
        """See Reader."""
        for at, char in enumerate(text):
            if self._escaped:
                self._escaped = False
            elif self._quoted:
                self._quoted, self._escaped = char != '"', char == "\\"
            elif char == '"':
                self._quoted = True
            elif char in "{[":
                self._depth += 1
            elif char in "}]":
                self._depth -= 1
                if self._depth <= 0:
                    self.done = True
                    return text[: at + 1], text[at + 1 :]
        return text, ""


class TagReader(Reader):
    """``<parameter=KEY>``, a line break, VALUE, a line break, ``</parameter>``, up to
    ``</function>``. The schema says which values are texts; others are JSON, or texts where they
    are none.
    """

    _OPEN, _CLOSE, _END = "<parameter=", "</parameter>", "</function>"
    _NULLS = ("null", "None")  # as templates print it, too

    def __init__(self, schema: Mapping[str, Any]) -> None:
        self._schemas = by_name(schema)
        self._n = 0
        self._key: str | None = None  # of the value that is being read
        self._text = self._begun = False  # it is a text; its beginning was read
        self._nulls: list[str] = []  # that a text may turn out to be, whose quote is not told yet

    def take(self, text: str, last: bool) -> tuple[str, str]:
        """See Reader."""
        out = ""
        while not self.done:
            read = self._between if self._key is None else self._value
            made, rest = read(text, last)
            out += made
            if rest == text and not made and not self.done:
                break
            text = rest
        return out, text

    def _between(self, text: str, last: bool) -> tuple[str, str]:
        text = text.lstrip()
        if text.startswith(self._OPEN) and ">" in text:
            key, _, rest = text[len(self._OPEN) :].partition(">")
            self._key, self._begun = key, False
            texts = texts_of(self._schemas.get(key))
            self._text, self._nulls = texts is not None, []
            if texts is not None and texts.null:
                words = [word for each in texts.schemas for word in choices(each)]
                self._nulls = [word for word in self._NULLS if word not in words]
            self._n += 1
            opening = "{" if self._n == 1 else ", "
            quote = '"' if self._text and not self._nulls else ""
            return f"{opening}{json.dumps(key, ensure_ascii=False)}: {quote}", rest
        wanted = text.startswith(self._OPEN) or self._OPEN.startswith(text)
        if not last and (wanted or self._END.startswith(text)):
            return "", text
        self.done = True
        return "}" if self._n else "{}", text.removeprefix(self._END)

    def _value(self, text: str, last: bool) -> tuple[str, str]:
        if not self._begun:
            if not text and not last:
                return "", text
            self._begun, text = True, text.removeprefix("\n")
        value, found, rest = text.partition(self._CLOSE)
        if not found and not last:
            keep = max(overlap(text, f"\n{self._CLOSE}"), overlap(text, self._CLOSE))
            keep = max(keep, int(text.endswith("\n")))
            said = text[: len(text) - keep]
            if not self._text or not said or any(word.startswith(said) for word in self._nulls):
                return "", text
            return self._quoted(said), text[len(said) :]
        self._key, value = None, value.removesuffix("\n")
        if value in self._nulls:
            return "null", rest
        if self._text:
            return self._quoted(value) + '"', rest
        try:
            made = json.loads(value)
        except (ValueError, RecursionError):
            made = value
        return json.dumps(made, ensure_ascii=False), rest

    def _quoted(self, said: str) -> str:
        """A part of a text, its quote before it where that is not told yet."""
        quote, self._nulls = '"' if self._nulls else "", []
        return quote + _escaped(said)


class OwnReader(Reader):
    """Gemma 4's: names without quotes, texts between marks of their own. ``names``: those that have
    a colon, which ends the others.
    """

    _WORD = re.compile(r"[^\s,:{}\[\]<]+|<")
    _WORDS: ClassVar = {"None": "null", "True": "true", "False": "false"}  # as templates print them

    def __init__(self, names: Iterable[str] = ()) -> None:
        self._names = sorted(names, key=len, reverse=True)
        self._stack = ""
        self._quoted = self._key = False

    def take(self, text: str, last: bool) -> tuple[str, str]:
        """See Reader."""
        out, at = "", 0
        while at < len(text) and not self.done:
            made, size = self._next(text[at:], last) if not self._quoted else self._inside(text, at)
            if not size:
                break
            out, at = out + made, at + size
        return out, text[at:]

    def _inside(self, text: str, at: int) -> tuple[str, int]:
        end = text.find(QUOTE, at)
        if end >= 0:
            self._quoted = False
            return _escaped(text[at:end]) + '"', end + len(QUOTE) - at
        keep = overlap(text[at:], QUOTE)
        said = text[at : len(text) - keep]
        return _escaped(said), len(said)

    def _next(self, text: str, last: bool) -> tuple[str, int]:
        char = text[0]
        if text.startswith(QUOTE):
            self._quoted, self._key = True, False
            return '"', len(QUOTE)
        if QUOTE.startswith(text) and not last:
            return "", 0
        if self._key and char != "}":  # names have no quotes
            name, colon, _ = text.partition(":")
            known = (each for each in self._names if text.startswith(f"{each}:"))
            name = next(known, name)
            wanted = any(f"{each}:".startswith(text) for each in self._names)
            if (not colon or wanted) and not last:
                return "", 0
            self._key = False
            said = json.dumps(name.strip(), ensure_ascii=False)
            return (f"{said}: " if colon else said), len(name) + len(colon)
        if char in "{[":
            self._stack += char
            self._key = char == "{"
        elif char in "}]":
            self._stack = self._stack[:-1]
            self.done, self._key = not self._stack, False
        elif char in ",:":
            self._key = char == "," and self._stack.endswith("{")
            return f"{char} ", 1
        elif not char.isspace():
            found = self._WORD.match(text)
            word = found.group() if found else char
            if len(word) == len(text) and not last:
                return "", 0
            return self._WORDS.get(word, word), len(word)
        return char, 1


class CallObject:
    """The object of a call that comes in parts: where its name and its arguments are."""

    def __init__(self) -> None:
        self.name: str | None = None
        self.arguments_at: int | None = None  # the brace
        self.end: int | None = None
        self._at = self._depth = self._start = 0
        self._quoted = self._escaped = self._in_value = False
        self._key = ""

    def walk(self, text: str) -> None:
        """Look at what is new in ``text``, all of the object up to now."""
        for at in range(self._at, len(text)):
            char = text[at]
            if self._escaped:
                self._escaped = False
            elif self._quoted:
                self._quoted, self._escaped = char != '"', char == "\\"
                if not self._quoted and self._depth == 1 and not self._in_value:
                    self._key = text[self._start + 1 : at]
                elif not self._quoted and self._depth == 1:
                    self._value_ends(text[self._start : at + 1])
            elif char == '"':
                self._quoted = True
                if not self._in_value:
                    self._start = at
            elif char in "{[":
                self._depth += 1
                first = self.arguments_at is None and self._depth == 2
                if first and char == "{" and self._key in ARGUMENTS:
                    self.arguments_at = at
            elif char in "}]":
                self._depth -= 1
                if self._depth <= 0:
                    self._value_ends(text[self._start : at])
                    self.end = at + 1
                    return
            elif self._depth == 1 and char == ":":
                self._in_value, self._start = True, at + 1
            elif self._depth == 1 and char == ",":
                self._value_ends(text[self._start : at])
                self._in_value = False
        self._at = len(text)

    def _value_ends(self, value: str) -> None:
        if self._key in NAMES and self._in_value:
            try:
                name = json.loads(value)
            except ValueError:
                name = None
            self.name = name if isinstance(name, str) else ""


def read_call(written: str, tools: Iterable[str], at: int | None) -> tuple[str, str] | None:
    """The name and the arguments of a call, an object of JSON; None for what is none. ``at``: where
    they begin, to be passed on as they are written.
    """
    try:
        found = json.loads(written)
    except (ValueError, RecursionError):
        return None
    if not isinstance(found, dict):
        return None
    name = next((found[key] for key in NAMES if key in found), None)
    arguments: Any = next((found[key] for key in ARGUMENTS if key in found), {})
    if not isinstance(name, str) or name not in tools or not isinstance(arguments, dict):
        return None
    if at is not None:
        value, end = json.JSONDecoder().raw_decode(written, at)
        if value == arguments:
            return name, written[at:end]
    return name, json.dumps(arguments, ensure_ascii=False)


def arguments_of(written: str) -> dict[str, Any]:
    """The object of a call's arguments; of those that were cut, what of it is whole."""
    open, quoted, escaped = "", False, False
    end = 0, ""  # where the text may be cut, and what closes it there
    for at, char in enumerate(written):
        if escaped:
            escaped = False
        elif quoted:
            quoted, escaped = char != '"', char == "\\"
        elif char == '"':
            quoted = True
        elif char == ",":
            end = at, open
        elif char in "{[":
            open = ("}" if char == "{" else "]") + open
            end = at + 1, open
        elif char in "}]":
            open = open[1:]
            end = at + 1, open
    for at, closing in ((len(written), open), end):
        try:
            found = json.loads(written[:at] + closing)
        except (ValueError, RecursionError):
            continue
        return found if isinstance(found, dict) else {}
    return {}


def _escaped(text: str) -> str:
    """A part of a text, as it stands between the quotes of JSON."""
    return json.dumps(text, ensure_ascii=False)[1:-1]
