"""Builder of grammar rules in llguidance's notation."""

from __future__ import annotations

import json
from collections.abc import Sequence

from treadle.chat.tools.unquoted_text import fits, without
from treadle.tokenizer.tokenizer import Tokenizer

ANY_TEXT = "/(?s:.*)/"
MAX_PARTS = 64  # most bits of state that a rule of llguidance may have
SOME_TEXT = r"/(?s:.*)[^ \n](?s:.*)/"


class GrammarRules:
    """Collects the rules of one grammar, for the vocabulary of ``tokenizer``."""

    def __init__(self, tokenizer: Tokenizer) -> None:
        self._tokenizer = tokenizer
        self._bodies: dict[str, str] = {}

    def add(self, body: str, attribute: str = "") -> str:
        """Add a rule and return its name. ``attribute``: text after its name, such as
        ``[suffix="]"]``.
        """
        name = f"r{len(self._bodies)}"
        self._bodies[name] = f"{name}{attribute}: {body}"
        return name

    def place(self) -> str:
        """Add a rule without a body and return its name; ``fill`` sets the body, which may refer to
        the rule.
        """
        return self.add("")

    def fill(self, name: str, body: str) -> None:
        """Set the body of a rule from ``place``."""
        self._bodies[name] = f"{name}: {body}"

    def literal(self, text: str) -> str:
        """Return an expression for this text; control tokens that it spells become those tokens."""
        return self.around(text, "")

    def around(self, before: str, text: str, behind: str = "") -> str:
        """Return an expression for ``before``, ``text`` and ``behind``. Control tokens spelt in
        ``before`` and ``behind`` become those tokens; adjacent text becomes one lexeme, because the
        lexer takes the longest of several lexemes that begin alike.
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
        """Return an expression for exactly this text, with control tokens as plain text."""
        return json.dumps(text, ensure_ascii=False)

    def in_any_order(self, parts: Sequence[tuple[str, bool]], end: str, between: str = "") -> str:
        """Return a rule of ``parts`` (body, whether required) in any order, each at most once, then
        ``end``. ``between`` precedes all parts but the first. More than MAX_PARTS parts must keep
        their order.
        """
        if len(parts) > MAX_PARTS:
            return self._in_order(parts, end, between)
        parts = sorted(parts, key=lambda part: not part[1])  # the required bits form a range
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
        # bodies of the rest: before any part, and after one or more parts
        first = end
        more = end
        for body, needed in reversed(parts):
            pair = f"{body} {self.add(more)}"
            behind = f"{between} {pair}"
            first = pair if needed else f"{pair} | {self.add(first)}"
            more = behind if needed else f"{behind} | {self.add(more)}"
        return self.add(first)

    def text_until(self, mark: str) -> str:
        """Return an expression for any text up to and including the first ``mark``."""
        cut = self._tokenizer.cut(mark)
        if len(cut) == 1 and isinstance(cut[0], int):  # no other text is a control token
            return f"{self.add(ANY_TEXT)} <[{cut[0]}]>"
        return self.add(ANY_TEXT, f"[suffix={json.dumps(mark, ensure_ascii=False)}]")

    def text_within(self, limits: Sequence[str], gap: str, mark: str) -> str:
        """Return an expression for text that matches all regular expressions of ``limits``, then
        ``gap`` and the first ``mark``. Without limits, or if llguidance cannot follow them, any
        text may precede the mark.
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
        """Add a terminal (a regular expression for the lexer) and return its name. Only terminals
        can be intersected (``&``).
        """
        name = f"T{len(self._bodies)}"
        self._bodies[name] = f"{name}: {body}"
        return name

    def source(self, start: str) -> str:
        """Return the whole grammar; ``start``: body of its start rule."""
        return "\n".join([f"start: {start}", *self._bodies.values()])
