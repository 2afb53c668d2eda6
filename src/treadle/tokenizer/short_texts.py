"""Encoding of short texts without the tables of a library.

``tokenizers`` and ``sentencepiece`` build tables of a whole vocabulary before they encode a word:
tens of milliseconds, a fifth of the start of a process that reads one short prompt. Here numpy
sorts keys of the file's pieces, which takes a tenth of that, and Python merges a few hundred
characters in less time than the difference.
"""

from __future__ import annotations

from collections.abc import Callable
from heapq import heappop, heappush
from typing import TYPE_CHECKING

import numpy as np

if TYPE_CHECKING:
    from treadle.files.gguf_array import GGUFArray

MIN_PIECES = 20_000  # of smaller vocabularies the library's tables take no time
MAX_TEXT = 1000  # characters of a text that is merged here
MAX_TEXTS = 8000  # characters of all texts: a process that reads more has use for the library
# Odd numbers with random bits, for keys of strings.
_FIRST = np.uint64(0x9E3779B97F4A7C15)
_LAST = np.uint64(0xC2B2AE3D27D4EB4F)
_SIZE = np.uint64(0x165667B19E3779F9)
_WORD = (1 << 64) - 1
_MASKS = np.array(
    [(1 << 8 * size) - 1 for size in range(9)], np.uint64
)  # the first bytes of a word


class LibraryNeeded(Exception):
    """Raised for a text that has something that only the library handles."""


class ShortTexts:
    """Decides which texts of one tokenizer are encoded without the library."""

    def __init__(self, n_pieces: int) -> None:
        self._n_left = MAX_TEXTS if n_pieces >= MIN_PIECES else 0

    @property
    def are_left(self) -> bool:
        """Whether any text may be encoded without the library."""
        return self._n_left > 0

    def take(self, text: str) -> bool:
        """Return whether ``text`` is; False from the first text on for which the library's tables
        are worth their time.
        """
        self._n_left = self._n_left - len(text) if len(text) <= MAX_TEXT else 0
        return self.are_left


class StringIndex:
    """Finds strings in an array of a file. A string's key is made of its size, its first eight
    bytes and its last eight; those of all strings are sorted.

    Raises LibraryNeeded if two strings are alike.
    """

    def __init__(self, array: GGUFArray) -> None:
        self._array = array
        starts, sizes = array.offsets()
        buffer = array.buffer
        if not len(starts) or int(starts.max()) + 8 > len(buffer):
            raise LibraryNeeded
        words = np.ndarray(len(buffer) - 7, "<u8", buffer.data, strides=(1,))
        n_bytes = sizes.view(np.uint64)
        first = words[starts] & _MASKS[np.minimum(sizes, 8)]
        last = np.where(sizes < 8, first, words[np.maximum(starts + sizes - 8, 0)])
        keys = first * _FIRST + last * _LAST + n_bytes * _SIZE
        self._order = np.argsort(keys)
        self._keys = keys[self._order]
        alike = np.zeros(len(keys), np.bool_)
        alike[1:] = self._keys[1:] == self._keys[:-1]
        alike[:-1] |= alike[1:]
        strings = array.raws(self._order[alike].tolist())
        if len(set(strings)) < len(strings):
            raise LibraryNeeded
        self._found: dict[bytes, int | None] = {}

    def get(self, string: bytes) -> int | None:
        """Return the index of a string, or None."""
        if string in self._found:
            return self._found[string]
        first = int.from_bytes(string[:8], "little")
        last = int.from_bytes(string[-8:], "little")
        key = first * int(_FIRST) + last * int(_LAST) + len(string) * int(_SIZE)
        word = np.uint64(key & _WORD)
        index = None
        at = int(self._keys.searchsorted(word))
        while index is None and at < len(self._keys) and self._keys[at] == word:
            likely = int(self._order[at])
            index = likely if self._array.raw(likely) == string else None
            at += 1
        self._found[string] = index
        return index


def merge(symbols: list[bytes], priority: Callable[[bytes, bytes], float | None]) -> list[bytes]:
    """Merge neighbours until none can be merged. Of all pairs the one with the lowest ``priority``
    comes first, of equal ones the leftmost; None: the pair is not merged. ``symbols`` is changed.

    Byte pair encoding as in Sennrich et al. 2016 (arXiv:1508.07909), with a heap.
    """
    n = len(symbols)
    before = list(range(-1, n - 1))
    after = list(range(1, n + 1))
    heap: list[tuple[float, int, int]] = []

    def push(left: int, right: int) -> None:
        rank = priority(symbols[left], symbols[right])
        if rank is not None:
            heappush(heap, (rank, left, len(symbols[left]) + len(symbols[right])))

    for left in range(n - 1):
        push(left, left + 1)
    while heap:
        _, left, n_bytes = heappop(heap)
        right = after[left]
        # A pair whose symbols were merged with others meanwhile has another length.
        if not symbols[left] or right == n or len(symbols[left] + symbols[right]) != n_bytes:
            continue
        symbols[left] += symbols[right]
        symbols[right] = b""
        following = after[left] = after[right]
        if following < n:
            before[following] = left
            push(left, following)
        if before[left] >= 0:
            push(before[left], left)
    return [symbol for symbol in symbols if symbol]
