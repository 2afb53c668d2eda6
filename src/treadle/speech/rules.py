"""The rules of a grammar in llguidance's notation."""

from __future__ import annotations

import json
from collections.abc import Sequence

from treadle.speech.texts import fits, without
from treadle.text.tokenizer import Tokenizer

ANY_TEXT = "/(?s:.*)/"
SOME_TEXT = r"/(?s:.*)[^ \n](?s:.*)/"


class Rules:
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
        parts = [
            f"<[{part}]>" if isinstance(part, int) else json.dumps(part, ensure_ascii=False)
            for part in self._tokenizer.cut(text)
        ]
        return " ".join(parts) or '""'

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
