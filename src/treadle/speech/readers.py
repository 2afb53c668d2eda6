"""Arguments of a call, as families write them, to JSON: piece by piece."""

from __future__ import annotations

import json
import re
from collections.abc import Iterable, Mapping
from typing import Any, ClassVar

from treadle.answer import overlap
from treadle.speech.arguments import value_of
from treadle.speech.rows import QUOTE, Row, Tags
from treadle.speech.schemas import by_name, choices, texts_of, with_colons


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
    """Arguments between ``tags``. The schema says which values are texts; others are JSON, or as
    Python writes them, or texts where they are neither.
    """

    _NULLS = ("null", "None")  # as templates print it, too

    def __init__(self, schema: Mapping[str, Any], tags: Tags) -> None:
        self._schemas, self._tags = by_name(schema), tags
        then = r"\s*".join(map(re.escape, tags.then.split("\n")))
        self._open = re.compile(f"{re.escape(tags.open)}(.*?){then}", re.DOTALL)
        self._n = 0
        self._key: str | None = None  # of the value that is being read
        self._text = self._begun = False  # it is a text; its beginning was read
        self._gap = self._close = ""  # behind it
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
        open, end = self._tags.open, self._tags.end
        if found := self._open.match(text):
            key = found[1].strip()
            self._key, self._begun = key, False
            texts = texts_of(self._schemas.get(key))
            self._text, self._nulls = texts is not None, []
            if texts is not None and texts.null:
                words = [word for each in texts.schemas for word in choices(each)]
                self._nulls = [word for word in self._NULLS if word not in words]
            self._n += 1
            opening = "{" if self._n == 1 else ", "
            quote = '"' if self._text and not self._nulls else ""
            return f"{opening}{json.dumps(key, ensure_ascii=False)}: {quote}", text[found.end() :]
        wanted = text.startswith(open) or open.startswith(text)
        if not last and (wanted or (end.startswith(text) and text != end)):
            return "", text
        self.done = True
        return "}" if self._n else "{}", text.removeprefix(end)

    def _value(self, text: str, last: bool) -> tuple[str, str]:
        if not self._begun:
            quote = self._tags.quotes[0]
            if not last and (not text or (quote.startswith(text) and text != quote)):
                return "", text
            self._begun, quoted = True, bool(quote) and text.startswith(quote)
            text = text.removeprefix(quote if quoted else self._tags.gap)
            self._gap = "" if quoted else self._tags.gap
            self._close = f"{self._tags.quotes[1] if quoted else ''}{self._tags.close}"
        gap, close = self._gap, self._close
        value, found, rest = text.partition(close)
        if not found and not last:
            keep = max(overlap(text, f"{gap}{close}"), overlap(text, close))
            keep = max(keep, len(gap) if text.endswith(gap) else 0)
            said = text[: len(text) - keep]
            if not self._text or not said or any(word.startswith(said) for word in self._nulls):
                return "", text
            return self._quoted(said), text[len(said) :]
        self._key, value = None, value.removesuffix(gap)
        if value in self._nulls:
            return "null", rest
        if self._text:
            return self._quoted(value) + '"', rest
        return json.dumps(value_of(value), ensure_ascii=False), rest

    def _quoted(self, said: str) -> str:
        """A part of a text, its quote before it where that is not told yet."""
        quote, self._nulls = '"' if self._nulls else "", []
        return quote + _escaped(said)


class PythonReader(Reader):
    """Arguments by name, as Python calls a function, up to the bracket that closes the call."""

    _ESCAPES: ClassVar = {"n": "\n", "t": "\t", "r": "\r", "b": "\b", "f": "\f", "\n": ""}
    _DIGITS: ClassVar = {"x": 2, "u": 4}

    def __init__(self) -> None:
        self._state, self._part = "key", ""
        self._depth, self._quote, self._escape = 0, "", ""
        self._n = 0

    def take(self, text: str, last: bool) -> tuple[str, str]:
        """See Reader."""
        out = []
        for at, char in enumerate(text):
            out.append(getattr(self, f"_in_{self._state}")(char))
            if self.done:
                out.append("}" if self._n else "{}")
                return "".join(out), text[at + 1 :]
        return "".join(out), ""

    def _in_key(self, char: str) -> str:
        if char != "=":
            self._part += char
            return self._in_gap(char)
        key, self._part, self._state = self._part.strip(), "", "start"
        self._n += 1
        return f"{'{' if self._n == 1 else ', '}{json.dumps(key, ensure_ascii=False)}: "

    def _in_start(self, char: str) -> str:
        if char.isspace():
            return ""
        if char in "\"'":
            self._quote, self._state = char, "text"
            return '"'
        self._state = "value"
        return self._in_value(char)

    def _in_text(self, char: str) -> str:
        if self._escape:
            return self._escaped(char)
        if char == "\\":
            self._escape = char
            return ""
        if char == self._quote:
            self._quote, self._state = "", "gap"
            return '"'
        return _escaped(char)

    def _escaped(self, char: str) -> str:
        """Within what a backslash begins."""
        self._escape += char
        kind, digits = self._escape[1], self._escape[2:]
        if len(digits) < self._DIGITS.get(kind, 0):
            return ""
        self._escape = ""
        if kind in self._DIGITS:  # halves of a pair stay as they are
            return f"\\u{digits:0>4}"
        return _escaped(self._ESCAPES.get(kind, kind))

    def _in_value(self, char: str) -> str:
        if self._escape:
            self._escape = ""
        elif self._quote:
            self._escape = char if char == "\\" else ""
            self._quote = "" if char == self._quote else self._quote
        elif char in "\"'":
            self._quote = char
        elif char in "([{":
            self._depth += 1
        elif not self._depth and char in ",)":
            made = json.dumps(value_of(self._part.strip()), ensure_ascii=False)
            return made + self._in_gap(char)
        elif char in ")]}":
            self._depth -= 1
        self._part += char
        return ""

    def _in_gap(self, char: str) -> str:
        """Up to the next argument, or the end."""
        if char in ",)":
            self._state, self._part, self.done = "key", "", char == ")"
        return ""


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


def reader_of(row: Row, schema: Mapping[str, Any]) -> Reader:
    """What reads the arguments of a call, as a row writes them."""
    if row.tags is not None:
        return TagReader(schema, row.tags)
    if row.style == "own":
        return OwnReader(with_colons(schema))
    return PythonReader() if row.style == "python" else JsonReader()


def _escaped(text: str) -> str:
    """A part of a text, as it stands between the quotes of JSON."""
    return json.dumps(text, ensure_ascii=False)[1:-1]
