"""Rules of a grammar as finite automata that call each other.

A state is a regular expression of the text that may still follow, over characters and calls of
rules. Its edges are Brzozowski derivatives, and equal expressions are one state.

A rule that ends with another one (``s ::= "a" s | ""``) needs no call there: its automaton
continues in the other's states. So a right-recursive grammar is one automaton without calls.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import field

from treadle.base.fast_classes import dataclass
from treadle.grammar.char_classes import Alphabet
from treadle.grammar.gbnf import (
    Alternatives,
    Chars,
    Concatenation,
    GbnfRules,
    Node,
    Repeat,
    RuleRef,
    Special,
)
from treadle.grammar.regex import EMPTY_TEXT, ENDLESS, Call, Regexes, TooLargeError
from treadle.grammar.rule_graph import components, reachable, recursive, refs, unrolled

MAX_DFA_STATES = 4_000
MAX_REGEXES = 100_000  # of all states and their parts


@dataclass
class Automaton:
    """Automaton of one rule. State 0 is its start; each list has one entry for each state.

    ``chars``: edges (mask of characters, next state) with disjoint masks; ``calls``: edges (rule or
    special token, next state), at most one for each rule or token; ``accepts``: whether the rule
    may end at the state.
    """

    chars: list[list[tuple[int, int]]] = field(default_factory=list)
    calls: list[list[tuple[Call, int]]] = field(default_factory=list)
    accepts: list[bool] = field(default_factory=list)

    def __len__(self) -> int:
        return len(self.accepts)


def build_automata(rules: GbnfRules) -> tuple[dict[str, Automaton], Alphabet]:
    """Return an automaton for ``root`` and each called rule, by name, and their alphabet. Raises
    TooLargeError for an automaton or expressions beyond the size limits.

    A rule that no text can complete has no automaton, and no automaton calls it.
    """
    bodies = unrolled(reachable(rules.body))
    alphabet = Alphabet(bodies.values())
    builder = _Builder(bodies, alphabet)
    found: dict[str, Automaton] = {}
    waiting = ["root"] if "root" in builder.rules else []
    while waiting:
        name = waiting.pop()
        if name not in found:
            found[name] = builder.automaton(name)
            called = (call for calls in found[name].calls for call, _ in calls)
            waiting += [call for call in called if isinstance(call, str)]
    return found, alphabet


class _Builder:
    """Builds the regular expressions and automata of all rules that some text can complete."""

    def __init__(self, bodies: dict[str, Node], alphabet: Alphabet) -> None:
        self._alphabet = alphabet
        self._store = Regexes(alphabet, MAX_REGEXES)
        self._inner = recursive(bodies)
        self.rules: dict[str, int] = {}
        for part in components({name: refs(body) for name, body in bodies.items()}):
            n_known = -1
            while len(self.rules) > n_known:  # repeat until no further rule can be completed
                n_known = len(self.rules)
                found = {name: self._regex(bodies[name]) for name in part}
                self.rules |= {name: regex for name, regex in found.items() if regex is not None}

    def _regex(self, node: Node) -> int | None:
        store = self._store
        match node:
            case Chars(ranges):
                return store.chars(self._alphabet.mask(ranges))
            case Special():
                return store.call(node)
            case RuleRef(name) if name in self._inner and name in self.rules:
                return store.call(name)
            case RuleRef(name):
                return self.rules.get(name)
            case Concatenation(items):
                return store.seq(*map(self._regex, items))
            case Alternatives(items):
                return store.either(map(self._regex, items))
            case Repeat(item, least, most):
                return store.repeat(self._regex(item), least, ENDLESS if most is None else most)

    def automaton(self, name: str) -> Automaton:
        """Return the automaton of the rule ``name``. Raises TooLargeError beyond the limit of
        states.
        """
        found = Automaton()
        numbers: dict[int, int] = {}
        states: list[int] = []

        def number(ways: Iterable[int]) -> int:
            state = self._store.either(ways)
            assert state is not None
            if state not in numbers:
                if len(numbers) >= MAX_DFA_STATES:
                    raise TooLargeError
                numbers[state] = len(numbers)
                states.append(state)
            return numbers[state]

        number([self.rules[name]])
        for state in states:
            edges, accepts = self._edges(state)
            chars = _disjoint({first: r for first, r in edges.items() if isinstance(first, int)})
            calls = {call: r for call, r in edges.items() if not isinstance(call, int)}
            found.chars.append([(mask, number(rests)) for mask, rests in chars])
            found.calls.append([(call, number(rests)) for call, rests in calls.items()])
            found.accepts.append(accepts)
        return found

    def _edges(self, state: int) -> tuple[dict[int | Call, set[int]], bool]:
        """Return the edges from the regex ``state``: by the next character mask or call, the
        numbers of the regexes that may remain after it; and whether the rule may end here. A call
        after which nothing remains is replaced by the edges of the called rule.
        """
        found: dict[int | Call, set[int]] = {}
        opened = [state]
        for regex in opened:  # grows in the loop
            for first, rest in self._store.ways(regex):
                if isinstance(first, str) and rest == EMPTY_TEXT:
                    opened += [self.rules[first]] * (self.rules[first] not in opened)
                else:
                    found.setdefault(first, set()).add(rest)
        return found, any(map(self._store.is_empty.__getitem__, opened))


def _disjoint(edges: dict[int, set[int]]) -> list[tuple[int, set[int]]]:
    """Split edges with overlapping character masks into disjoint ones: (mask, the regexes that may
    follow).
    """
    parts: list[tuple[int, set[int]]] = []
    for mask, rests in edges.items():
        split: list[tuple[int, set[int]]] = []
        for other, others in parts:
            if both := other & mask:
                split.append((both, others | rests))
            if other & ~mask:
                split.append((other & ~mask, others))
            mask &= ~other
        if mask:
            split.append((mask, rests))
        parts = split
    return parts
