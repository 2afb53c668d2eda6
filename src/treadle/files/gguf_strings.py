"""Vectorised search for the strings of a GGUF array: each is an 8-byte length, then its bytes.

A string's offset is known only from the previous string. A vocabulary with its merges has a
million strings, and a Python step for each would be the slowest part of opening a model.
So a window of the file is searched for lengths of short strings: a byte followed by seven
zeros. Guesses that chain (each ends exactly where the next begins) are accepted as one run.
Strings that the guesses miss (long ones, ones that contain zeros) are walked one by one.
Wrong guesses cost only time: a run starts at the current position, and every link is exact.
"""

from __future__ import annotations

import struct

import numpy as np
import numpy.typing as npt

Bytes = npt.NDArray[np.uint8]
Offsets = npt.NDArray[np.int64]

WINDOW = 1 << 18  # bytes searched at once; with the arrays made from them, they fit into L2
MAX_WALK = 4096  # strings walked before the guesses are tried again

_read_u64 = struct.Struct("<Q").unpack_from


class StringTooLong(Exception):
    """Raised if the string number ``index``, at byte ``offset``, extends past the end of the
    buffer.
    """

    def __init__(self, index: int, offset: int) -> None:
        self.index = index
        self.offset = offset
        super().__init__(f"string {index} at byte {offset}")


def string_heads(buffer: Bytes, start: int, n: int) -> Offsets:
    """Return the byte offsets in ``buffer`` of ``n`` strings, which follow each other from
    ``start`` on, and the end of the last, int64 [n + 1].

    The caller has checked that ``8 * n`` bytes are left. Raises StringTooLong.
    """
    heads = np.empty(n + 1, np.int64)
    i = 0
    pos = start
    walk = 1
    searched = start
    guesses = breaks = np.empty(0, np.int64)
    while i < n:
        if pos >= searched:
            searched = pos + WINDOW
            guesses, breaks = _guess(buffer, pos, searched)
        j = int(guesses.searchsorted(pos))
        if j < len(guesses) and guesses[j] == pos:
            m = min(n - i, int(breaks[breaks.searchsorted(j)]) - j)
            heads[i : i + m] = guesses[j : j + m]
            i = i + m
            pos = int(guesses[j + m])
            if m > 8:
                walk = 1
        stop = min(n, i + walk)
        pos = _walk(buffer, heads, i, stop, pos)
        i = stop
        walk = min(2 * walk, MAX_WALK)
    heads[n] = pos
    return heads


def _guess(buffer: Bytes, lo: int, hi: int) -> tuple[Offsets, Offsets]:
    """Return likely byte offsets of strings in ``lo:hi``, ascending int64 [m], and the indices of
    those whose string does not end at the next offset.
    """
    lo = max(4, lo // 4 * 4)
    words = buffer[lo : lo + max(0, min(hi, len(buffer)) - lo) // 4 * 4].view("<u4")
    # Seven zeros in a row contain an aligned word of zeros: one comparison for every four bytes.
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
    """Fill ``heads[i:stop]`` string by string, the first at byte ``pos``. Return the end of the
    last string. Raises StringTooLong.
    """
    data = buffer.data
    end = len(buffer)
    for index in range(i, stop):
        heads[index] = pos
        after = pos + 8
        if after <= end:
            after += _read_u64(data, pos)[0]
        if after > end:
            raise StringTooLong(index, pos)
        pos = after
    return pos
