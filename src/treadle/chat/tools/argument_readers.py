"""Streaming readers that convert tool-call arguments of each notation to JSON."""

from __future__ import annotations

import json
import re
from collections.abc import Iterable, Mapping
from typing import Any, ClassVar

from treadle.base.text_overlap import overlap
from treadle.chat.tools.arguments import ValueEnd, constant_of, json_of, value_of
from treadle.chat.tools.formats import QUOTE, Tags, ToolCallFormat
from treadle.chat.tools.python_literals import Escape, dumped
from treadle.chat.tools.schema_check import fulfils
from treadle.chat.tools.schemas import (
    StringAlternatives,
    by_name,
    choices,
    odd_names,
    split_strings,
)
from treadle.grammar.llguidance_limits import ReferencedSchemas


class ArgumentReader:
    """Streaming reader of one call's arguments. ``done``: they are complete."""

    done = False

    def take(self, text: str, last: bool) -> tuple[str, str]:
        """Read more ``text``; return the JSON that is certain now, and the rest of ``text``, to be
        passed again with more. ``last``: no more text follows.
        """
        raise NotImplementedError


class JsonReader(ArgumentReader):
    """Reader of a JSON object, which is returned unchanged. It is done at the bracket that closes
    the object, or, with ``depth``, that many brackets opened before.
    """

    def __init__(self, depth: int = 0) -> None:
        self._depth = depth
        self._quoted = False
        self._escaped = False

    def take(self, text: str, last: bool) -> tuple[str, str]:
        """Return the text up to the closing bracket, and the text after it."""
        for at, char in enumerate(text):
            if self._escaped:
                self._escaped = False
            elif self._quoted:
                self._quoted = char != '"'
                self._escaped = char == "\\"
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


class TagReader(ArgumentReader):
    """Reader of arguments between ``tags``, such as ``<parameter=KEY>VALUE</parameter>``.

    The schema tells which values are strings. Other values are read as JSON or Python literals, or
    as strings if they are neither. A value that may be a string or another type is a string unless
    it is JSON of a type that the schema allows.
    """

    _NULLS = ("null", "None")  # templates print both

    def __init__(self, schema: Mapping[str, Any], tags: Tags) -> None:
        self._schemas = by_name(schema)
        self._tags = tags
        self._parts = ReferencedSchemas(schema)
        then = r"\s*".join(map(re.escape, tags.then.split("\n")))
        then = f"(?:{'|'.join((then, *map(re.escape, tags.others)))})"
        self._open = re.compile(f"{re.escape(tags.open)}(.*?){then}", re.DOTALL)
        self._name_end = re.compile(then)
        first = tags.then.lstrip()[0]
        odd = [name for name in self._schemas if first in name or name != name.strip()]
        self._names = sorted(odd, key=len, reverse=True)  # names that contain syntax of the tags
        self._n = 0
        self._key: str | None = None  # name of the argument whose value is being read
        self._text = self._begun = False  # the value is a string; its start was read
        # The value is quoted; JSON's opening quote is pending.
        self._within = self._quote_pending = False
        # Schemas of the value's alternatives other than strings.
        self._other_schemas: list[Any] = []
        self._gap = self._close = ""  # white space and closing tag after the value
        self._nulls: list[str] = []  # spellings of null that the text so far may become
        self._end = ValueEnd()

    def take(self, text: str, last: bool) -> tuple[str, str]:
        """Return the JSON that is certain now (strings as they stream in, other values and tags
        whole), and the text after it.
        """
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
        open = self._tags.open
        end = self._tags.end
        key, size = self._name(text, last) if text.startswith(open) else ("", 0)
        if size:
            others = self._tags.others
            self._begins(key, is_text=bool(others) and not text[:size].endswith(others))
            self._n += 1
            opening = "{" if self._n == 1 else ", "
            quote = '"' if self._text and not self._quote_pending else ""
            return f"{opening}{json.dumps(key, ensure_ascii=False)}: {quote}", text[size:]
        wanted = text.startswith(open) or open.startswith(text)
        if not last and (wanted or (end.startswith(text) and text != end)):
            return "", text
        self.done = True
        return "}" if self._n else "{}", text.removeprefix(end)

    def _name(self, text: str, last: bool) -> tuple[str, int]:
        """Return the argument name in a tag and the number of characters up to its value; ("", 0)
        if the tag is incomplete. Names of the schema that contain characters of a tag are tried
        first.
        """
        for name in self._names:
            head = f"{self._tags.open}{name}"
            found = self._name_end.match(text, len(head)) if text.startswith(head) else None
            if found is not None:
                return name, found.end()
            rest = text.removeprefix(head) if text.startswith(head) else ""
            said = "".join(rest.split())
            ways = (self._tags.then, *self._tags.others)
            begun = any("".join(way.split()).startswith(said) for way in ways)
            if not last and (head.startswith(text) or (text.startswith(head) and begun)):
                return "", 0
        found = self._open.match(text)
        return (found[1].strip(), found.end()) if found else ("", 0)

    def _begins(self, key: str, *, is_text: bool) -> None:
        """Start the value of argument ``key``. ``is_text``: its tag says that it is a string."""
        self._key = key
        self._begun = False
        self._within = False
        self._end = ValueEnd()
        texts, others = split_strings(self._schemas.get(key))
        if is_text and texts.schemas:
            texts = StringAlternatives(texts.schemas)
            others = []
        self._text = not others
        self._nulls = []
        self._other_schemas = others if texts.schemas else []
        if self._text and texts.null:
            words = [word for each in texts.schemas for word in choices(each)]
            self._nulls = [word for word in self._NULLS if word not in words]
        self._quote_pending = self._text and bool(self._nulls)

    def _value(self, text: str, last: bool) -> tuple[str, str]:
        if not self._begun:
            quote = self._tags.quotes[0]
            if not last and (not text or (quote.startswith(text) and text != quote)):
                return "", text
            self._begun, self._within = True, bool(quote) and text.startswith(quote)
            text = text.removeprefix(quote if self._within else self._tags.gap)
            self._gap = "" if self._within else self._tags.gap
            self._close = f"{self._tags.quotes[1] if self._within else ''}{self._tags.close}"
            self._nulls = [] if self._within else self._nulls
        gap = self._gap
        close = self._close
        if not self._text:
            return self._other(text, last)
        value, found, rest = text.partition(close)
        if not found and not last:
            keep = max(overlap(text, f"{gap}{close}"), overlap(text, close))
            keep = max(keep, len(gap) if text.endswith(gap) else 0)
            said = text[: len(text) - keep]
            if not said or any(word.startswith(said) for word in self._nulls):
                return "", text
            return self._quoted(said), text[len(said) :]
        self._key, value = None, value.removesuffix(gap)
        if value in self._nulls:
            return "null", rest
        return self._quoted(value) + '"', rest

    def _other(self, text: str, last: bool) -> tuple[str, str]:
        """Read a value that need not be a string, once it is complete; return its JSON and the rest
        of ``text``, as ``take`` does. A closing tag inside a JSON string does not end it.
        """
        at = self._end.find(text, self._close)
        first = text.find(self._close)
        if at is None and self._other_schemas and first >= 0:  # a string that begins like JSON
            behind = text[first + len(self._close) :].lstrip()
            at = first if behind.startswith((self._tags.open, self._tags.end)) else None
        if at is None and not last:
            return "", text
        for end in (at, first, len(text)):
            if end is not None and end >= 0:
                value = text[:end].removesuffix(self._gap)
                made = self._read(value)
                if end in (first, len(text)) or not isinstance(made, str):
                    self._key = None
                    said = json_of(value) if not self._other_schemas else dumped(made)
                    return said, text[end + len(self._close) :]
        raise AssertionError("a text has an end")

    def _read(self, value: str) -> Any:
        """Return the value that the text ``value`` spells if the schema allows that type, else the
        text.
        """
        if not self._other_schemas:
            return value_of(value)
        result: Any = value
        if not self._within:
            result = value_of(value) if value.lstrip()[:1] in ("{", "[") else constant_of(value)
        fine = any(fulfils(result, each, self._parts) for each in self._other_schemas)
        return result if fine and not isinstance(result, str) else value

    def _quoted(self, said: str) -> str:
        """Return ``said``, a part of a string, escaped for JSON, with the opening quote unless that
        was output before.
        """
        quote = '"' if self._quote_pending else ""
        self._nulls = []
        self._quote_pending = False
        return quote + _escaped(said)


class PythonReader(ArgumentReader):
    """Reader of the keyword arguments of a Python call, up to its closing bracket. ``names``: the
    parameters, which need not be Python identifiers.
    """

    _PLAIN = re.compile(r"[^=,)]*")

    def __init__(self, names: Iterable[str] = ()) -> None:
        names = list(names)
        blank = {name.strip() for name in filter(_is_odd, names)}
        known = [name for name in names if _is_odd(name) or name in blank]
        self._names = sorted(known, key=len, reverse=True)
        self._state = "key"
        self._part = ""
        self._depth = 0
        self._quote = ""
        self._run = 0  # consecutive quotes, of an opening or a possible closing
        self._escape: Escape | None = None
        # Inside a value that is read whole: whether the next character is escaped; characters in
        # the current string; the quote of an empty string, which may begin a triple quote.
        self._skips = False
        self._size = 0
        self._empty = ""
        self._n = 0

    def take(self, text: str, last: bool) -> tuple[str, str]:
        """Return JSON up to the last character that is certain, and the text after it; strings are
        returned as they stream in, other values whole.
        """
        out = []
        at = 0
        while at < len(text) and not self.done:
            if self._state == "key":
                made, size = self._key(text[at:], last)
                if not size:
                    break
            else:
                made = getattr(self, f"_in_{self._state}")(text[at])
                size = 1
            out.append(made)
            at += size
        if self.done:
            out.append("}" if self._n else "{}")
        elif last and self._state == "behind":
            out.append(self._ended())
        return "".join(out), text[at:]

    def _key(self, text: str, last: bool) -> tuple[str, int]:
        """Read a parameter's name and "=", or the text in place of them; return the JSON to output
        and the number of characters read (0: more text is needed).
        """
        usual, other = ("", " ") if not self._n else (" ", "")
        for gap, names in ((usual, self._names), (other, filter(_is_odd, self._names))):
            for name in names:
                mark = f"{gap}{name}="
                if text.startswith(mark):
                    return self._named(name), len(mark)
                if mark.startswith(text) and not last:
                    return "", 0
        found = self._PLAIN.match(text)
        name = found.group() if found else ""
        if len(name) == len(text):
            return "", len(text) if last else 0
        if text[len(name)] == "=":
            return self._named(name.strip()), len(name) + 1
        return self._in_gap(text[len(name)]), len(name) + 1

    def _named(self, name: str) -> str:
        self._state = "start"
        self._n += 1
        return f"{'{' if self._n == 1 else ', '}{json.dumps(name, ensure_ascii=False)}: "

    def _in_start(self, char: str) -> str:
        if char.isspace():
            return ""
        if char in "\"'":
            self._open(char)
            return '"'
        self._state = "value"
        self._part = ""
        return self._in_value(char)

    def _open(self, quote: str) -> None:
        """Begin a string at its first quote; two more of them may begin a triple-quoted one."""
        self._quote = quote
        self._run = 1
        self._state = "opening"

    def _in_opening(self, char: str) -> str:
        if char == self._quote:
            self._run += 1
            if self._run == 3:
                self._quote = self._quote * 3
                self._run = 0
                self._state = "text"
            return ""
        self._state = "text" if self._run == 1 else "behind"
        self._run = 0
        return self._in_text(char) if self._state == "text" else self._in_behind(char)

    def _in_text(self, char: str) -> str:
        if self._escape is not None:
            said, again = self._escape.take(char)
            if said is None:
                return ""
            self._escape = None
            return _escaped(said) + (self._in_text(char) if again else "")
        if char == self._quote[0]:
            self._run += 1
            if self._run == len(self._quote):
                self._run = 0
                self._state = "behind"
            return ""
        quotes = self._quote[0] * self._run
        self._run = 0
        if char == "\\":
            self._escape = Escape()
            return _escaped(quotes)
        return _escaped(quotes + char)

    def _in_behind(self, char: str) -> str:
        """Handle ``char`` after a string, and return the JSON to output: an adjacent string
        continues it, any other text ends the value.
        """
        if char.isspace():
            return ""
        if char in "\"'":
            self._open(char)
            return ""
        return self._ended() + self._in_gap(char)

    def _ended(self) -> str:
        self._state = "gap"
        return '"'

    def _in_value(self, char: str) -> str:
        if self._quote:
            self._within(char)
        elif char in "\"'":
            self._quote = char * 3 if char == self._empty else char
            self._size = 0
            self._run = 0
            self._empty = ""
        elif char in "([{":
            self._depth += 1
        elif not self._depth and char in ",)":
            return json_of(self._part.strip()) + self._in_gap(char)
        elif char in ")]}":
            self._depth -= 1
        self._empty = self._empty if char == self._empty else ""
        self._part += char
        return ""

    def _within(self, char: str) -> None:
        """Handle ``char`` inside a string that is part of a list, dict or tuple, which is read
        whole.
        """
        own = not self._skips
        self._skips = own and char == "\\"
        self._run = self._run + 1 if own and char == self._quote[0] else 0
        if self._run == len(self._quote):
            self._empty = char if not self._size else ""
            self._quote = ""
            self._run = 0
        self._size += 1

    def _in_gap(self, char: str) -> str:
        """Handle ``char`` after a value: skip to the comma or the closing bracket. Return ""."""
        if char in ",)":
            self._state = "key"
            self._quote = ""
            self.done = char == ")"
        return ""


class OwnReader(ArgumentReader):
    """Reader of Gemma 4's notation: names without quotes, strings between ``<|"|>`` marks.
    ``names``: argument names with characters that would end a plain name; they are matched whole,
    longest first.
    """

    _WORD = re.compile(r"[^\s,:{}\[\]<]+|<")
    _WORDS: ClassVar = {"None": "null", "True": "true", "False": "false"}  # as templates print them

    def __init__(self, names: Iterable[str] = ()) -> None:
        self._names = sorted(names, key=len, reverse=True)
        self._stack = ""
        self._quoted = self._key = False

    def take(self, text: str, last: bool) -> tuple[str, str]:
        """Read more text; return the JSON of all names, words and parts of strings in it that no
        further text can change, and the rest of ``text``, to be passed again with more. ``last``:
        no more text follows, so a name or word at the end is complete.
        """
        out = ""
        at = 0
        while at < len(text) and not self.done:
            made, size = self._next(text[at:], last) if not self._quoted else self._inside(text, at)
            if not size:
                break
            out = out + made
            at = at + size
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
            self._quoted = True
            self._key = False
            return '"', len(QUOTE)
        if QUOTE.startswith(text) and not last:
            return "", 0
        known = next((each for each in self._names if text.startswith(f"{each}:")), None)
        if self._key and (char != "}" or known is not None):  # property names have no quotes
            name, colon, _ = text.partition(":")
            wanted = any(f"{each}:".startswith(text) for each in self._names)
            if (not colon or wanted) and not last:
                return "", 0
            self._key = False
            name = name if known is None else known
            said = json.dumps(name.strip() if known is None else known, ensure_ascii=False)
            return (f"{said}: " if colon else said), len(name) + len(colon)
        if char in "{[":
            self._stack += char
            self._key = char == "{"
        elif char in "}]":
            self._stack = self._stack[:-1]
            self.done = not self._stack
            self._key = False
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


def reader_of(row: ToolCallFormat, schema: Mapping[str, Any]) -> ArgumentReader:
    """Return the reader for a call's arguments in the notation of ``row``, with ``schema`` of the
    tool.
    """
    if row.tags is not None:
        return TagReader(schema, row.tags)
    if row.style == "own":
        return OwnReader(odd_names(schema))
    if row.style == "python":
        return PythonReader(by_name(schema))
    return JsonReader()


def _escaped(text: str) -> str:
    """Return text escaped as in a JSON string, without quotes."""
    return dumped(text)[1:-1]


def _is_odd(name: str) -> bool:
    """Whether a name has characters that a reader takes for syntax unless it knows the name."""
    return not re.fullmatch(r"[\w.-]+", name)
