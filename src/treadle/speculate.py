"""Drafts: what may come next, looked up in the text itself, and whether it pays to check it.

A draft is run behind a text's last id, and each of its ids is compared with the one that the
sampler chooses there. So the text is that without drafts: what they save is steps.
"""

from __future__ import annotations

from collections.abc import Sequence as Ids

WIDTH = 3  # ids that must have stood together before
MOST = 7  # ids of a draft: with the last id of the text as many as the largest plan for few tokens
FIRST = 3
LOSS = 0.02  # of the time of all steps, that drafts may cost
GUESS = 0.15  # of a step, that another token in it costs, before that was measured
NEW = 0.25  # weight of the last measurement


class Lookup:
    """Where the last ids of one text have stood before in it."""

    def __init__(self) -> None:
        self._next: dict[tuple[int, ...], int] = {}  # by WIDTH ids: where the last such ended
        self._n = WIDTH
        self.length = FIRST  # of the next draft: it grows as drafts are right

    def draft(self, ids: Ids[int], most: int) -> list[int]:
        """Up to ``most`` ids that followed when the text was last at such a point."""
        for end in range(self._n, len(ids)):
            self._next[tuple(ids[end - WIDTH : end])] = end
        self._n = max(self._n, len(ids))
        at = self._next.get(tuple(ids[-WIDTH:]))
        return [] if at is None else list(ids[at : at + min(most, self.length)])

    def note(self, n_drafted: int, n_accepted: int) -> None:
        """How many of a draft's ids were right."""
        if n_accepted == n_drafted:
            self.length = min(2 * self.length + 1, MOST)
        elif not n_accepted:
            self.length = max(self.length // 2, 1)


class Gate:
    """Whether drafts pay: they may cost LOSS of the time of all steps, as measured."""

    def __init__(self) -> None:
        self._seconds: dict[int, float] = {}  # of a step, by its tokens
        self._total = self._lost = 0.0

    def allows(self, n: int, n_drafted: int) -> bool:
        """Whether ``n_drafted`` tokens may be checked in a step of ``n`` texts."""
        if not self._seconds:
            return False
        extra = self._predicted(n + n_drafted) - self._predicted(n)
        return self._lost + extra <= LOSS * self._total

    def note(self, n: int, n_drafted: int, n_accepted: int, seconds: float) -> None:
        """A step of ``n`` texts that read no prompt."""
        if n_drafted and self._seconds:
            saved = self._predicted(n) * (1 + n_accepted / n)
            self._lost = max(self._lost + seconds - saved, 0.0)
        self._total += seconds
        old = self._seconds.get(n + n_drafted, seconds)
        self._seconds[n + n_drafted] = old + NEW * (seconds - old)

    def _predicted(self, n: int) -> float:
        """Seconds of a step of ``n`` tokens; something must have been noted."""
        near = min(self._seconds, key=lambda known: abs(known - n))
        return self._seconds[near] * max(1 + GUESS * (n - near), GUESS)
