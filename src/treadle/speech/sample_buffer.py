"""Keeps the part of a long sound that is in memory: samples read from a stream and not
dropped yet.
"""

from __future__ import annotations

from collections.abc import Iterable

import numpy as np


class SampleBuffer:
    """Samples of a stream of float32 blocks, numbered from the sound's beginning. ``ended``:
    whether all blocks have been read.
    """

    def __init__(self, blocks: Iterable[np.ndarray]) -> None:
        self._blocks = iter(blocks)
        self._held = np.zeros(0, np.float32)
        self._first = 0  # number of the first sample in ``_held``
        self.ended = False

    @property
    def last(self) -> int:
        """Number of samples read so far; the sound's length once it has ended."""
        return self._first + len(self._held)

    def get(self, first: int, last: int) -> np.ndarray:
        """Return samples number ``first`` to ``last`` (exclusive), float32 ``[n]``, fewer at the
        sound's end; blocks are read as needed. Raises AssertionError for dropped samples.
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
        """Drop the samples before number ``before``."""
        n = min(before, self.last) - self._first
        if n > 0:
            self._held = self._held[n:].copy()
            self._first += n
