"""Parsing of tool-call arguments that are complete or cut short."""

from __future__ import annotations

import json
import re
from collections.abc import Iterable, Iterator
from math import isfinite
from typing import Any, NoReturn

from treadle.chat.tools.python_literals import dumped, literal

# keys of a call object
NAMES = ("name", "tool_name")
ARGUMENTS = ("arguments", "parameters")
CONSTANTS = {"None": "null", "True": "true", "False": "false"}  # as templates print them


class CallObject:
    """Incremental scanner of a call's JSON object. Sets ``name``, ``arguments_at`` (offset of the
    arguments' brace) and ``end`` (offset after the object); each is None until found.
    """

    def __init__(self) -> None:
        self.name: str | None = None
        self.arguments_at: int | None = None  # offset of the brace
        self.end: int | None = None
        self._at = self._depth = self._start = 0
        self._quoted = self._escaped = self._in_value = False
        self._key = ""

    def walk(self, text: str) -> None:
        """Scan ``text``, the whole object so far; characters scanned before are skipped."""
        for at in range(self._at, len(text)):
            char = text[at]
            if self._escaped:
                self._escaped = False
            elif self._quoted:
                self._quoted = char != '"'
                self._escaped = char == "\\"
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
                self._in_value = True
                self._start = at + 1
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


def is_object(written: str) -> bool:
    """Whether ``written`` is the text of a JSON object."""
    try:
        return isinstance(json.loads(written), dict)
    except (ValueError, RecursionError):
        return False


def read_call(written: str, tools: Iterable[str], at: int | None) -> tuple[str, str] | None:
    """Return the name and the arguments (JSON text) of a call object; None if ``written`` is not a
    call of one of ``tools``. ``at``: offset of the arguments in ``written``, which are then
    returned as written.
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
    return name, dumped(arguments)


class ValueEnd:
    """Finds the closing mark after a value that streams in. Marks inside strings of a JSON or
    Python array or object are skipped.
    """

    def __init__(self) -> None:
        self._at = 0
        self._quote = ""
        self._is_whole = True

    def find(self, text: str, mark: str) -> int | None:
        """Return the offset of ``mark`` in ``text``, the value so far; None if it has
        not come yet.
        """
        self._is_whole &= not text.strip() or text.lstrip()[0] in "{["
        for found in self._parts(text, mark) if self._is_whole else ():
            part = found[0]
            self._at = found.end()
            if part in "\"'" and self._quote in ("", part):
                self._quote = "" if self._quote else part
            elif part == "\n":
                self._is_whole &= not self._quote  # such strings have no line breaks
            elif part == mark and not self._quote:
                return found.start()
        if not self._is_whole:
            at = text.find(mark)
            return at if at >= 0 else None
        self._at = max(self._at, len(text) - len(mark) + 1)
        return None

    def _parts(self, text: str, mark: str) -> Iterator[re.Match[str]]:
        return re.compile(rf'\\.|["\']|\n|{re.escape(mark)}', re.DOTALL).finditer(text, self._at)


def constant_of(written: str) -> Any:
    """Return the JSON value that a text spells, with Python's None, True and False too; the text
    itself if it spells none.
    """
    said = CONSTANTS.get(written.strip(), written)
    try:
        result = json.loads(said)
    except (ValueError, RecursionError):
        return written
    return written if isinstance(result, float) and not isfinite(result) else result


def json_of(written: str) -> str:
    """Return a value's text as JSON: unchanged if it is JSON, a Python literal converted, any other
    text as a string.
    """
    try:
        json.loads(written, parse_constant=_refuse)
    except (ValueError, RecursionError):
        return dumped(value_of(written))
    return written.strip()


def _refuse(constant: str) -> NoReturn:
    raise ValueError(f"{constant} is not JSON")


def value_of(written: str) -> Any:
    """Return the value that a text spells in JSON or as a Python literal; the text itself if it
    spells none.
    """
    for read in (json.loads, literal):
        try:
            result = read(written)
            dumped(result)
        except (ValueError, RecursionError):
            continue
        return result
    return written


def arguments_of(written: str) -> dict[str, Any]:
    """Parse the JSON object of a call's arguments. If it was cut short, return its complete part;
    {} if there is none.
    """
    open = ""
    quoted = False
    escaped = False
    end = 0, ""  # offset where the text may be cut, and the brackets that close it there
    for at, char in enumerate(written):
        if escaped:
            escaped = False
        elif quoted:
            quoted = char != '"'
            escaped = char == "\\"
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
