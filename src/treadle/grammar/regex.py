"""Regular expressions as numbers: equal ones have one number, and counted repetitions are
recognised.

An automaton of ``[a-z]{1,80}`` is a chain of 80 states. Built from its end, each state's expression
adds one to the count of the next one's.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence

from treadle.grammar.char_classes import Alphabet
from treadle.grammar.gbnf import Special
from treadle.grammar.lark import LarkWriter, class_of, counts

MAX_REGEXES = 30_000
MAX_WORK = 600_000  # parts joined and derivatives computed: about a second
MAX_PARTS = 4_000  # of a sequence: each rule that names another twice doubles it
MAX_NESTED = 12  # nesting in one terminal

# A kind and its parts: "chars" (mask,), "call" (number,), "seq" and "alt" (regexes...), "rep"
# (regex, least, most).
Entry = tuple[str, tuple[int, ...]]
EMPTY_TEXT = 0  # the regex of the empty text
ENDLESS = -1  # ``most`` of an unbounded repetition

Call = str | Special  # a rule's name, or a special token


class TooLargeError(Exception):
    """Raised for a grammar whose automata or regular expressions exceed the size limits."""


class Regexes:
    """Store of regular expressions, by number; None stands for the regex that matches no text.
    Methods raise TooLargeError beyond the limits of size and work.
    """

    def __init__(self, alphabet: Alphabet, most: int = MAX_REGEXES) -> None:
        self._alphabet = alphabet
        self._most = most
        self._work = 0
        self._entries: list[Entry] = [("seq", ())]
        self._numbers: dict[Entry, int] = {self._entries[0]: EMPTY_TEXT}
        self.is_empty = [True]  # by regex: whether it matches the empty text
        self._calls: list[Call] = []
        self._ways: dict[int, list[tuple[int | Call, int]]] = {}

    def _number(self, kind: str, *parts: int) -> int:
        entry = (kind, parts)
        if entry not in self._numbers:
            if len(self._entries) >= self._most:
                raise TooLargeError
            self._numbers[entry] = len(self._entries)
            self._entries.append(entry)
            empty = [self.is_empty[part] for part in self._parts(self._numbers[entry])]
            some = any(empty) or (kind == "rep" and not parts[1])
            every = all(empty)
            self.is_empty.append({"seq": every, "alt": some, "rep": some}.get(kind, False))
        return self._numbers[entry]

    def _items(self, regex: int) -> list[int]:
        kind, parts = self._entries[regex]
        return list(parts) if kind == "seq" else [regex]

    def chars(self, mask: int) -> int | None:
        """Return the regex of one character of the set ``mask``; None if the set is empty."""
        return self._number("chars", mask) if mask else None

    def seq(self, *regexes: int | None) -> int | None:
        """Return the concatenation of regexes; None if one of them is None."""
        found: list[int] = []
        for regex in reversed(regexes):
            if regex is None:
                return None
            found = self._joined(self._items(regex), found)
            if len(found) > MAX_PARTS:
                raise TooLargeError
        self._spend(len(found))
        return self._sequence(found)

    def _spend(self, work: int) -> None:
        self._work += work
        if self._work > MAX_WORK:
            raise TooLargeError

    def _sequence(self, parts: Sequence[int]) -> int:
        """Return the concatenation of parts whose repetitions are already merged."""
        return parts[0] if len(parts) == 1 else self._number("seq", *parts)

    def _joined(self, left: list[int], right: list[int]) -> list[int]:
        """Concatenate two lists of parts, merging repetitions: ``x`` and ``x{2,3}`` become
        ``x{3,4}``.
        """
        while left and right:
            kind, parts = self._entries[right[0]]
            once = self._items(parts[0]) if kind == "rep" else []
            if kind != "rep" or left[-len(once) :] != once:
                break
            least = parts[1] + 1
            most = parts[2] if parts[2] == ENDLESS else parts[2] + 1
            left = left[: -len(once)]
            right = [self._number("rep", parts[0], least, most), *right[1:]]
        return left + right

    def call(self, name: Call) -> int:
        """Return the regex that is a call of a rule, or a special token."""
        if name not in self._calls:
            self._calls.append(name)
        return self._number("call", self._calls.index(name))

    def either(self, regexes: Iterable[int | None]) -> int | None:
        """Return the alternation of regexes, with single characters merged. None is skipped; the
        result is None if no regex is left.
        """
        found = self._flat(regexes)
        return self._number("alt", *found) if len(found) > 1 else found[0] if found else None

    def alt(self, regexes: Iterable[int | None]) -> int | None:
        """Return the alternation of regexes with common endings factored out, which is shorter when
        written: ``x y | y`` becomes ``x? y``.
        """
        return self._choice(self._flat(regexes))

    def _flat(self, regexes: Iterable[int | None]) -> list[int]:
        """Return the alternatives sorted by number, with nested ones flattened and single
        characters merged into one.
        """
        flat: set[int] = set()
        mask = 0
        for regex in regexes:
            if regex is None:
                continue
            kind, parts = self._entries[regex]
            for part in parts if kind == "alt" else (regex,):
                if self._entries[part][0] == "chars":
                    mask |= self._entries[part][1][0]
                else:
                    flat.add(part)
        chars = self.chars(mask)
        return sorted(flat) + ([] if chars is None else [chars])

    def _choice(self, found: list[int]) -> int | None:
        if len(found) < 2:
            return found[0] if found else None
        # ``x y | y`` as ``x? y``, and ``x | `` as ``x?``
        for short in sorted(found, key=lambda regex: len(self._items(regex))):
            tail = self._items(short)
            for long in found:
                items = self._items(long)
                if long != short and items[len(items) - len(tail) :] == tail:
                    head = self.seq(*items[: len(items) - len(tail)])
                    both = self.seq(self.repeat(head, 0, 1), short)
                    rest = [regex for regex in found if regex not in (short, long)]
                    return self.alt([*rest, both])
        return self._number("alt", *found)

    def repeat(self, regex: int | None, least: int, most: int) -> int | None:
        """Return the regex of ``least`` to ``most`` repetitions of a regex; ``most`` may be
        ENDLESS. None, the regex that matches no text, gives the empty text if ``least`` is 0, else
        None.
        """
        if regex is None and least:
            return None
        if regex is None or regex == EMPTY_TEXT or most == 0:
            return EMPTY_TEXT
        if least == most == 1:
            return regex
        kind, (inner, *counts) = self._entries[regex]
        # ``(x{1,3})?`` as ``x{0,3}``, and ``(x?)*`` as ``x*``
        if kind == "rep" and least == 0 and counts[0] <= 1:
            if most == 1:
                return self._number("rep", inner, 0, counts[1])
            if most == ENDLESS and counts[1] in (1, ENDLESS):
                return self._number("rep", inner, 0, ENDLESS)
        return self._number("rep", regex, least, most)

    # -- derivatives ------------------------------------------------------------------------

    def ways(self, regex: int) -> list[tuple[int | Call, int]]:
        """Return the derivatives of a regex: pairs of a first character mask or call, and the regex
        of the text after it.
        """
        ends = [regex]  # a sequence's suffixes after parts that may be empty
        while ends[-1] not in self._ways and len(items := self._items(ends[-1])) > 1:
            if not self.is_empty[items[0]]:
                break
            ends.append(self._sequence(items[1:]))
        for end in reversed(ends):  # each is built from the one after it
            if end not in self._ways:
                self._ways[end] = list(dict.fromkeys(self._begin(*self._entries[end])))
                self._spend(len(self._ways[end]))
        return self._ways[regex]

    def _begin(self, kind: str, parts: tuple[int, ...]) -> Iterator[tuple[int | Call, int]]:
        if kind == "chars":
            yield parts[0], EMPTY_TEXT
        elif kind == "call":
            yield self._calls[parts[0]], EMPTY_TEXT
        elif kind == "alt":
            for part in parts:
                yield from self.ways(part)
        elif kind == "rep":
            inner, least, most = parts
            rest = self.repeat(inner, max(least - 1, 0), most if most == ENDLESS else most - 1)
            yield from self._followed(inner, rest)
        elif parts:
            rest = self._sequence(parts[1:])
            yield from self._followed(parts[0], rest)
            if self.is_empty[parts[0]]:
                yield from self.ways(rest)

    def _followed(self, regex: int, rest: int | None) -> Iterator[tuple[int | Call, int]]:
        for first, more in self.ways(regex):
            both = rest if more == EMPTY_TEXT else self.seq(more, rest)
            if both is not None:
                yield first, both

    # -- Lark -----------------------------------------------------------------------------

    def write(self, regexes: Iterable[int], writer: LarkWriter) -> list[str]:
        """Write a terminal for each regex, and for parts that are used several times or nested too
        deeply; return the terminals' names.
        """
        wanted = list(regexes)
        order = self._order(wanted)
        uses = dict.fromkeys(order, 0)
        for part in (part for regex in order for part in self._parts(regex)):
            uses[part] += 1
        texts: dict[int, str] = {}
        depths: dict[int, int] = {}
        for regex in order:
            text = self._text(regex, texts)
            depth = 1 + max((depths[part] for part in self._parts(regex)), default=0)
            simple = self._entries[regex][0] == "chars"
            if not simple and (uses[regex] > 1 or depth > MAX_NESTED):
                text = writer.terminal(text)
                depth = 0
            texts[regex] = text
            depths[regex] = depth
        return [writer.terminal(texts[regex]) for regex in wanted]

    def _parts(self, regex: int) -> tuple[int, ...]:
        kind, parts = self._entries[regex]
        return () if kind in ("chars", "call") else parts[:1] if kind == "rep" else parts

    def _order(self, wanted: list[int]) -> list[int]:
        """Return the regexes ``wanted`` and all of their parts, each before the regexes that
        contain it.
        """
        found: dict[int, None] = {}
        waiting = [(regex, False) for regex in wanted]
        while waiting:
            regex, ready = waiting.pop()
            if ready:
                found[regex] = None
            elif regex not in found:
                waiting.append((regex, True))
                waiting += [(part, False) for part in self._parts(regex) if part not in found]
        return list(found)

    def _text(self, regex: int, texts: dict[int, str]) -> str:
        kind, parts = self._entries[regex]
        if kind == "chars":
            return f"/{class_of(self._alphabet.ranges(parts[0]))}/"
        if kind == "alt":
            return f"({' | '.join(texts[part] for part in parts)})"
        if kind == "seq":
            return f"({' '.join(texts[part] for part in parts)})" if parts else '""'
        inner = texts[parts[0]]
        inner = f"({inner})" if self._entries[parts[0]][0] == "rep" else inner
        return inner + counts(parts[1], None if parts[2] == ENDLESS else parts[2])
