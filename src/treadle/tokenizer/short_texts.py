"""Encoding of short texts without the tables of a library.

``tokenizers`` and ``sentencepiece`` build tables of a whole vocabulary before they encode a word:
tens of milliseconds, a fifth of the start of a process that reads one short prompt. Here numpy
searches the file's pieces for a few strings, or sorts keys of all of them, which takes a tenth of
that time; Python then merges a few hundred characters in less time than is saved. Words of ASCII
text are found by Python's own expressions, so that the library is not even imported.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable
from heapq import heappop, heappush
from typing import TYPE_CHECKING

import numpy as np
import numpy.typing as npt

from treadle.base.fast_classes import cached_property

if TYPE_CHECKING:
    from treadle.files.metadata import GGUFArray

MIN_PIECES = 20_000  # of smaller vocabularies the library's tables take no time
MAX_TEXT = 1000  # characters of a text that is merged here
MAX_SCANS = 64  # strings that are looked for one by one, before the keys of all are sorted
MAX_TEXTS = 8000  # characters of all texts: a process that reads more has use for the library
# Odd numbers with random bits, for keys of strings.
_FIRST = np.uint64(0x9E3779B97F4A7C15)
_LAST = np.uint64(0xC2B2AE3D27D4EB4F)
_SIZE = np.uint64(0x165667B19E3779F9)
_WORD = (1 << 64) - 1
# ASCII characters of Unicode's properties, as they stand in a set. "\u0300" is none of them.
_NONE = "\u0300"
_ASCII = {"L": "A-Za-z", "Lu": "A-Z", "Ll": "a-z", "N": "0-9"} | {
    "P": r"!-#%-*,-/:;?@\[-\]_{}",
    "S": r"$+<=>\^`|~",
    **dict.fromkeys(("Lt", "Lm", "Lo", "M", "Han"), _NONE),
}
_PART = re.compile(r"\\p\{(\w+)\}|\\.|&&|.", re.DOTALL)
_MASKS = np.array(
    [(1 << 8 * size) - 1 for size in range(9)], np.uint64
)  # the first bytes of a word


class LibraryNeeded(Exception):
    """Raised for a text or a vocabulary that only the library (``tokenizers`` or ``sentencepiece``)
    can handle.
    """


class ShortTexts:
    """Decides which texts are encoded without the library: those of at most MAX_TEXT characters,
    until MAX_TEXTS characters were read or a longer text comes; none if the vocabulary's
    ``n_pieces`` are fewer than MIN_PIECES.
    """

    def __init__(self, n_pieces: int) -> None:
        self._n_left = MAX_TEXTS if n_pieces >= MIN_PIECES else 0

    @property
    def are_left(self) -> bool:
        """Whether any further text may be encoded without the library."""
        return self._n_left > 0

    def take(self, text: str) -> bool:
        """Count ``text``; return whether it is encoded without the library. False for the first
        text that makes the library's tables worth their time, and for all after it.
        """
        self._n_left = self._n_left - len(text) if len(text) <= MAX_TEXT else 0
        return self.are_left


class StringIndex:
    """Finds strings in a string array of a file: the first ``MAX_SCANS`` by comparing with all,
    further ones by sorted keys. A string's key is a hash of its size, first eight bytes and last
    eight bytes.

    Raises LibraryNeeded if the array is empty.
    """

    def __init__(self, array: GGUFArray) -> None:
        self._array = array
        self._starts, self._sizes = array.offsets()
        buffer = array.buffer
        if not len(self._starts) or int(self._starts.max()) + 8 > len(buffer):
            raise LibraryNeeded
        # The eight bytes from each byte of the file on.
        self._words = np.ndarray(len(buffer) - 7, "<u8", buffer.data, strides=(1,))
        self._n_scans = 0
        self._found: dict[bytes, int | None] = {}

    def get(self, string: bytes) -> int | None:
        """Return the index of ``string`` in the array, or None if it is not there. Raises
        LibraryNeeded if the array has it several times; once keys are sorted, if any string occurs
        twice.
        """
        if string in self._found:
            return self._found[string]
        if self._n_scans < MAX_SCANS:
            self._n_scans += 1
            likely = self._scan(string)
        else:
            likely = self._search(string)
        indices = [at for at in likely if self._array.raw(at) == string]
        if len(indices) > 1:
            raise LibraryNeeded
        index = indices[0] if indices else None
        self._found[string] = index
        return index

    def _scan(self, string: bytes) -> list[int]:
        """Return the indices of the strings with the size of ``string`` and its first eight
        bytes.
        """
        likely = np.flatnonzero(self._sizes == len(string))
        first = self._words[self._starts[likely]] & _MASKS[min(len(string), 8)]
        indices: list[int] = likely[first == _first_bytes(string)].tolist()
        return indices

    def _search(self, string: bytes) -> list[int]:
        """Return the indices of the strings with the same key as ``string``."""
        keys, order = self._sorted_keys
        last = int.from_bytes(string[-8:], "little")
        key = _first_bytes(string) * int(_FIRST) + last * int(_LAST) + len(string) * int(_SIZE)
        word = np.uint64(key & _WORD)
        begin, end = (int(keys.searchsorted(word, side)) for side in ("left", "right"))
        indices: list[int] = order[begin:end].tolist()
        return indices

    @cached_property
    def _sorted_keys(self) -> tuple[npt.NDArray[np.uint64], npt.NDArray[np.intp]]:
        """The keys of all strings, ascending, and the index of each. Raises LibraryNeeded if a
        string occurs twice.
        """
        words = self._words
        starts = self._starts
        sizes = self._sizes
        first = words[starts] & _MASKS[np.minimum(sizes, 8)]
        last = np.where(sizes < 8, first, words[np.maximum(starts + sizes - 8, 0)])
        keys = first * _FIRST + last * _LAST + sizes.view(np.uint64) * _SIZE
        order = np.argsort(keys)
        keys = keys[order]
        alike = np.zeros(len(keys), np.bool_)
        alike[1:] = keys[1:] == keys[:-1]
        alike[:-1] |= alike[1:]
        strings = self._array.raws(order[alike].tolist())
        if len(set(strings)) < len(strings):
            raise LibraryNeeded
        return keys, order


def _first_bytes(string: bytes) -> int:
    """Return the first eight bytes of a string, or all of a shorter one, as a number."""
    return int.from_bytes(string[:8], "little")


class AsciiSplitter:
    """Splitter of ASCII text into words by a family's expressions, applied one after another, each
    to what the earlier ones left unsplit: each match and each gap becomes a word.

    Raises LibraryNeeded for an expression that Python cannot match, or would match differently.
    """

    def __init__(self, patterns: Iterable[str]) -> None:
        try:
            self._patterns = [re.compile(_in_ascii(each), re.ASCII) for each in patterns]
        except re.error:  # possessive repetition, before Python 3.11
            raise LibraryNeeded from None

    def split(self, text: str) -> list[str]:
        """Return the words of ``text``, none of them empty."""
        words = [text]
        for pattern in self._patterns:
            words = [part for word in words for part in _parts(pattern, word)]
        return words


def _in_ascii(pattern: str) -> str:
    """Return a Python expression that matches ASCII text as ``pattern`` does in ``tokenizers``.
    Raises LibraryNeeded if it cannot be made.
    """
    made: list[str] = []
    in_set = False
    for found in _PART.finditer(pattern):
        part = found[0]
        if name := found[1]:
            if name not in _ASCII:
                raise LibraryNeeded
            part = _ASCII[name] if in_set else f"[{_ASCII[name]}]"
        elif in_set:
            if part in ("[", "&&"):  # a set in a set, an intersection
                raise LibraryNeeded
            in_set = part != "]"
        elif part in ("^", "$", r"\P"):  # anchors of lines
            raise LibraryNeeded
        else:
            in_set = part == "["
        made.append(part)
    return "".join(made)


def _parts(pattern: re.Pattern[str], word: str) -> list[str]:
    """Return the matches in a word, and the gaps between them."""
    parts = []
    end = 0
    for found in pattern.finditer(word):
        parts += [word[end : found.start()], found[0]]
        end = found.end()
    parts.append(word[end:])
    return [part for part in parts if part]


def merge(symbols: list[bytes], priority: Callable[[bytes, bytes], float | None]) -> list[bytes]:
    """Merge neighbours until none can be merged; return the symbols that are left. Changes
    ``symbols``.

    The pair with the lowest ``priority`` comes first, of equal ones the leftmost; a pair with
    priority None is not merged. Byte pair encoding as in Sennrich et al. 2016 (arXiv:1508.07909),
    with a heap.
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
