"""Grammars of values between tags: strings without quotes, other values as JSON or
Python literals.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

from treadle.chat.tools.formats import Tags
from treadle.chat.tools.grammar_rules import GrammarRules
from treadle.chat.tools.schemas import StringAlternatives, choices, split_strings
from treadle.chat.tools.unquoted_text import limits, not_beginning
from treadle.grammar.json_schema import is_possible


class Tagged:
    """Adds rules to ``rules`` for arguments in the format ``tags``. ``others`` returns the rule of
    a schema's values that are not strings.
    """

    def __init__(self, rules: GrammarRules, tags: Tags, others: Callable[[Any], str]) -> None:
        self._rules = rules
        self._tags = tags
        self._others = others
        self._end = rules.literal(tags.gap + tags.close)

    def argument(self, key: str, schema: Any) -> str:
        """Return the rule body of one argument: its opening tag with ``key``, a value of
        ``schema``, its closing tag.
        """
        tags = self._tags
        rules = self._rules
        texts, others = split_strings(schema)
        if tags.others and texts.null:
            texts = StringAlternatives(texts.schemas)
            others = [{"type": "null"}]
        fine = [each for each in texts.schemas if not limits(each) or is_possible(each)]
        fine = fine if others else texts.schemas
        said = (
            self._texts(StringAlternatives(fine, texts.null), [] if tags.others else others)
            if fine
            else []
        )
        rest = []
        if others:
            own = schema if not texts.schemas else {"anyOf": others}
            rest.append(f"({self._others(own)}) {self._end}")
        heads = [(tags.then, said), *((other, rest) for other in tags.others)]
        if not tags.others:
            heads = [(tags.then, said + rest)]
        made = [
            f"{rules.around(tags.open, key, then + tags.gap)} ({' | '.join(ways)})"
            for then, ways in heads
            if ways
        ]
        return f"({' | '.join(made)})"

    def _texts(self, texts: StringAlternatives, others: Sequence[Any]) -> list[str]:
        """Return the expressions of strings, of null if allowed, and of quoted strings. If the
        value may also be one of ``others``, a string with limits must not begin with a bracket: the
        lexer would then follow only the string.
        """
        before, behind = self._tags.quotes
        words = [word for each in texts.schemas for word in choices(each)]
        nulls = [word for word in ("null", "None") if texts.null and word not in words]
        own = [limits(each) for each in texts.schemas if not choices(each)]
        barred = [not_beginning(before)] if before else []
        if own and all(own):
            barred += [not_beginning(first) for first in _opening_brackets(others)]
        said = self._said(words + nulls, own, barred, self._tags.gap, self._tags.close)
        if before:
            quoted = self._said(words, own, [], "", behind + self._tags.close)
            said += [f"{self._rules.literal(before)} ({' | '.join(quoted)})"]
        return said

    def _said(
        self, words: Sequence[str], others: list[list[str]], barred: list[str], gap: str, close: str
    ) -> list[str]:
        rules = self._rules
        if not others:
            return [rules.around("", word, gap + close) for word in words]
        if not all(others):  # any text is allowed
            return [rules.text_within(barred, gap, close)]
        ways = [f"({' & '.join(each)})" for each in others] + [rules.plain(word) for word in words]
        return [rules.text_within([f"({' | '.join(ways)})", *barred], gap, close)]


def _opening_brackets(schemas: Sequence[Any]) -> list[str]:
    """Return the opening brackets of the objects and arrays that any of these schemas allows."""
    kinds: set[str] = set()
    for schema in schemas:
        named = schema.get("type", ["object", "array"]) if not choices(schema) else []
        kinds |= {named} if isinstance(named, str) else set(named)
    return [first for kind, first in (("object", "{"), ("array", "[")) if kind in kinds]
