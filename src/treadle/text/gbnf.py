"""GBNF, llama.cpp's grammar notation, into the Lark notation of ``llguidance``.

A grammar over characters means what it says only if no lexer runs ahead of it: with words as
lexemes, ``[a-z]+ "s"`` would never match "cats", for the first part takes it all. So every
character here is a lexeme of its own, and the parser decides alone, as llama.cpp's does.
"""

from __future__ import annotations

import re
from typing import NoReturn

from treadle.errors import GrammarError

MAX_SOURCE = 1 << 20  # characters
MAX_DEPTH = 60  # parentheses inside each other
MAX_ITEMS = 50_000  # characters, classes and names of rules; llguidance has 65,536 symbols

_NAME = re.compile(r"[A-Za-z0-9_-]+")
_BLANK = re.compile(r"(?:[ \t]|#[^\r\n]*)*")
_BLANK_LINES = re.compile(r"(?:[ \t\r\n]|#[^\r\n]*)*")
_TOKEN = re.compile(r"<(?:\[\d+\]|[^<>\s\[\]]+)>")
_COUNTS = re.compile(r"\{\s*(\d+)\s*(?:(,)\s*(\d*)\s*)?\}")
_HEX = re.compile(r"x([0-9A-Fa-f]{2})|u([0-9A-Fa-f]{4})|U([0-9A-Fa-f]{8})")
_ESCAPES = {"n": "\n", "r": "\r", "t": "\t", "\\": "\\", '"': '"', "[": "[", "]": "]", "-": "-"}
_ANY = "/(?s:.)/"


def gbnf_to_lark(source: str) -> str:
    """The same grammar as llguidance's Lark, its rule ``root`` as ``start``.

    Raises GrammarError with line and column.
    """
    return _Parser(source).grammar()


class _Parser:
    """Recursive descent that writes what it reads."""

    def __init__(self, source: str) -> None:
        self._text = source
        self._at = 0
        self._depth = 0
        self._n_items = 0
        self._rules: dict[str, str] = {}  # by GBNF name
        self._used: dict[str, int] = {}  # where each name was first used
        self._names: dict[str, str] = {"root": "start"}  # Lark's names; it has fewer letters
        if len(source) > MAX_SOURCE:
            self._fail(f"the grammar has {len(source)} characters (at most {MAX_SOURCE})")

    def grammar(self) -> str:
        self._skip(_BLANK_LINES)
        while self._at < len(self._text):
            self._rule()
            self._skip(_BLANK_LINES)
        for name, at in self._used.items():
            if name not in self._rules:
                self._fail(f"rule {name!r} is used but not defined", at)
        if "root" not in self._rules:
            self._fail("there is no rule 'root'")
        return "\n".join(f"{self._lark_name(name)}: {body}" for name, body in self._rules.items())

    # -- rules --------------------------------------------------------------------------

    def _rule(self) -> None:
        at = self._at
        name = self._name()
        if name in self._rules:
            self._fail(f"rule {name!r} is defined twice", at)
        self._skip(_BLANK)
        if not self._take("::="):
            self._fail("expected '::='")
        self._skip(_BLANK_LINES)
        self._rules[name] = self._alternatives(nested=False)
        if self._at < len(self._text) and self._text[self._at] not in "\r\n":
            self._fail(f"unexpected {self._text[self._at]!r}")

    def _alternatives(self, *, nested: bool) -> str:
        found = [self._sequence(nested=nested)]
        while self._bar(nested):
            self._skip(_BLANK_LINES)
            found.append(self._sequence(nested=nested))
        return " | ".join(found)

    def _bar(self, nested: bool) -> bool:
        """Take the next '|'; it may also begin the line after, which no rule can."""
        at = self._at
        self._skip(_BLANK_LINES)
        if self._take("|"):
            return True
        if not nested:
            self._at = at
        return False

    def _sequence(self, *, nested: bool) -> str:
        blank = _BLANK_LINES if nested else _BLANK
        found: list[str] = []
        while (item := self._item()) is not None:
            self._skip(blank)
            if (repeat := self._repetition()) is not None:
                item += repeat
                self._skip(blank)
            found.append(item)
        return " ".join(found) or '""'

    def _count(self, n: int) -> None:
        self._n_items += n
        if self._n_items > MAX_ITEMS:
            self._fail(f"more than {MAX_ITEMS} characters, classes and names")

    def _item(self) -> str | None:
        self._count(1)
        head = self._text[self._at : self._at + 1]
        if head == '"':
            return self._literal()
        if head == "[":
            return self._class()
        if head == "(":
            return self._group()
        if head == ".":
            self._at += 1
            return _ANY
        if token := _TOKEN.match(self._text, self._at):
            self._at = token.end()
            return token.group()
        if _NAME.match(self._text, self._at):
            at, name = self._at, self._name()
            self._used.setdefault(name, at)
            return self._lark_name(name)
        return None

    def _group(self) -> str:
        at = self._at
        self._depth += 1
        if self._depth > MAX_DEPTH:
            self._fail(f"more than {MAX_DEPTH} parentheses inside each other")
        self._at += 1
        self._skip(_BLANK_LINES)
        body = self._alternatives(nested=True)
        self._skip(_BLANK_LINES)
        if not self._take(")"):
            self._fail("this '(' is not closed", at)
        self._depth -= 1
        return f"({body})"

    def _repetition(self) -> str | None:
        for sign in "*+?":
            if self._take(sign):
                return sign
        if self._text[self._at : self._at + 1] != "{":
            return None
        counts = _COUNTS.match(self._text, self._at)
        if counts is None:
            self._fail("expected {n}, {n,} or {n,m}")
        least, comma, most = counts.groups()
        if comma and most and int(most) < int(least):
            self._fail(f"at least {least} and at most {most}")
        self._at = counts.end()
        return f"{{{least}{comma or ''}{most or ''}}}"

    # -- characters ---------------------------------------------------------------------

    def _literal(self) -> str:
        at = self._at
        self._at += 1
        found: list[str] = []
        while not self._take('"'):
            if self._at >= len(self._text):
                self._fail("this text is not closed", at)
            found.append(f"/{_escaped(self._character())}/")
        self._count(len(found) - 1)
        return f"({' '.join(found)})" if found else '""'

    def _class(self) -> str:
        at = self._at
        self._at += 1
        negated = "^" if self._take("^") else ""
        found: list[str] = []
        while not self._take("]"):
            if self._at >= len(self._text):
                self._fail("this '[' is not closed", at)
            first = last = self._character()
            if self._text[self._at : self._at + 1] == "-" and self._text[self._at + 1 :][:1] != "]":
                self._at += 1
                last = self._character()
            if last < first:
                self._fail(f"the range {first}-{last} runs backwards", at)
            found.append(f"{_escaped(first)}-{_escaped(last)}")
        if not found:
            self._fail("an empty class", at)
        return f"/[{negated}{''.join(found)}]/"

    def _character(self) -> str:
        character = self._text[self._at : self._at + 1]
        if not character:
            self._fail("the grammar ends inside a text or class")
        self._at += 1
        if character != "\\":
            return character
        if code := _HEX.match(self._text, self._at):
            self._at = code.end()
            number = int(code[1] or code[2] or code[3], 16)
            if number > 0x10FFFF or 0xD800 <= number < 0xE000:
                self._fail(f"U+{number:04X} is no character", code.start())
            return chr(number)
        escape = self._text[self._at : self._at + 1]
        if escape not in _ESCAPES or not escape:
            self._fail(f"unknown escape '\\{escape}'")
        self._at += 1
        return _ESCAPES[escape]

    # -- text ---------------------------------------------------------------------------

    def _name(self) -> str:
        name = _NAME.match(self._text, self._at)
        if name is None:
            self._fail("expected the name of a rule")
        self._at = name.end()
        return name.group()

    def _lark_name(self, name: str) -> str:
        if name not in self._names:
            letters = re.sub("[^a-z0-9]", "_", name.lower())
            self._names[name] = f"r{len(self._names)}_{letters}"
        return self._names[name]

    def _skip(self, blank: re.Pattern[str]) -> None:
        found = blank.match(self._text, self._at)
        self._at = found.end() if found else self._at

    def _take(self, text: str) -> bool:
        if not self._text.startswith(text, self._at):
            return False
        self._at += len(text)
        return True

    def _fail(self, message: str, at: int | None = None) -> NoReturn:
        at = min(self._at if at is None else at, len(self._text))
        line = self._text.count("\n", 0, at) + 1
        column = at - (self._text.rfind("\n", 0, at) + 1) + 1
        raise GrammarError(f"grammar, line {line}, column {column}: {message}")


def _escaped(character: str) -> str:
    """One character in a regular expression, whatever it means there."""
    if character.isascii() and character.isalnum():
        return character
    return f"\\x{{{ord(character):X}}}"
