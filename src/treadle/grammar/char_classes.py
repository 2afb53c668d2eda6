"""Sets of characters as bit masks: one bit for each interval between the bounds of all classes."""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Iterable
from itertools import pairwise

from treadle.grammar.gbnf import Chars, Node, Ranges, normalized
from treadle.grammar.rule_graph import nodes


class Alphabet:
    """The intervals of characters that a grammar distinguishes, numbered as bits of a mask."""

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
        """Return the mask of a character class: the bits of the intervals in ``ranges``."""
        if ranges not in self._masks:
            found = 0
            for low, high in ranges:
                first, end = (bisect_left(self._ends, x) for x in (low, high + 1))
                found |= ((1 << (end - first)) - 1) << first
            self._masks[ranges] = found
        return self._masks[ranges]

    def like(self, mask: int) -> int:
        """Return the mask of all characters whose UTF-8 begins with the same byte as some character
        of ``mask``.
        """
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
        """Return the character class of a mask: the intervals of its bits."""
        ends = self._ends
        return normalized([(ends[i], ends[i + 1] - 1) for i in _bits(mask)])


def _bits(mask: int) -> list[int]:
    return [i for i in range(mask.bit_length()) if mask >> i & 1]


def _first_byte(code: int) -> int:
    """Return the first UTF-8 byte of a code point; surrogates are encoded like their neighbours."""
    return chr(code).encode("utf-8", "surrogatepass")[0]
