"""Finding strings: always where a plain walk finds them, whatever the guesses say."""

from __future__ import annotations

import struct

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from tests.files.gguf_bytes import string
from treadle.files import gguf_strings
from treadle.files.gguf_strings import StringTooLong, string_heads


def plain_heads(raw: bytes, start: int, n: int) -> list[int]:
    """The heads, fewer than n + 1 when the string at the last one runs out of the buffer."""
    heads = [start]
    for _ in range(n):
        end = heads[-1] + 8
        if end <= len(raw):
            end += int(struct.unpack_from("<Q", raw, heads[-1])[0])
        if end > len(raw):
            break
        heads.append(end)
    return heads


def check(raw: bytes, start: int, n: int) -> None:
    buffer = np.frombuffer(raw, np.uint8)
    expected = plain_heads(raw, start, n)
    if len(expected) == n + 1:
        assert string_heads(buffer, start, n).tolist() == expected
        return
    with pytest.raises(StringTooLong) as caught:
        string_heads(buffer, start, n)
    assert (caught.value.index, caught.value.offset) == (len(expected) - 1, expected[-1])


PIECES = st.one_of(
    st.binary(max_size=12),
    st.integers(0, 20).map(bytes),  # zeros look like lengths
    st.integers(250, 260).map(lambda n: b"x" * n),
    st.just(struct.pack("<Q", 1) + b"a"),  # a string inside a string
    st.just(b"word"),
)


@given(
    items=st.lists(PIECES, max_size=60),
    lead=st.integers(0, 9),
    tail=st.binary(max_size=40),
    window=st.sampled_from([1, 8, 64, 1 << 18]),
)
def test_heads_are_those_of_a_plain_walk(
    items: list[bytes], lead: int, tail: bytes, window: int
) -> None:
    raw = bytes(lead) + b"".join(map(string, items)) + tail
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(gguf_strings, "WINDOW", window)
        check(raw, lead, len(items))
        check(raw, lead, len(items) // 2)


@given(raw=st.binary(max_size=200), start=st.integers(0, 30), n=st.integers(0, 12))
def test_any_bytes_at_all(raw: bytes, start: int, n: int) -> None:
    check(raw, min(start, len(raw)), n)


@pytest.mark.parametrize("item", [b"", b"\0" * 8, b"x" * 255, b"x" * 256, b"x" * 300_000, b"word"])
def test_many_alike(item: bytes) -> None:
    n = max(3, min(20_000, 3_000_000 // (len(item) + 8)))
    heads = string_heads(np.frombuffer(string(item) * n, np.uint8), 0, n)
    assert np.array_equal(heads, np.arange(n + 1) * (len(item) + 8))


def test_lengths_that_would_wrap_around() -> None:
    for length in (2**64 - 1, 2**64 - 8, 2**63, 2**63 - 8):
        check(struct.pack("<Q", 1) + b"a" + struct.pack("<Q", length) + bytes(64), 0, 3)
