"""Rules of a grammar as finite automata that call each other.

A rule that only ends in another one (``s ::= "a" s | ""``) needs no call: its automaton goes on in
the other's states. So a grammar whose recursion is at the right is one automaton without calls.
"""

from __future__ import annotations

from collections.abc import Hashable, Iterable
from dataclasses import dataclass, field

from treadle.text.alphabet import Alphabet
from treadle.text.gbnf import (
    Alt,
    Chars,
    Node,
    Ref,
    Repeat,
    Rules,
    Seq,
    Special,
)
from treadle.text.rule_graph import reachable, recursive, unrolled

MAX_STATES = 20_000  # of one automaton before it is made deterministic
MAX_DFA_STATES = 4_000
MAX_MERGED = 400  # states; it takes time by the square of them


class TooLargeError(Exception):
    """The grammar has no automata of a reasonable size."""


@dataclass
class Automaton:
    """One rule. State 0 is its beginning; all lists are by state.

    ``chars``: (characters, next state), at most one for a character; ``calls``: (rule or special
    token, next state), at most one for a name; ``accepts``: whether the rule may end here.
    """

    chars: list[list[tuple[int, int]]] = field(default_factory=list)
    calls: list[list[tuple[str | Special, int]]] = field(default_factory=list)
    accepts: list[bool] = field(default_factory=list)

    def __len__(self) -> int:
        return len(self.accepts)


def build_automata(rules: Rules) -> tuple[dict[str, Automaton], Alphabet]:
    """An automaton for ``root`` and each rule that is called. Raises TooLargeError.

    A rule that can never be finished is not among them, nor is any call of one.
    """
    bodies = unrolled(reachable(rules.body))
    alphabet = Alphabet(bodies.values())
    inner = recursive(bodies)
    found: dict[str, Automaton] = {}
    waiting = ["root"]
    while waiting:
        name = waiting.pop()
        if name not in found:
            nfa = _Nfa(bodies, inner, alphabet, name)
            found[name] = nfa.determined()
            called = (call for calls in found[name].calls for call, _ in calls)
            waiting += [call for call in called if isinstance(call, str)]
    return _finished(found), alphabet


class _Nfa:
    """The automaton of one rule, with several ways at once, and steps without a character."""

    def __init__(
        self, bodies: dict[str, Node], inner: set[str], alphabet: Alphabet, name: str
    ) -> None:
        self._alphabet = alphabet
        self._free: list[list[int]] = []  # by state: where it leads to at once
        self._chars: list[list[tuple[int, int]]] = []
        self._calls: list[list[tuple[str | Special, int]]] = []
        self._bodies = bodies
        self._inner = inner
        self._final = self._state()
        self._entries: dict[str, int] = {}
        self._work: list[tuple[Node, int, int]] = []
        self._start = self._entry(name)
        while self._work:
            self._build(*self._work.pop())

    def _state(self) -> int:
        if len(self._free) >= MAX_STATES:
            raise TooLargeError
        self._free.append([])
        self._chars.append([])
        self._calls.append([])
        return len(self._free) - 1

    def _entry(self, name: str) -> int:
        """Where a rule begins with which this one ends."""
        if name not in self._entries:
            self._entries[name] = self._state()
            self._work.append((self._bodies[name], self._entries[name], self._final))
        return self._entries[name]

    def _build(self, node: Node, start: int, end: int) -> None:
        match node:
            case Chars(ranges):
                self._chars[start].append((self._alphabet.mask(ranges), end))
            case Special():
                self._calls[start].append((node, end))
            case Ref(name) if end == self._final:
                self._free[start].append(self._entry(name))
            case Ref(name) if name in self._inner:
                self._calls[start].append((name, end))
            case Ref(name):
                self._work.append((self._bodies[name], start, end))
            case Alt(items):
                self._work += [(item, start, end) for item in items]
            case Seq(items):
                self._chain(items, start, end)
            case Repeat(item, least, most):
                self._repeat(item, least, most, start, end)

    def _chain(self, items: tuple[Node, ...], start: int, end: int) -> None:
        if not items:
            self._free[start].append(end)
        for i, item in enumerate(items):
            to = end if i == len(items) - 1 else self._state()
            self._work.append((item, start, to))
            start = to

    def _repeat(self, item: Node, least: int, most: int | None, start: int, end: int) -> None:
        if max(least, most or 0) > MAX_STATES:
            raise TooLargeError
        if (least, most) == (0, 1):
            self._work.append((item, start, end))
            self._free[start].append(end)
            return
        for _ in range(least):
            to = self._state()
            self._work.append((item, start, to))
            start = to
        if most is None:
            loop = self._state()
            self._free[start].append(loop)
            self._free[loop].append(end)
            self._work.append((item, loop, loop))
            return
        for _ in range(most - least):
            to = self._state()
            self._free[start].append(end)
            self._work.append((item, start, to))
            start = to
        self._free[start].append(end)

    # -- one way at a time --------------------------------------------------------------

    def determined(self) -> Automaton:
        """The same rule with one next state for a character, and as few states as that takes."""
        found = Automaton()
        numbers: dict[frozenset[int], int] = {}
        waiting: list[frozenset[int]] = []

        def number(states: Iterable[int]) -> int:
            closed = self._closed(states)
            if closed not in numbers:
                if len(numbers) >= MAX_DFA_STATES:
                    raise TooLargeError
                numbers[closed] = len(numbers)
                waiting.append(closed)
            return numbers[closed]

        number([self._start])
        for states in waiting:
            calls: dict[str | Special, set[int]] = {}
            for call, to in (edge for state in states for edge in self._calls[state]):
                calls.setdefault(call, set()).add(to)
            edges = (edge for state in states for edge in self._chars[state])
            found.chars.append([(mask, number(to)) for mask, to in _disjoint(edges)])
            found.calls.append([(call, number(to)) for call, to in calls.items()])
            found.accepts.append(self._final in states)
        return found

    def _closed(self, states: Iterable[int]) -> frozenset[int]:
        """The states and all that they lead to at once, without those that only do that."""
        seen = set(states)
        waiting = list(seen)
        while waiting:
            new = [to for to in self._free[waiting.pop()] if to not in seen]
            seen.update(new)
            waiting += new
        return frozenset(
            state
            for state in seen
            if state == self._final or self._chars[state] or self._calls[state]
        )


def _disjoint(edges: Iterable[tuple[int, int]]) -> list[tuple[int, frozenset[int]]]:
    """Edges (characters, state), any of which may overlap, as (characters, states) apart."""
    by_state: dict[int, int] = {}
    for mask, to in edges:
        by_state[to] = by_state.get(to, 0) | mask
    parts: list[tuple[int, frozenset[int]]] = []
    for to, mask in by_state.items():
        split: list[tuple[int, frozenset[int]]] = []
        for other, states in parts:
            if both := other & mask:
                split.append((both, states | {to}))
            if other & ~mask:
                split.append((other & ~mask, states))
            mask &= ~other
        if mask:
            split.append((mask, frozenset([to])))
        parts = split
    return parts


def _finished(automata: dict[str, Automaton]) -> dict[str, Automaton]:
    """Without the states from which no end can be reached, and with equal states merged."""
    done: set[str] = set()
    while True:
        live = {name: _live(automaton, done) for name, automaton in automata.items()}
        if done == (done := {name for name in automata if 0 in live[name]}):
            break
    return {name: _merged(_kept(automata[name], live[name], done)) for name in done}


def _live(automaton: Automaton, done: set[str]) -> set[int]:
    """The states from which an end can be reached through the rules in ``done``."""
    back: dict[int, list[int]] = {}
    for state in range(len(automaton)):
        calls = [
            to for call, to in automaton.calls[state] if not isinstance(call, str) or call in done
        ]
        for to in [*(to for _, to in automaton.chars[state]), *calls]:
            back.setdefault(to, []).append(state)
    found = {state for state in range(len(automaton)) if automaton.accepts[state]}
    waiting = list(found)
    while waiting:
        new = {state for state in back.get(waiting.pop(), []) if state not in found}
        found |= new
        waiting += new
    return found


def _kept(automaton: Automaton, live: set[int], done: set[str]) -> Automaton:
    """What is left with some of the states, of which 0 is one, and some of the rules."""
    number = {state: i for i, state in enumerate(sorted(live))}
    kept = Automaton()
    for state in number:
        chars, calls = automaton.chars[state], automaton.calls[state]
        calls = [(call, to) for call, to in calls if not isinstance(call, str) or call in done]
        kept.chars.append([(mask, number[to]) for mask, to in chars if to in live])
        kept.calls.append([(call, number[to]) for call, to in calls if to in live])
        kept.accepts.append(automaton.accepts[state])
    return kept


def _merged(automaton: Automaton) -> Automaton:
    """Equal states as one (Moore): those that nothing tells apart."""
    if len(automaton) > MAX_MERGED:
        return automaton
    block = [int(accepts) for accepts in automaton.accepts]
    while True:
        known: dict[Hashable, int] = {}
        edges = [_joined(automaton, state, block) for state in range(len(automaton))]
        new = [known.setdefault((b, *e), len(known)) for b, e in zip(block, edges, strict=True)]
        if len(known) == len(set(block)):
            break
        block = new
    # ``new`` numbers the blocks by their first state, so that 0 stays the beginning.
    merged = Automaton()
    for i, state in enumerate(new.index(b) for b in range(len(known))):
        assert new[state] == i
        chars, calls = _joined(automaton, state, new)
        merged.chars.append(list(chars))
        merged.calls.append(list(calls))
        merged.accepts.append(automaton.accepts[state])
    return merged


def _joined(
    automaton: Automaton, state: int, block: list[int]
) -> tuple[tuple[tuple[int, int], ...], tuple[tuple[str | Special, int], ...]]:
    """The edges of a state between blocks."""
    masks: dict[int, int] = {}
    for mask, to in automaton.chars[state]:
        masks[block[to]] = masks.get(block[to], 0) | mask
    calls = sorted(((call, block[to]) for call, to in automaton.calls[state]), key=str)
    return tuple(sorted((mask, to) for to, mask in masks.items())), tuple(calls)
