"""All that a few threads can do on a machine that orders little: an exhaustive explorer.

The memory is C11's as an abstract machine (after Kang, Hur, Lahav, Vafeiadis and Dreyer, "A
promising semantics for relaxed-memory concurrency", 2017, without promises). Each place keeps every
value that it had, in order. Each thread has a *view*: how far it has certainly seen each place. A
load gives any value that is not older than the thread's view, so a store may be seen late, and two
stores out of order. How an operation is ordered:

- ``PLAIN``: it carries nothing else with it.
- ``ORDERED``: a store carries its thread's view along (release), and a load takes over the view
  that came with the value (acquire): who sees the value sees all that was stored before it.
- ``TOTAL``: further, a load sees the latest ``TOTAL`` store to its place (sequential consistency).

What changes a place in one operation (``Add``, ``Swap``) acts on its latest value. A load that
waits for a later store of its own thread is not modelled.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any, NamedTuple

PLAIN, ORDERED, TOTAL = range(3)


class Load(NamedTuple):
    """Gives a value of ``place``. ``site`` is the operation's name in ``Explorer``'s ``orders``."""

    site: str
    place: str


class Store(NamedTuple):
    site: str
    place: str
    value: Any


class Add(NamedTuple):
    """Adds; gives what was there before."""

    site: str
    place: str
    value: int


class Swap(NamedTuple):
    """``new`` in place of ``old``; gives whether that was there."""

    site: str
    place: str
    old: Any
    new: Any


class Use(NamedTuple):
    """Plain reads that must give these values and can give no others, then plain writes."""

    reads: tuple[tuple[str, Any], ...]
    writes: tuple[tuple[str, Any], ...]


class End(NamedTuple):
    """The thread is over."""


Op = Load | Store | Add | Swap | Use | End
# What a thread does next, by its registers, and where it goes on, by what that gives.
Code = Callable[[Any], tuple[Op, Callable[[Any], tuple[Any, Any]]]]
View = tuple[int, ...]
Message = tuple[Any, View]  # a value, and what it carries
Thread = tuple[Code, Any, View]  # and registers
Memory = tuple[tuple[Message, ...], ...]  # of each place, the oldest value first
State = tuple[Memory, View, tuple[Thread, ...]]  # the view: the latest TOTAL store to each place


Step = tuple[Memory, View, Thread]


class WrongError(Exception):
    """A thread read what it must not, or a program said so itself."""


class Explorer:
    """Places with their first values, and how each site's operations are ordered."""

    def __init__(self, places: Mapping[str, Any], orders: Mapping[str, int]) -> None:
        self.places = {name: i for i, name in enumerate(places)}
        self.nothing: View = (0,) * len(places)
        self.first: Memory = tuple(((value, self.nothing),) for value in places.values())
        self.orders = orders
        self._steps: dict[Step, list[Step]] = {}

    def explore(self, programs: Sequence[tuple[Code, Any]], n_alike: int = 0) -> int:
        """Go through all states that ``programs`` (code and registers) can come to; gives their
        number. The last ``n_alike`` of them are the same: who of them is who makes no difference.

        Raises WrongError, also where a state is reached from which the first program cannot end.
        """
        threads = tuple((code, registers, self.nothing) for code, registers in programs)
        begin: State = self.first, self.nothing, threads
        sources: dict[State, list[State]] = {begin: []}
        left = [begin]
        ends = []
        while left:
            state = left.pop()
            code, registers, _ = state[2][0]
            if isinstance(code(registers)[0], End):
                ends.append(state)
            for after in self._after(state):
                small = self._small(after, n_alike)
                if small not in sources:
                    sources[small] = []
                    left.append(small)
                sources[small].append(state)
        can_end = set(ends)
        while ends:
            new = set(sources[ends.pop()]) - can_end
            can_end |= new
            ends += new
        if len(can_end) < len(sources):
            raise WrongError(f"{len(sources) - len(can_end)} states lead to no end")
        return len(sources)

    def _after(self, state: State) -> Iterator[State]:
        """Any one thread has gone on."""
        memory, latest, threads = state
        for i, thread in enumerate(threads):
            key = memory, latest, thread
            if key not in self._steps:
                self._steps[key] = list(self._step(*key))
            for changed, newest, made in self._steps[key]:
                yield changed, newest, (*threads[:i], made, *threads[i + 1 :])

    def _step(self, memory: Memory, latest: View, thread: Thread) -> Iterator[Step]:
        """A thread up to its next operation that others can notice. Loads that are not TOTAL come
        just before that: earlier ones could have given nothing else.
        """
        seen = {thread}
        left = [(memory, latest, thread)]
        while left:
            memory, latest, (code, registers, view) = left.pop()
            op, then = code(registers)
            if isinstance(op, End):
                yield memory, latest, (code, registers, view)
                continue
            local = isinstance(op, Use) or self._is_late(op)
            for changed, newest, farther, value in self._do(memory, latest, view, op):
                made = (*then(value), farther)
                if not local:
                    yield changed, newest, made
                elif made not in seen:
                    seen.add(made)
                    left.append((changed, newest, made))

    def _is_late(self, op: Op) -> bool:
        return isinstance(op, Load) and self.orders[op.site] != TOTAL

    def _do(
        self, memory: Memory, latest: View, view: View, op: Op
    ) -> Iterator[tuple[Memory, View, View, Any]]:
        """What an operation of a thread with this view can leave behind, and give."""
        if isinstance(op, Use):
            for place, value in op.reads:
                at = self.places[place]
                visible = {found for found, _ in memory[at][view[at] :]}
                if visible != {value}:
                    raise WrongError(f"{place} is {value}, and {visible} can be read")
            for place, value in op.writes:
                memory, view = self._store(memory, view, self.places[place], value, self.nothing)
            yield memory, latest, view, None
            return
        assert not isinstance(op, End)
        at = self.places[op.place]
        order = self.orders[op.site]
        if isinstance(op, Load):
            for n in range(max(view[at], latest[at] if order == TOTAL else 0), len(memory[at])):
                value, carried = memory[at][n]
                seen = _put(view, at, n)
                yield memory, latest, _joined(seen, carried) if order else seen, value
            return
        value = op[2]
        carried = self.nothing
        found = None
        if not isinstance(op, Store):  # it reads the latest value, and hands on what that carries
            before, carried = memory[at][-1]
            view = _put(view, at, len(memory[at]) - 1)
            view = _joined(view, carried) if order else view
            found = before if isinstance(op, Add) else before == op.old
            value = before + op.value if isinstance(op, Add) else op.new
        if found is not False or not isinstance(op, Swap):
            memory, view = self._store(memory, view, at, value, carried, bool(order))
            latest = _put(latest, at, view[at]) if order == TOTAL else latest
        yield memory, latest, view, found

    def _store(
        self, memory: Memory, view: View, at: int, value: Any, carried: View, all_: bool = False
    ) -> tuple[Memory, View]:
        n = len(memory[at])
        view = _put(view, at, n)
        made = value, _joined(carried, view) if all_ else _put(carried, at, n)
        return (*memory[:at], (*memory[at], made), *memory[at + 1 :]), view

    def _small(self, state: State, n_alike: int) -> State:
        """The same state without the values that nobody can read any more."""
        memory, latest, threads = state
        gone = tuple(map(min, zip(*(view for _, _, view in threads), strict=True)))
        if any(gone):

            def less(view: View) -> View:
                return tuple([n - g if n > g else 0 for n, g in zip(view, gone, strict=True)])

            memory = tuple(
                tuple([(value, less(view)) for value, view in messages[g:]])
                for messages, g in zip(memory, gone, strict=True)
            )
            latest = less(latest)
            threads = tuple((code, registers, less(view)) for code, registers, view in threads)
        n = len(threads) - n_alike
        alike = sorted(threads[n:], key=lambda t: (t[0].__name__, t[1:]))
        return memory, latest, (*threads[:n], *alike)


def _put(view: View, at: int, n: int) -> View:
    return (*view[:at], n, *view[at + 1 :])


def _joined(one: View, other: View) -> View:
    return tuple([a if a > b else b for a, b in zip(one, other, strict=True)])
