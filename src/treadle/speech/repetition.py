"""Repetitions in decoded text: a decoder that has lost the sound writes the same words again."""

from __future__ import annotations

import zlib
from collections.abc import Sequence

LEAST_REPEATED = 32  # ids of all repetitions together
LEAST_TIMES = 4
MOST_PERIOD = 40  # ids


def repeated_length(ids: Sequence[int]) -> int:
    """Return how many ids at the end only repeat the same ids before them, or 0: at least
    ``LEAST_TIMES`` in all, and over ``LEAST_REPEATED`` ids.
    """
    for period in range(1, min(MOST_PERIOD, len(ids) // LEAST_TIMES) + 1):
        n = 0
        while n + period < len(ids) and ids[-1 - n] == ids[-1 - n - period]:
            n += 1
        if n + period >= max(LEAST_TIMES * period, LEAST_REPEATED):
            return n
    return 0


def compression_ratio(text: str) -> float:
    """Return the length of a text in UTF-8, by that of zlib's form of it: above 2.4, its words
    repeat.
    """
    data = text.encode("utf-8", "replace")
    return len(data) / len(zlib.compress(data)) if data else 0.0
