"""Drafts: what may come next, and whether it pays to check it.

A draft is run behind a text's last id, and each of its ids is compared with the one that the
sampler chooses there. So the text is that without drafts: what they save is steps.

A guess costs next to nothing, and what the text then brings tells whether it was right, though it
was never run. So a ``AcceptanceTracker`` knows how good guesses are without a step being spent on
it, and a step with drafts is made where the ids that will be right are worth more than it takes
longer.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence as Ids
from typing import NamedTuple

WIDTH = 3  # ids that must have stood together before
MOST = 7  # ids of a draft: with the last id of the text as many as the largest plan for few tokens
FIRST = 3
LOSS = 0.02  # of the time of the last steps, that drafts may cost
GUESS = 0.15  # of a step, that another token in it costs, before that was measured
NEW = 0.25  # weight of the last measurement
RECENT = 64  # steps that count, or so: the share of each gets less with every step behind it
OLD = 512  # steps after which what one has taken is not known any more
KEPT = 5  # times of steps of a size, whose median counts: a pause of the system is none


class AcceptanceTracker:
    """How often the guesses of one source were right, in one text."""

    def __init__(self) -> None:
        self.odds: float | None = None  # that one more id is right; None: nothing is known
        self.length = FIRST  # of the next guess: it grows as they are right
        self._at, self._ids = 0, []  # type: tuple[int, list[int]]

    def guessed(self, at: int, ids: list[int]) -> None:
        """``ids`` may come behind the first ``at`` of the text. Of several guesses that are open
        the first is followed.
        """
        if not self._ids:
            self._at, self._ids = at, ids

    def settle(self, ids: Ids[int]) -> float | None:
        """Compare the open guess with the text; how much of it was right, once that is known."""
        said, came = self._ids, ids[self._at : self._at + len(self._ids)]
        if not said:
            return None
        pairs = enumerate(zip(said, came, strict=False))
        right = next((i for i, (a, b) in pairs if a != b), len(came))
        if right == len(came) < len(said):
            return None
        share = right / min(right + 1, len(said))
        self._ids = []
        self.odds = mixed(self.odds, share)
        if right == len(said):
            self.length = min(2 * self.length + 1, MOST)
        elif not right:
            self.length = max(self.length // 2, 1)
        return share


def mixed(old: float | None, new: float) -> float:
    """A measurement, and those before it."""
    return new if old is None else old + NEW * (new - old)


class Draft(NamedTuple):
    """Ids that may come next in a text, and the ``source`` that says so."""

    ids: list[int]
    source: str
    track: AcceptanceTracker


class Lookup:
    """Where the last ids of one text have stood before in it."""

    def __init__(self) -> None:
        self._next: dict[tuple[int, ...], int] = {}  # by WIDTH ids: where the last such ended
        self._n = WIDTH

    def guess(self, ids: Ids[int], most: int) -> list[int]:
        """Up to ``most`` ids that followed when the text was last at such a point."""
        for end in range(self._n, len(ids)):
            self._next[tuple(ids[end - WIDTH : end])] = end
        self._n = max(self._n, len(ids))
        at = self._next.get(tuple(ids[-WIDTH:]))
        return [] if at is None else list(ids[at : at + most])


class StepTimes:
    """What steps take, by their size: measured, or guessed from the nearest size that was."""

    def __init__(self) -> None:
        self._seconds: dict[int, deque[float]] = {}  # of the last steps
        self._noted: dict[int, int] = {}  # which step was the last of a size
        self._n_steps = 0

    def __contains__(self, n: int) -> bool:
        return n in self._seconds

    def __bool__(self) -> bool:
        return bool(self._seconds)

    def note(self, n: int, seconds: float) -> None:
        """A step of size ``n``."""
        self._seconds.setdefault(n, deque(maxlen=KEPT)).append(seconds)
        self._n_steps += 1
        self._noted[n] = self._n_steps
        if not self._n_steps % OLD:
            for old in [of for of, at in self._noted.items() if at + OLD <= self._n_steps]:
                del self._seconds[old], self._noted[old]

    def predicted(self, n: int) -> float:
        """Seconds of a step of size ``n``; something must have been noted."""
        near = min(self._seconds, key=lambda known: abs(known - n))
        times = sorted(self._seconds[near])
        return times[(len(times) - 1) // 2] * max(1 + GUESS * (n - near), GUESS)


class DraftController:
    """Whether drafts pay: by what they bring, as guesses were right lately, and what steps take, as
    measured. Where they lose none the less, that is at most LOSS of the time of the last steps.
    """

    def __init__(self) -> None:
        self.times = StepTimes()  # by tokens of a step
        self._total = self._lost = 0.0  # seconds of the last steps
        self._odds: dict[str, float] = {}  # by source, over all texts

    # -- how good guesses are -------------------------------------------------------------------

    def settled(self, source: str, share: float | None) -> None:
        """What ``AcceptanceTracker.settle`` has said."""
        if share is not None:
            self._odds[source] = mixed(self._odds.get(source), share)

    def knows(self, source: str) -> bool:
        """Whether guesses of a source were ever compared with a text."""
        return source in self._odds

    def right(self, guess: Draft) -> float:
        """How many ids of a guess will be right, on average."""
        return self.promise(guess.source, guess.track, len(guess.ids))

    def promise(self, source: str, track: AcceptanceTracker, n: int) -> float:
        """How many of the next ``n`` ids that a source says will be right, on average."""
        p = self._odds.get(source, 0.5) if track.odds is None else track.odds
        return sum(p**i for i in range(1, n + 1))

    # -- what they cost -------------------------------------------------------------------------

    def choose(self, n: int, guesses: Ids[Draft], most: int) -> int:
        """How many of ``guesses``, the best first, are to be checked in a step of ``n`` texts, of
        ``most`` tokens at most.
        """
        best, n_drafted, right, top = 0, 0, 0.0, 0.0
        for i, guess in enumerate(guesses, 1):
            n_drafted += len(guess.ids)
            if n + n_drafted > most:
                break
            right += self.right(guess)
            gain = self.gain(n, n_drafted, right)
            if gain > top:
                best, top = i, gain
        if guesses and not best:
            best = int(n + len(guesses[0].ids) not in self.times)  # to measure it
        chosen = guesses[:best]
        n_drafted, right = sum(len(guess.ids) for guess in chosen), sum(map(self.right, chosen))
        fits = best and n + n_drafted <= most
        return best if fits and self.allows(n, n_drafted, right) else 0

    def gain(self, n: int, n_drafted: int, right: float, cost: float = 0.0) -> float:
        """Seconds that a step of ``n`` texts saves by a draft of which ``right`` ids are right, and
        which took ``cost`` to make.
        """
        if not self.times:
            return 0.0
        alone = self.times.predicted(n)
        return alone * (1 + right / n) - self.times.predicted(n + n_drafted) - cost

    @property
    def left(self) -> float:
        """Seconds that may still be lost."""
        return LOSS * self._total - self._lost

    def allows(self, n: int, n_drafted: int, right: float = 0.0, cost: float = 0.0) -> bool:
        """Whether a step of ``n`` texts may check ``n_drafted`` ids, ``right`` of which will be
        right.
        """
        lost = max(-self.gain(n, n_drafted, right, cost), 0.0)
        return bool(self.times) and lost <= self.left

    def read(self, seconds: float) -> None:
        """A step that read prompts."""
        self._fade()
        self._total += seconds

    def note(
        self, n: int, n_drafted: int, n_accepted: int, seconds: float, cost: float = 0.0
    ) -> None:
        """A step of ``n`` texts that read no prompt; its drafts took ``cost`` to make."""
        size, times = n + n_drafted, self.times
        self._fade()
        if (n_drafted or cost) and times:
            saved = times.predicted(n) * (1 + n_accepted / n)
            # A pause of the system in such a step is not the draft's.
            took = min(seconds, 2 * times.predicted(size)) if size in times else seconds
            self._lost += took + cost - saved
        self._total += seconds + cost
        self._lost = max(self._lost, -LOSS * self._total)  # so much may be saved up
        self.times.note(size, seconds)

    def _fade(self) -> None:
        self._total *= 1 - 1 / RECENT
        self._lost *= 1 - 1 / RECENT
