"""The rules of a grammar in llguidance's notation."""

from __future__ import annotations

import json
from collections.abc import Sequence

from treadle.chat.tools.unquoted_text import fits, without
from treadle.tokenizer.tokenizer import Tokenizer

ANY_TEXT = "/(?s:.*)/"
MAX_PARTS = 64  # bits that a rule of llguidance's may have
SOME_TEXT = r"/(?s:.*)[^ \n](?s:.*)/"


class GrammarRules:
    """Collects the rules of a grammar for one vocabulary."""

    def __init__(self, tokenizer: Tokenizer) -> None:
        self._tokenizer = tokenizer
        self._bodies: dict[str, str] = {}

    def add(self, body: str, attribute: str = "") -> str:
        """The name of a rule with this body."""
        name = f"r{len(self._bodies)}"
        self._bodies[name] = f"{name}{attribute}: {body}"
        return name

    def place(self) -> str:
        """The name of a rule whose body comes later, by ``fill``: it may name the rule."""
        return self.add("")

    def fill(self, name: str, body: str) -> None:
        """Give a rule its body."""
        self._bodies[name] = f"{name}: {body}"

    def literal(self, text: str) -> str:
        """Exactly this text; control tokens that it spells are those tokens."""
        return self.around(text, "")

    def around(self, before: str, text: str, behind: str = "") -> str:
        """A text between two marks: in marks, what spells a control token is that token. Text side
        by side is one lexeme: the lexer takes the longest of those that begin alike.
        """
        made: list[str | int] = []
        for part in (*self._tokenizer.cut(before), text, *self._tokenizer.cut(behind)):
            if made and isinstance(part, str) and isinstance(made[-1], str):
                made[-1] += part
            else:
                made.append(part)
        said = [f"<[{part}]>" if isinstance(part, int) else self.plain(part) for part in made]
        return " ".join(each for each in said if each != '""') or '""'

    def plain(self, text: str) -> str:
        """Exactly this text, without control tokens: a name, or a word of a schema."""
        return json.dumps(text, ensure_ascii=False)

    def in_any_order(self, parts: Sequence[tuple[str, bool]], end: str, between: str = "") -> str:
        """Parts in any order, each at most once, with ``between`` before all but the first, then
        ``end``. Those that are needed must be there. More than ``MAX_PARTS`` keep their order.
        """
        if len(parts) > MAX_PARTS:
            return self._in_order(parts, end, between)
        parts = sorted(parts, key=lambda part: not part[1])  # a range of bits must be set
        n_needed = sum(needed for _, needed in parts)
        whole = f"{end} %if is_ones([0:{n_needed}])" if n_needed else end
        rules = [self.add(body) for body, _ in parts]
        if not rules:
            return end
        more = f"r{len(self._bodies)}"
        behind = [
            f"{between} {rule} {more}::set_bit({bit}) %if bit_clear({bit})"
            for bit, rule in enumerate(rules)
        ]
        self.add(" | ".join([whole, *behind]), "::_")
        first = [f"{rule} {more}::{1 << bit:#x}" for bit, rule in enumerate(rules)]
        return self.add(" | ".join([*first, *([] if n_needed else [end])]))

    def _in_order(self, parts: Sequence[tuple[str, bool]], end: str, between: str) -> str:
        first, more = end, end  # what may follow, before and behind the first
        for body, needed in reversed(parts):
            pair = f"{body} {self.add(more)}"
            behind = f"{between} {pair}"
            first = pair if needed else f"{pair} | {self.add(first)}"
            more = behind if needed else f"{behind} | {self.add(more)}"
        return self.add(first)

    def text_until(self, mark: str) -> str:
        """Any text, and the first such mark behind it."""
        cut = self._tokenizer.cut(mark)
        if len(cut) == 1 and isinstance(cut[0], int):  # no other text is a control token
            return f"{self.add(ANY_TEXT)} <[{cut[0]}]>"
        return self.add(ANY_TEXT, f"[suffix={json.dumps(mark, ensure_ascii=False)}]")

    def text_within(self, limits: Sequence[str], gap: str, mark: str) -> str:
        """Text that matches all of these, then ``gap`` and the first such mark. Where there are no
        limits, or no grammar can follow them, any text up to the mark.
        """
        *before, last = self._tokenizer.cut(gap + mark)
        own = [] if isinstance(last, int) else [without(gap + mark)]
        unmarked = all(isinstance(part, str) for part in before)
        if not limits or not unmarked or not fits(*limits, *own):
            return self.text_until(mark)
        if isinstance(last, int):
            rest = json.dumps("".join(map(str, before)), ensure_ascii=False)
            text = self.terminal(f"({' & '.join(limits)}) {rest}")
            return f"{text} <[{last}]>"
        text = self.terminal(" & ".join([*limits, *own]))
        return self.add(text, f"[suffix={json.dumps(gap + mark, ensure_ascii=False)}]")

    def terminal(self, body: str) -> str:
        """The name of a terminal with this body: of these alone there are intersections."""
        name = f"T{len(self._bodies)}"
        self._bodies[name] = f"{name}: {body}"
        return name

    def source(self, start: str) -> str:
        """The whole grammar."""
        return "\n".join([f"start: {start}", *self._bodies.values()])
