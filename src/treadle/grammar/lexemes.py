"""Splits a grammar into lexemes that are as long as possible without changing its meaning.

llguidance reads a text with a lexer, which takes the longest lexeme, and a parser, which decides
what may come next. The lexer is fast and the parser slow, but only a parser can read GBNF, where
``[a-z]+ "s"`` matches "cats". So lexemes are cut where the two could disagree.

Consider all readings of a text that are possible after some of its characters: each is at a state
of a rule's automaton. Suppose that one reading may end a rule or call another one before the next
character, while in another reading this character is in the middle of a lexeme. The lexer would
lose one of them. So the second lexeme must end here too: this edge of its automaton is a *break*.
States that can be reached by the same text are found by following pairs of states along equal
characters. A rule is assumed to return to every place that calls it, which only adds breaks.
"""

from __future__ import annotations

from collections.abc import Callable, Hashable, Iterator, Sequence
from itertools import chain

from treadle.errors import GrammarError
from treadle.grammar.automaton import Automaton, build_automata
from treadle.grammar.char_classes import Alphabet
from treadle.grammar.gbnf import GbnfRules, Special
from treadle.grammar.lark import MAX_LEAD, LarkWriter, as_one_regex, by_characters, rule_name
from treadle.grammar.regex import EMPTY_TEXT, ENDLESS, Regexes, TooLargeError
from treadle.grammar.rule_graph import components, expanded, nodes, reachable, recursive

MAX_STATES = 4_000  # of all automata
MAX_EXPANDED = 100_000  # parts of a grammar written as one regular expression
MAX_PAIRS = 100_000  # pairs of states that may be open at once
MAX_LOOP = 30  # states of one component: the expression grows with their cube
MAX_ALTERNATIVES = 5_000  # of all rules written

Edges = Sequence[tuple[int, int]]  # characters, next state
Calls = tuple[tuple[str | Special, int], ...]
Key = tuple[bool, Calls, tuple[tuple[int, int], ...]]  # whether the rule may end, calls, edges


def lark_forms(rules: GbnfRules) -> Iterator[str]:
    """Yield the grammar as Lark text in the forms that llguidance may accept, the fastest first.

    All have the same meaning. The last one has every character as a lexeme. Raises GrammarError if
    every form has a chain of more than MAX_LEAD references, or if no text matches the grammar.
    """
    bodies = reachable(rules.body)
    rules = GbnfRules(bodies, rules.line)
    special = any(isinstance(node, Special) for body in bodies.values() for node in nodes(body))
    if special or recursive(bodies) or expanded(bodies) > MAX_EXPANDED:
        quick = _by_lexemes(rules)
    else:
        quick = iter([as_one_regex(rules)])
    forms = chain(quick, [by_characters(rules)])
    leads = []
    for form in forms:
        leads.append(form.lead())
        if leads[-1] <= MAX_LEAD:
            yield str(form)
    if min(leads) > MAX_LEAD:
        raise GrammarError(
            f"grammar: a chain of {min(leads)} rules that refer to each other (at most {MAX_LEAD})"
        )


def hard_rules(rules: GbnfRules) -> str:
    """Return the names and lines of up to four recursive rules, which need the slow parser, for a
    message; "" if there are none.
    """
    names = sorted(recursive(reachable(rules.body)), key=rules.line.__getitem__)
    texts = [f"{name!r} (line {rules.line[name]})" for name in names[:4]]
    return f"rule {', '.join(texts)}{' ...' * (len(names) > 4)}" if names else ""


def special_tokens(rules: GbnfRules) -> list[tuple[str, int]]:
    """Return the special tokens in a grammar, as written, each with the line of its rule."""
    return [
        (node.text, rules.line[name])
        for name, body in rules.body.items()
        for node in nodes(body)
        if isinstance(node, Special)
    ]


def _by_lexemes(rules: GbnfRules) -> Iterator[LarkWriter]:
    try:
        automata, alphabet = build_automata(rules)
        if "root" not in automata:
            line = rules.line["root"]
            raise GrammarError(
                f"grammar, line {line}: rule 'root' refers only to itself: no text can match"
            )
        threads = Threads(automata, alphabet)
    except TooLargeError:
        return
    # If expressions grow too large, lexemes are cut more often.
    for cut in (None, threads.keep_loops, threads.break_everywhere):
        if cut is not None:
            cut()
        try:
            yield by_lexemes(automata, threads, alphabet)
        except TooLargeError:
            continue
        return


class Threads:
    """The breaks of all automata: places where lexemes must end. The states of all rules are
    numbered consecutively.

    ``chars``: for each state its edges (mask of characters, next state); ``breaks``: for each state
    the mask of characters before which a lexeme ends.
    """

    def __init__(self, automata: dict[str, Automaton], alphabet: Alphabet) -> None:
        self.first: dict[str, int] = {}
        n = 0
        for name, automaton in automata.items():
            self.first[name] = n
            n += len(automaton)
        if n > MAX_STATES:
            raise TooLargeError
        self.breaks = [0] * n
        self.chars: list[Edges] = []
        self._free: list[list[int]] = []  # by state: next states where a rule begins or ends there
        self._alphabet = alphabet
        returns: dict[str, list[int]] = {name: [] for name in automata}
        for name, automaton in automata.items():
            for call, to in (edge for edges in automaton.calls for edge in edges):
                if isinstance(call, str):
                    returns[call].append(self.first[name] + to)
        for name, automaton in automata.items():
            at = self.first[name]
            for state in range(len(automaton)):
                self.chars.append([(mask, at + to) for mask, to in automaton.chars[state]])
                calls = [self.first[c] for c, _ in automaton.calls[state] if isinstance(c, str)]
                self._free.append(calls + returns[name] * automaton.accepts[state])
        self._fresh: dict[int, dict[int, int]] = {}
        self._pairs = self._open_pairs(self.first["root"])
        self._settle()

    def keep_loops(self) -> None:
        """Add breaks so that each lexeme is one character, or a repetition in which the automaton
        stays in one state.
        """
        self._break(lambda state, to: to != state)

    def break_everywhere(self) -> None:
        """Add breaks so that every lexeme is one character."""
        self._break(lambda state, to: True)

    def _break(self, which: Callable[[int, int], bool]) -> None:
        for state, edges in enumerate(self.chars):
            for mask, to in edges:
                if which(state, to):
                    self.breaks[state] |= mask
        self._settle()

    def _begun(self, state: int) -> dict[int, int]:
        """Return the edges by which a new lexeme may begin at ``state`` because a rule begins or
        ends there: next states, each with its character mask.
        """
        if state not in self._fresh:
            seen = set(self._free[state])
            waiting = list(seen)
            found: dict[int, int] = {}
            while waiting:
                at = waiting.pop()
                for mask, to in self.chars[at]:
                    found[to] = found.get(to, 0) | mask
                new = [to for to in self._free[at] if to not in seen]
                seen.update(new)
                waiting += new
            self._fresh[state] = found
        return self._fresh[state]

    def _open_pairs(self, root: int) -> set[tuple[int, int]]:
        """Return the pairs of states, smaller first, that one text from the state ``root`` may lead
        to.
        """
        steps: dict[int, dict[int, int]] = {}
        for state in range(len(self.chars)):
            steps[state] = dict(self._begun(state))
            for mask, to in self.chars[state]:
                steps[state][to] = steps[state].get(to, 0) | mask
        found = {(root, root)}
        waiting = [(root, root)]
        while waiting:
            one, other = waiting.pop()
            for to, mask in steps[one].items():
                for to_other, mask_other in steps[other].items():
                    pair = (to, to_other) if to <= to_other else (to_other, to)
                    if mask & mask_other and pair not in found:
                        found.add(pair)
                        waiting.append(pair)
            if len(found) > MAX_PAIRS:
                raise TooLargeError
        return found

    def _settle(self) -> None:
        """Add breaks until lexer and parser agree on all readings of every text."""
        begun = [0] * len(self.chars)
        for state in {state for pair in self._pairs for state in pair}:
            for mask in self._begun(state).values():
                begun[state] |= mask
        changed = True
        while changed:
            changed = False
            for pair in self._pairs:
                for state, other in (pair, pair[::-1]):
                    inside = sum(mask for mask, _ in self.chars[state]) & ~self.breaks[state]
                    both = inside & self._alphabet.like(begun[other] | self.breaks[other])
                    self.breaks[state] |= both
                    changed = changed or both != 0


class Lexemes:
    """The lexemes of one rule's automaton, between the states at which a lexeme may end.

    Each state has a key, None if no lexeme may end there; states after which the same text may
    follow have equal keys.
    """

    def __init__(self, automaton: Automaton, at: int, threads: Threads, regexes: Regexes) -> None:
        self._automaton = automaton
        self._regexes = regexes
        self.chars = automaton.chars
        breaks = threads.breaks[at : at + len(automaton)]
        self.breaking = [_cut(edges, mask) for edges, mask in zip(self.chars, breaks, strict=True)]
        self._inside = [_cut(edges, ~mask) for edges, mask in zip(self.chars, breaks, strict=True)]
        self.keys = [self._key(state) for state in range(len(automaton))]
        self._parts = [
            [state for state in part]
            for part in components({i: [to for _, to in e] for i, e in enumerate(self._inside)})
        ]
        self._rests: dict[Key, list[int | None]] = {}

    def _key(self, state: int) -> Key | None:
        """Return the key of ``state``, a description of the text that may follow a lexeme that ends
        there: whether the rule may end, calls, edges; None if no lexeme may end there.
        """
        calls = self._automaton.calls[state]
        accepts = self._automaton.accepts[state]
        if not (calls or accepts or self.breaking[state]):
            return None
        return accepts, tuple(calls), tuple(sorted(self.breaking[state]))

    def from_edges(self, edges: Edges) -> Iterator[tuple[Key, int]]:
        """Yield the lexemes that begin with ``edges``, as pairs: the key of the states where they
        end (it describes the text that may follow, see ``_key``), and the number of the regex of
        all lexemes that end there.
        """
        for key in dict.fromkeys(self.keys):
            if key is None:
                continue
            rest = self._rest(key)
            ways = (self._regexes.seq(self._regexes.chars(mask), rest[to]) for mask, to in edges)
            if (regex := self._regexes.alt(ways)) is not None:
                yield key, regex

    def _rest(self, key: Key) -> list[int | None]:
        """Return for each state a regex of the text from there to the states with this key, within
        one lexeme; None if there is no such text.
        """
        if key not in self._rests:
            rest: list[int | None] = [None] * len(self.keys)
            self._rests[key] = rest
            for part in self._parts:
                self._solve(part, key, rest)
        return self._rests[key]

    def _solve(self, part: list[int], key: Key, rest: list[int | None]) -> None:
        """Compute ``rest`` for the states ``part`` of one strongly connected component, by Gaussian
        elimination with Arden's rule: ``x = a x | b`` is ``x = a* b``. ``rest``: as ``_rest``
        returns it for ``key``.
        """
        if len(part) > MAX_LOOP:
            raise TooLargeError
        r = self._regexes
        inside: dict[tuple[int, int], int | None] = {}
        for state in part:
            out = [r.seq(r.chars(m), rest[to]) for m, to in self._inside[state] if to not in part]
            rest[state] = r.alt([*out, EMPTY_TEXT if self.keys[state] == key else None])
            for other in part:
                ways = (r.chars(mask) for mask, to in self._inside[state] if to == other)
                inside[state, other] = r.alt(ways)
        for i, state in enumerate(part):
            loop = r.repeat(inside[state, state], 0, ENDLESS)
            rest[state] = r.seq(loop, rest[state])
            for other in part[i + 1 :]:
                inside[state, other] = r.seq(loop, inside[state, other])
            for one in part[i + 1 :]:
                way = inside[one, state]
                rest[one] = r.alt([rest[one], r.seq(way, rest[state])])
                for other in part[i + 1 :]:
                    inside[one, other] = r.alt(
                        [inside[one, other], r.seq(way, inside[state, other])]
                    )
        for i, state in reversed(list(enumerate(part))):
            ways = (r.seq(inside[state, other], rest[other]) for other in part[i + 1 :])
            rest[state] = r.alt([rest[state], *ways])


def _cut(edges: Edges, mask: int) -> Edges:
    return [(m & mask, to) for m, to in edges if m & mask]


def by_lexemes(automata: dict[str, Automaton], threads: Threads, alphabet: Alphabet) -> LarkWriter:
    """Return the grammar in rules whose terminals are lexemes. Raises TooLargeError if their
    regexes exceed the size limits.

    Each part of a rule that has been read so far is a rule too, one for each key and for each state
    after a call. That makes left recursion, whose parsing time does not grow along a text.
    """
    regexes = Regexes(alphabet)
    names = {name: rule_name(i, name) for i, name in enumerate(automata)} | {"root": "start"}
    bodies: dict[str, list[list[str | int]]] = {}
    for name, automaton in automata.items():
        lexemes = Lexemes(automaton, threads.first[name], threads, regexes)
        bodies |= _parts(automaton, lexemes, names[name], names)
        if sum(map(len, bodies.values())) > MAX_ALTERNATIVES:
            raise TooLargeError
    writer = LarkWriter()
    ways = [way for body in bodies.values() for way in body]
    wanted = list(dict.fromkeys(item for way in ways for item in way if isinstance(item, int)))
    terminals: dict[str | int, str] = dict(zip(wanted, regexes.write(wanted, writer), strict=True))
    for part, body in bodies.items():
        texts = [" ".join(terminals.get(item, str(item)) for item in way) for way in body]
        writer.rule(part, [text or '""' for text in texts])
    return writer


def _parts(
    automaton: Automaton, lexemes: Lexemes, rule: str, names: dict[str, str]
) -> dict[str, list[list[str | int]]]:
    """Return the alternatives of ``rule``, and of the rules of its parts read so far, by rule name:
    each a list of names (``names``: the Lark name of each called rule) and regexes.
    """
    bodies: dict[str, list[list[str | int]]] = {rule: []}
    parts: dict[tuple[str, Hashable], str] = {}
    waiting: list[tuple[list[str | int], Key]] = [
        ([], _follow(automaton, 0))  # the text read so far, and the key of what may follow
    ]

    def add(key: tuple[str, Hashable], follow: Key, way: list[str | int]) -> None:
        if key not in parts:
            parts[key] = f"{rule}_{len(parts)}"
            bodies[parts[key]] = []
            waiting.append(([parts[key]], follow))
        bodies[parts[key]].append(way)

    for read, (accepts, calls, edges) in waiting:
        if accepts:
            bodies[rule].append(read)
        for call, to in calls:
            name = names[call] if isinstance(call, str) else call.text
            add(("after", to), _follow(automaton, to), [*read, name])
        for key, regex in lexemes.from_edges(edges):
            add(("end", key), key, [*read, regex])
    return bodies


def _follow(automaton: Automaton, state: int) -> Key:
    """Return the key of everything that may follow at ``state`` if a lexeme has just
    ended there.
    """
    return automaton.accepts[state], tuple(automaton.calls[state]), tuple(automaton.chars[state])
