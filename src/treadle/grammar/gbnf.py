"""Parser of GBNF, llama.cpp's grammar notation.

A rule's body is a tree of ``Node`` objects. Character classes are sorted ranges of code points.
"""

from __future__ import annotations

import re
from typing import NoReturn

from treadle.base.fast_classes import dataclass
from treadle.errors import GrammarError

MAX_SOURCE = 1 << 20  # characters
MAX_DEPTH = 100  # nesting of parentheses
MAX_ITEMS = 50_000  # characters, classes and rule names; llguidance has 65,536 symbols
MAX_COUNT = 1 << 30  # of a repetition; llguidance counts in 32 bits

_NAME = re.compile(r"[A-Za-z0-9_-]+")
_BLANK = re.compile(r"(?:[ \t]|#[^\r\n]*)*")
_BLANK_LINES = re.compile(r"(?:[ \t\r\n]|#[^\r\n]*)*")
_TOKEN = re.compile(r"<(?:\[\d+\]|[^<>\s\[\]]+)>")
_COUNTS = re.compile(r"\{\s*(\d+)\s*(?:(,)\s*(\d*)\s*)?\}")
_HEX = re.compile(r"x([0-9A-Fa-f]{2})|u([0-9A-Fa-f]{4})|U([0-9A-Fa-f]{8})")
_ESCAPES = {"n": "\n", "r": "\r", "t": "\t", "\\": "\\", '"': '"', "[": "[", "]": "]", "-": "-"}

Ranges = tuple[tuple[int, int], ...]  # first and last code point of each; sorted, disjoint


@dataclass(frozen=True)
class Chars:
    """One character of ``ranges``, the character class (see ``normalized``)."""

    ranges: Ranges


@dataclass(frozen=True)
class Special:
    """One token, by name or id as llguidance writes it: ``<name>``, ``<[12]>``."""

    text: str


@dataclass(frozen=True)
class RuleRef:
    """A reference to a rule."""

    name: str


@dataclass(frozen=True)
class Concatenation:
    """Items in sequence; without items, the empty text."""

    items: tuple[Node, ...]


@dataclass(frozen=True)
class Alternatives:
    """One of several items."""

    items: tuple[Node, ...]


@dataclass(frozen=True)
class Repeat:
    """``least`` to ``most`` repetitions of an item; ``most`` None: unbounded."""

    item: Node
    least: int
    most: int | None


Node = Chars | Special | RuleRef | Concatenation | Alternatives | Repeat
EMPTY = Concatenation(())


@dataclass(frozen=True)
class GbnfRules:
    """Parsed grammar that begins at rule ``root``. ``body``, ``line``: body and line number of each
    rule, by name.
    """

    body: dict[str, Node]
    line: dict[str, int]


def parse_gbnf(source: str) -> GbnfRules:
    """Parse a GBNF grammar. Raises GrammarError with line and column."""
    return _Parser(source).grammar()


def normalized(ranges: list[tuple[int, int]], *, negated: bool = False) -> Ranges:
    """Return character ranges sorted and merged, without surrogates, which no text contains.
    ``negated``: the complement.
    """
    if negated:
        ends = [-1, *(x for pair in normalized(ranges) for x in pair), 0x110000]
        gaps = zip(ends[::2], ends[1::2], strict=True)
        ranges = [(low + 1, high - 1) for low, high in gaps if low + 1 < high]
    whole: list[tuple[int, int]] = []
    for low, high in sorted(_without_surrogates(ranges)):
        if whole and low <= whole[-1][1] + 1:
            whole[-1] = (whole[-1][0], max(high, whole[-1][1]))
        else:
            whole.append((low, high))
    return tuple(whole)


def _without_surrogates(ranges: list[tuple[int, int]]) -> list[tuple[int, int]]:
    below = [(low, min(high, 0xD7FF)) for low, high in ranges if low <= 0xD7FF]
    return below + [(max(low, 0xE000), high) for low, high in ranges if high >= 0xE000]


ANY = Chars(normalized([(0, 0x10FFFF)]))


class _Parser:
    """Recursive-descent parser of GBNF."""

    def __init__(self, source: str) -> None:
        self._text = source
        self._at = 0
        self._depth = 0
        self._n_items = 0
        self._rules: dict[str, Node] = {}
        self._line: dict[str, int] = {}
        self._used: dict[str, int] = {}  # offset of each name's first use
        if len(source) > MAX_SOURCE:
            self._fail(f"the grammar has {len(source)} characters (at most {MAX_SOURCE})")

    def grammar(self) -> GbnfRules:
        self._skip(_BLANK_LINES)
        while self._at < len(self._text):
            self._rule()
            self._skip(_BLANK_LINES)
        for name, at in self._used.items():
            if name not in self._rules:
                self._fail(f"rule {name!r} is used but not defined", at)
        if "root" not in self._rules:
            self._fail("rule 'root' is missing")
        return GbnfRules(self._rules, self._line)

    # -- rules --------------------------------------------------------------------------

    def _rule(self) -> None:
        at = self._at
        name = self._name()
        if name in self._rules:
            self._fail(f"rule {name!r} is defined twice", at)
        self._line[name] = self._text.count("\n", 0, at) + 1
        self._skip(_BLANK)
        if not self._take("::="):
            self._fail("expected '::='")
        self._skip(_BLANK_LINES)
        self._rules[name] = self._alternatives(nested=False)
        if self._at < len(self._text) and self._text[self._at] not in "\r\n":
            self._fail(f"unexpected {self._text[self._at]!r}")

    def _alternatives(self, *, nested: bool) -> Node:
        found = [self._sequence(nested=nested)]
        while self._bar(nested):
            self._skip(_BLANK_LINES)
            found.append(self._sequence(nested=nested))
        return Alternatives(tuple(found)) if len(found) > 1 else found[0]

    def _bar(self, nested: bool) -> bool:
        """Consume the next ``|`` and return whether there was one. It may also stand on the next
        line, since no rule begins with it. ``nested``: inside parentheses, where blank lines are
        consumed in any case.
        """
        at = self._at
        self._skip(_BLANK_LINES)
        if self._take("|"):
            return True
        if not nested:
            self._at = at
        return False

    def _sequence(self, *, nested: bool) -> Node:
        blank = _BLANK_LINES if nested else _BLANK
        found: list[Node] = []
        while (item := self._item()) is not None:
            self._skip(blank)
            if (counts := self._repetition()) is not None:
                item = Repeat(item, *counts)
                self._skip(blank)
            found.append(item)
        return Concatenation(tuple(found)) if len(found) != 1 else found[0]

    def _count(self, n: int) -> None:
        self._n_items += n
        if self._n_items > MAX_ITEMS:
            self._fail(f"the grammar has more than {MAX_ITEMS} characters, classes and names")

    def _item(self) -> Node | None:
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
            return ANY
        if token := _TOKEN.match(self._text, self._at):
            self._at = token.end()
            return Special(token.group())
        if _NAME.match(self._text, self._at):
            at = self._at
            name = self._name()
            self._used.setdefault(name, at)
            return RuleRef(name)
        return None

    def _group(self) -> Node:
        at = self._at
        self._depth += 1
        if self._depth > MAX_DEPTH:
            self._fail(f"parentheses are nested more than {MAX_DEPTH} deep")
        self._at += 1
        self._skip(_BLANK_LINES)
        body = self._alternatives(nested=True)
        self._skip(_BLANK_LINES)
        if not self._take(")"):
            self._fail("this '(' is not closed", at)
        self._depth -= 1
        return body

    def _repetition(self) -> tuple[int, int | None] | None:
        for sign, counts in (("*", (0, None)), ("+", (1, None)), ("?", (0, 1))):
            if self._take(sign):
                return counts
        if self._text[self._at : self._at + 1] != "{":
            return None
        found = _COUNTS.match(self._text, self._at)
        if found is None:
            self._fail("expected {n}, {n,} or {n,m}")
        for count in found.group(1, 3):
            if len((count or "").lstrip("0")) > 10 or int(count or 0) > MAX_COUNT:
                self._fail(f"repeated {count:.20} times (at most {MAX_COUNT})")
        least = int(found[1])
        most = int(found[3]) if found[3] else None if found[2] else least
        if most is not None and most < least:
            self._fail(f"the minimum {least} is above the maximum {most}")
        self._at = found.end()
        return least, most

    # -- characters ---------------------------------------------------------------------

    def _literal(self) -> Node:
        at = self._at
        self._at += 1
        found: list[Node] = []
        while not self._take('"'):
            if self._at >= len(self._text):
                self._fail("this string is not closed", at)
            found.append(Chars(((code := ord(self._character()), code),)))
        self._count(len(found) - 1)
        return Concatenation(tuple(found)) if len(found) != 1 else found[0]

    def _class(self) -> Node:
        at = self._at
        self._at += 1
        negated = self._take("^")
        found: list[tuple[int, int]] = []
        while not self._take("]"):
            if self._at >= len(self._text):
                self._fail("this '[' is not closed", at)
            first = last = self._character()
            if self._text[self._at : self._at + 1] == "-" and self._text[self._at + 1 :][:1] != "]":
                self._at += 1
                last = self._character()
            if last < first:
                self._fail(f"the range {first}-{last} is reversed", at)
            found.append((ord(first), ord(last)))
        if not found:
            self._fail("this character class is empty", at)
        if not (ranges := normalized(found, negated=negated)):
            self._fail("this character class matches no character", at)
        return Chars(ranges)

    def _character(self) -> str:
        character = self._text[self._at : self._at + 1]
        if not character:
            self._fail("the grammar ends inside a string or character class")
        self._at += 1
        if character != "\\":
            return character
        if code := _HEX.match(self._text, self._at):
            self._at = code.end()
            number = int(code[1] or code[2] or code[3], 16)
            if number > 0x10FFFF or 0xD800 <= number < 0xE000:
                self._fail(f"U+{number:04X} is not a valid character", code.start())
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
            self._fail("expected a rule name")
        self._at = name.end()
        return name.group()

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
