"""GBNF read the slow way: every text that each part can match, until nothing new is found."""

from __future__ import annotations

from treadle.grammar.gbnf import (
    Alternatives,
    Chars,
    Concatenation,
    GbnfRules,
    Node,
    Repeat,
    RuleRef,
)


def matches(rules: GbnfRules, text: str) -> bool:
    """Whether the whole text is in the language of rule ``root``."""
    ends: dict[tuple[str, int], frozenset[int]] = {}
    codes = [ord(c) for c in text]

    def found(node: Node, start: int) -> frozenset[int]:
        match node:
            case Chars(ranges):
                inside = start < len(codes) and any(a <= codes[start] <= b for a, b in ranges)
                return frozenset([start + 1] if inside else [])
            case RuleRef(name):
                return ends.setdefault((name, start), frozenset())
            case Alternatives(items):
                return frozenset().union(*(found(item, start) for item in items))
            case Concatenation(items):
                now = frozenset([start])
                for item in items:
                    now = frozenset().union(*(found(item, at) for at in now))
                return now
            case Repeat(item, least, most):
                now = all_ends = frozenset([start])
                if least:
                    all_ends = frozenset()
                n = 0
                seen: set[frozenset[int]] = set()
                while now and (most is None or n < most) and (n < least or now not in seen):
                    seen.add(now)
                    now = frozenset().union(*(found(item, at) for at in now))
                    n += 1
                    if n >= least:
                        all_ends |= now
                return all_ends
        raise AssertionError(node)

    while True:
        ends.setdefault(("root", 0), frozenset())
        before = dict(ends)
        for name, start in before:
            ends[name, start] |= found(rules.body[name], start)
        if ends == before:
            return len(text) in ends["root", 0]
