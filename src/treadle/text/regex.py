"""Regular expressions as numbers: equal ones are one, and counted repetitions are found again.

An automaton made of ``[a-z]{1,80}`` is a chain of 80 states. Read back from its end, each adds one
to the count of the next.
"""

from __future__ import annotations

from collections.abc import Iterable

from treadle.text.alphabet import Alphabet
from treadle.text.automaton import TooLargeError
from treadle.text.lark import Writer, class_of, counts

MAX_REGEXES = 30_000
MAX_NESTED = 12  # of what is written in one terminal

# A kind and its parts: "chars" (mask,), "seq" and "alt" (regexes...), "rep" (regex, least, most).
Entry = tuple[str, tuple[int, ...]]
EMPTY_TEXT = 0  # the regex of the empty text
ENDLESS = -1  # a repetition's ``most``


class Regexes:
    """A store of regexes; None is the regex of no text."""

    def __init__(self, alphabet: Alphabet) -> None:
        self._alphabet = alphabet
        self._entries: list[Entry] = [("seq", ())]
        self._numbers: dict[Entry, int] = {self._entries[0]: EMPTY_TEXT}

    def _number(self, kind: str, *parts: int) -> int:
        entry = (kind, parts)
        if entry not in self._numbers:
            if len(self._entries) >= MAX_REGEXES:
                raise TooLargeError
            self._numbers[entry] = len(self._entries)
            self._entries.append(entry)
        return self._numbers[entry]

    def _items(self, regex: int) -> list[int]:
        kind, parts = self._entries[regex]
        return list(parts) if kind == "seq" else [regex]

    def chars(self, mask: int) -> int | None:
        """One character."""
        return self._number("chars", mask) if mask else None

    def seq(self, *regexes: int | None) -> int | None:
        """One after the other."""
        found: list[int] = []
        for regex in reversed(regexes):
            if regex is None:
                return None
            found = self._joined(self._items(regex), found)
        return found[0] if len(found) == 1 else self._number("seq", *found)

    def _joined(self, left: list[int], right: list[int]) -> list[int]:
        """``x`` and ``x{2,3}`` as ``x{3,4}``."""
        while left and right:
            kind, parts = self._entries[right[0]]
            once = self._items(parts[0]) if kind == "rep" else []
            if kind != "rep" or left[-len(once) :] != once:
                break
            least, most = parts[1] + 1, parts[2] if parts[2] == ENDLESS else parts[2] + 1
            left = left[: -len(once)]
            right = [self._number("rep", parts[0], least, most), *right[1:]]
        return left + right

    def alt(self, regexes: Iterable[int | None]) -> int | None:
        """One of these."""
        flat: dict[int, None] = {}
        mask = 0
        for regex in regexes:
            if regex is None:
                continue
            kind, parts = self._entries[regex]
            for part in parts if kind == "alt" else (regex,):
                if self._entries[part][0] == "chars":
                    mask |= self._entries[part][1][0]
                else:
                    flat[part] = None
        found = sorted(flat)
        if (chars := self.chars(mask)) is not None:
            found.append(chars)
        return self._choice(found)

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
                    both = self.seq(self._optional(head), short)
                    rest = [regex for regex in found if regex not in (short, long)]
                    return self.alt([*rest, both])
        return self._number("alt", *found)

    def _optional(self, regex: int | None) -> int | None:
        if regex is None or regex == EMPTY_TEXT:
            return EMPTY_TEXT
        kind, parts = self._entries[regex]
        if kind == "rep" and parts[1] <= 1:
            return self._number("rep", parts[0], 0, parts[2])
        return self._number("rep", regex, 0, 1)

    def star(self, regex: int | None) -> int:
        """Any number of times."""
        if regex is None or regex == EMPTY_TEXT:
            return EMPTY_TEXT
        kind, parts = self._entries[regex]
        if kind == "rep" and parts[1] <= 1 and (parts[2] == ENDLESS or parts[2] == 1):
            regex = parts[0]
        return self._number("rep", regex, 0, ENDLESS)

    # -- Lark -----------------------------------------------------------------------------

    def write(self, regexes: Iterable[int], writer: Writer) -> list[str]:
        """The name of a terminal for each regex."""
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
                text, depth = writer.terminal(text), 0
            texts[regex], depths[regex] = text, depth
        return [writer.terminal(texts[regex]) for regex in wanted]

    def _parts(self, regex: int) -> tuple[int, ...]:
        kind, parts = self._entries[regex]
        return () if kind == "chars" else parts[:1] if kind == "rep" else parts

    def _order(self, wanted: list[int]) -> list[int]:
        """All parts of the regexes, each before what has it as a part."""
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
