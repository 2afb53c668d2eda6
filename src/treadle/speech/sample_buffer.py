"""The part of a long sound that is in memory: what a stream has given and nobody has dropped."""

from __future__ import annotations

from collections.abc import Iterable

import numpy as np


class SampleBuffer:
    """Samples of a stream of float32 blocks, by their number from the sound's beginning."""

    def __init__(self, blocks: Iterable[np.ndarray]) -> None:
        self._blocks = iter(blocks)
        self._held = np.zeros(0, np.float32)
        self._first = 0  # number of the first one that is held
        self.ended = False

    @property
    def last(self) -> int:
        """Number behind the last sample that was read; the sound's length once it has ended."""
        return self._first + len(self._held)

    def get(self, first: int, last: int) -> np.ndarray:
        """Return samples from number ``first`` up to ``last``, fewer at the sound's end, reading
        what is missing. Those before a former ``drop`` are gone.
        """
        if last > self.last and not self.ended:
            parts = [self._held]
            n = self.last
            while n < last:
                block = next(self._blocks, None)
                if block is None:
                    self.ended = True
                    break
                parts.append(block)
                n += len(block)
            self._held = np.concatenate(parts)
        assert first >= self._first, "these samples were dropped"
        return self._held[first - self._first : last - self._first]

    def drop(self, before: int) -> None:
        """Forget the samples before a number."""
        n = min(before, self.last) - self._first
        if n > 0:
            self._held = self._held[n:].copy()
            self._first += n
