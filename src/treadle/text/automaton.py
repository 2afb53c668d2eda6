"""Rules of a grammar as finite automata that call each other.

A rule that only ends in another one (``s ::= "a" s | ""``) needs no call: its automaton goes on in
the other's states. So a grammar whose recursion is at the right is one automaton without calls.
Sets of characters are bits of an int, one for each interval that some class begins or ends at.
"""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Hashable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import pairwise
from typing import TypeVar

from treadle.text.gbnf import (
    EMPTY,
    Alt,
    Chars,
    Node,
    Ranges,
    Ref,
    Repeat,
    Rules,
    Seq,
    Special,
    normalized,
)

T = TypeVar("T", bound=Hashable)

MAX_STATES = 20_000  # of one automaton before it is made deterministic
MAX_DFA_STATES = 4_000
MAX_MERGED = 400  # states; it takes time by the square of them


class TooLargeError(Exception):
    """The grammar has no automata of a reasonable size."""


class Alphabet:
    """The intervals of characters that a grammar tells apart."""

    def __init__(self, bodies: Iterable[Node]) -> None:
        classes = {
            node.ranges for body in bodies for node in nodes(body) if isinstance(node, Chars)
        }
        ends = {end for ranges in classes for low, high in ranges for end in (low, high + 1)}
        self._ends = sorted(ends)
        self._masks: dict[Ranges, int] = {}
        self._like: dict[int, int] = {}
        parts = pairwise(self._ends)
        bounds = [(_first_byte(low), _first_byte(end - 1)) for low, end in parts]
        self._first_bytes = [(2 << last) - (1 << first) for first, last in bounds]  # as bits

    def mask(self, ranges: Ranges) -> int:
        """The bits of a class."""
        if ranges not in self._masks:
            found = 0
            for low, high in ranges:
                first, end = (bisect_left(self._ends, x) for x in (low, high + 1))
                found |= ((1 << (end - first)) - 1) << first
            self._masks[ranges] = found
        return self._masks[ranges]

    def like(self, mask: int) -> int:
        """The characters whose UTF-8 begins with a byte with which one of these begins."""
        if mask not in self._like:
            bytes_ = 0
            for i in _bits(mask):
                bytes_ |= self._first_bytes[i]
            found = 0
            for i, first_bytes in enumerate(self._first_bytes):
                found |= (1 << i) * bool(first_bytes & bytes_)
            self._like[mask] = found
        return self._like[mask]

    def ranges(self, mask: int) -> Ranges:
        """The class of some bits."""
        ends = self._ends
        return normalized([(ends[i], ends[i + 1] - 1) for i in _bits(mask)])


def _bits(mask: int) -> list[int]:
    return [i for i in range(mask.bit_length()) if mask >> i & 1]


def _first_byte(code: int) -> int:
    """The first byte of a character in UTF-8; a surrogate's stands for its neighbours'."""
    return chr(code).encode("utf-8", "surrogatepass")[0]


def nodes(body: Node) -> Iterator[Node]:
    """Every node of a tree, parents first."""
    waiting = [body]
    while waiting:
        node = waiting.pop()
        yield node
        if isinstance(node, Seq | Alt):
            waiting += reversed(node.items)
        elif isinstance(node, Repeat):
            waiting.append(node.item)


def refs(body: Node) -> list[str]:
    """The rules that a tree names, each once, in order."""
    return list(dict.fromkeys(node.name for node in nodes(body) if isinstance(node, Ref)))


def components(edges: Mapping[T, Sequence[T]]) -> list[list[T]]:
    """The strongly connected parts of a graph, each after all that it leads to (Tarjan)."""
    index: dict[T, int] = {}
    low: dict[T, int] = {}
    stack: list[T] = []
    on_stack: set[T] = set()
    found: list[list[T]] = []
    for root in edges:
        if root in index:
            continue
        path = [(root, iter(edges[root]))]
        index[root] = low[root] = len(index)
        stack.append(root)
        on_stack.add(root)
        while path:
            node, rest = path[-1]
            for other in rest:
                if other not in index:
                    index[other] = low[other] = len(index)
                    stack.append(other)
                    on_stack.add(other)
                    path.append((other, iter(edges[other])))
                    break
                if other in on_stack:
                    low[node] = min(low[node], index[other])
            else:
                path.pop()
                if path:
                    low[path[-1][0]] = min(low[path[-1][0]], low[node])
                if low[node] == index[node]:
                    part: list[T] = []
                    while not part or part[-1] != node:
                        part.append(stack.pop())
                    on_stack.difference_update(part)
                    found.append(part)
    return found


def recursive(bodies: dict[str, Node]) -> set[str]:
    """The rules that lead back to themselves."""
    edges = {name: refs(bodies[name]) for name in bodies}
    loops = {name for name in bodies if name in edges[name]}
    parts = [part for part in components(edges) if len(part) > 1]
    return loops | {name for part in parts for name in part}


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

    def nexts(self, state: int) -> list[int]:
        """Where a state leads to."""
        return [to for _, to in self.chars[state]] + [to for _, to in self.calls[state]]


def build_automata(rules: Rules) -> tuple[dict[str, Automaton], Alphabet]:
    """An automaton for ``root`` and each rule that is called. Raises TooLargeError.

    A rule that can never be finished is not among them, nor is any call of one.
    """
    bodies = _unrolled(reachable(rules.body))
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


def reachable(bodies: dict[str, Node]) -> dict[str, Node]:
    """The rules that ``root`` leads to."""
    found: dict[str, Node] = {}
    waiting = ["root"]
    while waiting:
        name = waiting.pop()
        if name not in found:
            found[name] = bodies[name]
            waiting += reversed(refs(bodies[name]))
    return found


def _unrolled(bodies: dict[str, Node]) -> dict[str, Node]:
    """``node*`` for a recursive rule as a rule of its own: ``(what node is)*``.

    In ``node ::= "<" node* ">" | [^<>]+`` two texts may follow each other, so every letter could
    be the end of one. The repetition of all of them is one text.
    """
    inner = recursive(bodies)
    stars: dict[Node, str] = {}
    done: dict[str, Node] = {}

    def units(node: Node, seen: set[str]) -> list[Node]:
        if isinstance(node, Alt):
            return [unit for item in node.items for unit in units(item, seen)]
        if isinstance(node, Ref) and node.name in inner:
            if node.name in seen:
                return []  # it adds nothing to itself
            seen.add(node.name)
            return units(bodies[node.name], seen)
        return [node]

    def rewrite(node: Node) -> Node:
        if isinstance(node, Seq | Alt):
            return type(node)(tuple(map(rewrite, node.items)))
        if not isinstance(node, Repeat):
            return node
        items = node.item.items if isinstance(node.item, Alt) else (node.item,)
        names = [item.name for item in items if isinstance(item, Ref)]
        if node.most is not None or not inner.intersection(names):
            return Repeat(rewrite(node.item), node.least, node.most)
        name = stars.setdefault(node.item, f"{names[0]} * {len(stars)}")
        return Seq((Repeat(rewrite(node.item), node.least, node.least), Ref(name)))

    waiting: list[tuple[str, Node]] = list(bodies.items())
    for name, body in waiting:
        known = len(stars)
        done[name] = rewrite(body)
        for item, star in list(stars.items())[known:]:
            whole = Alt(tuple(units(item, set())))
            waiting.append((star, Alt((Seq((whole, Ref(star))), EMPTY))))
    return done


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
