"""Finding the strings of a GGUF array: each is a length of 8 bytes, then that many bytes.

Where a string begins is known only from the one before it, and a vocabulary with its merges
has a million of them: a step of Python for each would be the slowest part of opening a model.
So a window of the file is searched for what must be a short string's length, a byte followed
by seven zeros. Guesses that chain (each ends exactly where the next begins) are taken as one
run; what the guesses miss (long strings, strings with zeros in them) is walked one by one.
A wrong guess costs time only: a run starts where the walk stands, and every link is exact.
"""

from __future__ import annotations

import struct

import numpy as np
import numpy.typing as npt

Bytes = npt.NDArray[np.uint8]
Offsets = npt.NDArray[np.int64]

WINDOW = 1 << 18  # bytes searched at once; with the arrays made from them, they fit into L2
MAX_WALK = 4096  # strings walked before the guesses are asked again

_read_u64 = struct.Struct("<Q").unpack_from


class StringTooLong(Exception):
    """String ``index``, which begins at ``offset``, ends behind the end of the buffer."""

    def __init__(self, index: int, offset: int) -> None:
        self.index, self.offset = index, offset
        super().__init__(f"string {index} at byte {offset}")


def string_heads(buffer: Bytes, start: int, n: int) -> Offsets:
    """Where each of ``n`` strings begins and where the last ends, int64 [n + 1].

    The caller has checked that ``8 * n`` bytes are left; raises StringTooLong.
    """
    heads = np.empty(n + 1, np.int64)
    i, pos, walk, searched = 0, start, 1, start
    guesses = breaks = np.empty(0, np.int64)
    while i < n:
        if pos >= searched:
            searched = pos + WINDOW
            guesses, breaks = _guess(buffer, pos, searched)
        j = int(guesses.searchsorted(pos))
        if j < len(guesses) and guesses[j] == pos:
            m = min(n - i, int(breaks[breaks.searchsorted(j)]) - j)
            heads[i : i + m] = guesses[j : j + m]
            i, pos = i + m, int(guesses[j + m])
            if m > 8:
                walk = 1
        stop = min(n, i + walk)
        pos = _walk(buffer, heads, i, stop, pos)
        i, walk = stop, min(2 * walk, MAX_WALK)
    heads[n] = pos
    return heads


def _guess(buffer: Bytes, lo: int, hi: int) -> tuple[Offsets, Offsets]:
    """Likely heads from ``lo`` to ``hi``, ascending, and which of them do not lead to the next."""
    lo = max(4, lo // 4 * 4)
    words = buffer[lo : lo + max(0, min(hi, len(buffer)) - lo) // 4 * 4].view("<u4")
    # Of seven zeros in a row, four make an aligned word: one comparison for every four bytes.
    at = lo + 4 * np.flatnonzero(words == 0)
    back = np.where(buffer[at - 3], 3, 4)
    back[buffer[at - 2] != 0] = 2
    back[buffer[at - 1] != 0] = 1
    heads = at - back
    heads = heads[: heads.searchsorted(len(buffer) - 7)]
    unaligned = np.ndarray(max(0, len(buffer) - 7), "<u8", buffer.data, strides=(1,))
    ends = unaligned[heads] + np.uint64(8) + heads.view(np.uint64)
    linked = ends[:-1] == heads[1:].view(np.uint64)
    return heads, np.append(np.flatnonzero(~linked), max(0, len(heads) - 1))


def _walk(buffer: Bytes, heads: Offsets, i: int, stop: int, pos: int) -> int:
    """Fill ``heads[i:stop]`` from ``pos``, string by string; the end of the last."""
    data, end = buffer.data, len(buffer)
    for index in range(i, stop):
        heads[index] = pos
        after = pos + 8
        if after <= end:
            after += _read_u64(data, pos)[0]
        if after > end:
            raise StringTooLong(index, pos)
        pos = after
    return pos
