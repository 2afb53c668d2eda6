"""Reads Python literals as models write them: an escape that is invalid or cut short keeps its
backslash, and JSON's constants are accepted too.
"""

from __future__ import annotations

import json
import re
import unicodedata
from typing import Any, NoReturn

_PLAIN = {
    "\\": "\\",
    "'": "'",
    '"': '"',
    "\n": "",
    "a": "\a",
    "b": "\b",
    "f": "\f",
    "n": "\n",
    "r": "\r",
    "t": "\t",
    "v": "\v",
}
_DIGITS = {"x": 2, "u": 4, "U": 8}
_HEX, _OCTAL = frozenset("0123456789abcdefABCDEF"), frozenset("01234567")
_NAME = frozenset("ABCDEFGHIJKLMNOPQRSTUVWXYZabcdefghijklmnopqrstuvwxyz0123456789 -")
_WORDS = {"None": None, "null": None, "True": True, "true": True, "False": False, "false": False}
_WORD = re.compile(r"[^\W\d]\w*")
_NUMBER = re.compile(r"[+-]?\s*(?:0[xXoObB][\w]+|(?:[\d_]+\.?[\d_]*|\.[\d_]+)(?:[eE][+-]?[\d_]+)?)")
_OPEN = re.compile(r"[uUrR]?('''|\"\"\"|'|\")")
_SPACE = re.compile(r"\s*")
_HALF = re.compile("[\ud800-\udfff]")


def dumped(value: Any) -> str:
    """Return a value as JSON. A lone half of a surrogate pair is written as an escape, since UTF-8
    has none. Raises ValueError for numbers that are not finite.
    """
    made = json.dumps(value, ensure_ascii=False, allow_nan=False)
    return _HALF.sub(lambda m: f"\\u{ord(m[0]):04x}", made)


class Escape:
    """Reader of one escape in a string; it is given the characters after the backslash one at a
    time.
    """

    def __init__(self) -> None:
        self._read = "\\"

    def take(self, char: str) -> tuple[str | None, bool]:
        """Read ``char``. Return the text that the escape stands for, None until it is complete; and
        whether ``char`` comes after the escape and must be read again.
        """
        kind = self._read[1:2]
        digits = self._read[2:]
        if not kind:
            self._read += char
            if char in _PLAIN:
                return _PLAIN[char], False
            return (None if char in _DIGITS or char in _OCTAL or char == "N" else self._read), False
        if kind in _OCTAL:
            return self._octal(char)
        if kind == "N":
            return self._named(char)
        if char not in _HEX:
            return self._read, True
        self._read += char
        if len(digits) + 1 < _DIGITS[kind]:
            return None, False
        code = int(digits + char, 16)
        return (chr(code) if code <= 0x10FFFF else self._read), False

    def _octal(self, char: str) -> tuple[str | None, bool]:
        if char not in _OCTAL:
            return chr(int(self._read[1:], 8)), True
        self._read += char
        return (chr(int(self._read[1:], 8)) if len(self._read) == 4 else None), False

    def _named(self, char: str) -> tuple[str | None, bool]:
        if char == "{" and self._read == "\\N":
            self._read += char
            return None, False
        if self._read[2:] and char == "}":
            try:
                return unicodedata.lookup(self._read[3:]), False
            except KeyError:
                return self._read + char, False
        if not self._read[2:] or char not in _NAME:
            return self._read, True
        self._read += char
        return None, False


def literal(written: str) -> Any:
    """Return the value of a Python literal, in JSON types. Raises ValueError for other text."""
    reader = _Literal(written)
    value = reader.value()
    if reader.at < len(written):
        reader.fail()
    return value


class _Literal:
    """Parser of one literal. ``at``: offset of the next character."""

    def __init__(self, written: str) -> None:
        self._text = written
        self.at = 0
        self._skip()

    def fail(self) -> NoReturn:
        raise ValueError(f"no literal at character {self.at}: {self._text[self.at :]!r:.40}")

    def _skip(self, n: int = 0) -> None:
        found = _SPACE.match(self._text, self.at + n)
        self.at = found.end() if found else self.at + n

    def _has(self, mark: str) -> bool:
        """Return whether ``mark`` comes next; if so, skip it and white space."""
        if not self._text.startswith(mark, self.at):
            return False
        self._skip(len(mark))
        return True

    def value(self) -> Any:
        if _OPEN.match(self._text, self.at):
            return self._texts()
        if self._has("["):
            return self._items("]")[0]
        if self._has("("):
            items, comma = self._items(")")
            return items[0] if len(items) == 1 and not comma else items
        if self._has("{"):
            return self._pairs()
        if found := _NUMBER.match(self._text, self.at):
            self._skip(len(found[0]))
            return _number("".join(found[0].split()))
        found = _WORD.match(self._text, self.at)
        if found is None or found[0] not in _WORDS:
            self.fail()
        self._skip(len(found[0]))
        return _WORDS[found[0]]

    def _items(self, close: str) -> tuple[list[Any], bool]:
        """Return the values up to the bracket ``close``, and whether a comma precedes that."""
        result: list[Any] = []
        comma = True
        while not self._has(close):
            if not comma:
                self.fail()
            result.append(self.value())
            comma = self._has(",")
        return result, comma and bool(result)

    def _pairs(self) -> dict[str, Any]:
        result: dict[str, Any] = {}
        comma = True
        while not self._has("}"):
            if not comma:
                self.fail()
            key = self.value()
            if isinstance(key, list | dict) or not self._has(":"):
                self.fail()
            result[key if isinstance(key, str) else json.dumps(key)] = self.value()
            comma = self._has(",")
        return result

    def _texts(self) -> str:
        """Return adjacent strings as one."""
        result = ""
        while found := _OPEN.match(self._text, self.at):
            self.at = found.end()
            result += self._inside(found[1], raw=found[0][0] in "rR")
            self._skip()
        return result

    def _inside(self, quote: str, *, raw: bool) -> str:
        result = ""
        escape = None
        while self.at < len(self._text):
            char = self._text[self.at]
            if escape is not None:
                said, again = escape.take(char)
                if said is None and not again:
                    self.at += 1
                    continue
                result = result + (said or "")
                escape = None
                self.at += not again
            elif self._text.startswith(quote, self.at):
                self.at += len(quote)
                return result
            elif char == "\\" and raw:
                result += self._text[self.at : self.at + 2]
                self.at += 2
            else:
                escape = Escape() if char == "\\" else None
                result += "" if escape else char
                self.at += 1
        self.fail()


def _number(written: str) -> int | float:
    try:
        return int(written, 0)
    except ValueError:
        if not set(written) & set(".eE"):
            raise
    return float(written)
