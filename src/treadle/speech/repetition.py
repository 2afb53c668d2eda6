"""Detects repetitions in decoded text: a decoder that has lost track of the sound
repeats itself.
"""

from __future__ import annotations

import zlib
from collections.abc import Sequence

LEAST_REPEATED = 32  # least ids of all repetitions together
LEAST_TIMES = 4
MOST_PERIOD = 40  # ids


def repeated_length(ids: Sequence[int]) -> int:
    """Return how many ids at the end only repeat the ids before them; 0 unless a sequence of at
    most MOST_PERIOD ids stands there LEAST_TIMES or more times, on LEAST_REPEATED or more ids in
    all.
    """
    for period in range(1, min(MOST_PERIOD, len(ids) // LEAST_TIMES) + 1):
        n = 0
        while n + period < len(ids) and ids[-1 - n] == ids[-1 - n - period]:
            n += 1
        if n + period >= max(LEAST_TIMES * period, LEAST_REPEATED):
            return n
    return 0


def compression_ratio(text: str) -> float:
    """Return the bytes of a text in UTF-8 divided by those of its zlib form, 0 for "". Above 2.4
    the text repeats itself.
    """
    data = text.encode("utf-8", "replace")
    return len(data) / len(zlib.compress(data)) if data else 0.0
