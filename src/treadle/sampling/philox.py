"""Random bits from a counter: what numpy's Philox gives, without numpy.random, which takes longer
to import (5 ms) than a short answer to sample.
"""

from __future__ import annotations

from collections.abc import Iterator

WORD = (1 << 64) - 1
ROUNDS = 10
MULTIPLIERS = 0xD2E7470EE14C6C93, 0xCA5A826395121157
WEYL = 0x9E3779B97F4A7C15, 0xBB67AE8584CAA73B  # added to the key after each round


def philox(key: int) -> Iterator[int]:
    """64 random bits at a time, for ever: Philox4x64-10 of the counters 1, 2, 3 and on.

    Salmon et al., Parallel Random Numbers: As Easy as 1, 2, 3, 2011.
    """
    counter = 0
    while True:
        counter += 1
        a, b, c, d = counter & WORD, counter >> 64, 0, 0
        low, high = key & WORD, key >> 64
        for _ in range(ROUNDS):
            left, right = MULTIPLIERS[0] * a, MULTIPLIERS[1] * c
            a, b = (right >> 64) ^ b ^ low, right & WORD
            c, d = (left >> 64) ^ d ^ high, left & WORD
            low, high = (low + WEYL[0]) & WORD, (high + WEYL[1]) & WORD
        yield from (a, b, c, d)
