"""Writes grammars in the Lark notation of ``llguidance``.

Names in capitals are terminals: regular expressions, of which the lexer takes the longest match.
Other names are rules, for which the parser follows all alternatives.
"""

from __future__ import annotations

import re
from collections.abc import Sequence

from treadle.grammar.gbnf import (
    Alternatives,
    Chars,
    Concatenation,
    GbnfRules,
    Node,
    Ranges,
    Repeat,
    RuleRef,
    Special,
)

MAX_LEAD = 300  # names in a chain of references; llguidance's own stack ends at some 1,500
MAX_NESTED = 8  # nesting of parentheses; llguidance has 30, at about 4 steps for each

_TEXTS = re.compile(r'/(?:[^/\\]|\\.)*/|"[^"]*"|<[^>]*>')
_NAMES = re.compile(r"[A-Za-z]\w*")


class LarkWriter:
    """Collects the rules and terminals of a grammar; equal terminals become one. ``str()`` of it is
    the grammar in Lark notation.
    """

    def __init__(self) -> None:
        self._terminals: dict[str, str] = {}
        self._bodies: dict[str, str] = {}

    def rule(self, name: str, alternatives: Sequence[str]) -> None:
        """Define a rule or a terminal by its alternatives, in Lark notation."""
        self._bodies[name] = " | ".join(alternatives)

    def terminal(self, text: str) -> str:
        """Return the name of the terminal with this body, adding it if it is new."""
        if text not in self._terminals:
            self._terminals[text] = f"T{len(self._terminals)}"
            self._bodies[self._terminals[text]] = text
        return self._terminals[text]

    def lead(self) -> int:
        """Return the length of the longest chain of references from ``start``, on which
        llguidance's recursion depends.
        """
        edges = {name: _NAMES.findall(_TEXTS.sub(" ", body)) for name, body in self._bodies.items()}
        seen = {"start"}
        path = [iter(edges["start"])]
        deepest = 1
        while path:
            name = next((name for name in path[-1] if name not in seen), None)
            if name is None:
                path.pop()
            else:
                seen.add(name)
                path.append(iter(edges[name]))
                deepest = max(deepest, len(path))
        return deepest

    def __str__(self) -> str:
        return "\n".join(f"{name}: {body}" for name, body in self._bodies.items())


def by_characters(rules: GbnfRules) -> LarkWriter:
    """Return the grammar with every character as a lexeme, so that only the parser decides."""
    names = {name: rule_name(i, name) for i, name in enumerate(rules.body)} | {"root": "start"}
    return _Plain(rules, names, "n").writer


def as_one_regex(rules: GbnfRules) -> LarkWriter:
    """Return a grammar without recursion and special tokens, written as a single terminal."""
    writer = _Plain(rules, {name: f"R{i}" for i, name in enumerate(rules.body)}, "N").writer
    writer.rule("start", [f"R{list(rules.body).index('root')}"])
    return writer


class _Plain:
    """Writes the rules of a grammar as they are, without lexeme analysis."""

    def __init__(self, rules: GbnfRules, names: dict[str, str], prefix: str) -> None:
        self.writer = LarkWriter()
        self._names = names
        self._prefix = prefix  # of the names of a rule's parts
        self._n_parts = 0
        for name, body in rules.body.items():
            self.writer.rule(names[name], [self._text(body)[0]])

    def _text(self, node: Node) -> tuple[str, int]:
        """Return a node as Lark text, and the depth of that text's nested parentheses."""
        match node:
            case Chars(ranges):
                return f"/{class_of(ranges)}/", 0
            case Special(text):
                return text, 0
            case RuleRef(name):
                return self._names[name], 0
            case Repeat(_, _, 0):
                return '""', 0
            case Repeat(item, least, most):
                text, depth = self._text(item)
                text = f"({text})" if isinstance(item, Repeat) else text
                return text + counts(least, most), depth + 1
            case Concatenation(items) | Alternatives(items):
                parts = [self._text(item) for item in items]
                between = " " if isinstance(node, Concatenation) else " | "
                text = between.join(text for text, _ in parts) or '""'
                depth = 1 + max((depth for _, depth in parts), default=0)
                if depth <= MAX_NESTED:
                    return f"({text})", depth
                self._n_parts += 1
                name = f"{self._prefix}{self._n_parts}"
                self.writer.rule(name, [text])
                return name, 0


def rule_name(i: int, name: str) -> str:
    """Return the name in Lark of rule number ``i``: Lark allows fewer characters than GBNF."""
    return f"r{i}_{re.sub('[^a-z0-9]', '_', name.lower())}"


def counts(least: int, most: int | None) -> str:
    """Return the suffix for ``least`` to ``most`` repetitions: "*", "+", "?" or "{2,5}"."""
    signs = {(0, None): "*", (1, None): "+", (0, 1): "?"}
    return signs.get((least, most)) or f"{{{least},{'' if most is None else most}}}"


def class_of(ranges: Ranges) -> str:
    """Return the regular expression of one character in these ranges."""
    if len(ranges) == 1 and ranges[0][0] == ranges[0][1]:
        return _escaped(ranges[0][0])
    return f"[{''.join(f'{_escaped(low)}-{_escaped(high)}' for low, high in ranges)}]"


def _escaped(code: int) -> str:
    """Return the regular expression of one character: itself if alphanumeric, else an escape."""
    return chr(code) if code < 128 and chr(code).isalnum() else f"\\x{{{code:X}}}"
