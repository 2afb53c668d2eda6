"""Hostile files: any bytes give a model or a typed error, in time and memory set by their size."""

from __future__ import annotations

import functools
import struct
import tracemalloc
from pathlib import Path

import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from tests.files import gguf_bytes as gb
from treadle.errors import FileError, UnsupportedError
from treadle.files.gguf import GGUFArray, open_gguf

# What a file may cost in memory: the reader's own objects for each entry (a tensor described
# in 24 bytes is under a kilobyte of Python), and the windows in which strings are sought.
FACTOR = 40
FIXED = 6 << 20

MARKS = (1, 4, 31, 255, 1 << 16, 1 << 31, (1 << 32) - 1, 1 << 40, (1 << 63) - 1, (1 << 64) - 1)

fuzz = settings(
    max_examples=300,
    deadline=None,
    suppress_health_check=[HealthCheck.function_scoped_fixture],
)


@functools.cache
def sound() -> bytes:
    """A file with a value of every kind and tensors of several types, about a kilobyte."""
    kvs = [gb.kv(b"k%d" % kind, kind, bytes(8)[:size]) for kind, size in SIZES.items()]
    kvs += [
        gb.kv(b"s", gb.STRING, gb.string(b"text")),
        gb.strings(b"tokens", [b"<unk>", b"", b"\0", b"word" * 9] + [b"%d" % i for i in range(20)]),
        gb.kv(b"scores", gb.ARRAY, struct.pack("<IQ4f", 6, 4, 1, 2, 3, 4)),
        gb.kv(b"general.alignment", gb.U32, struct.pack("<I", 32)),
        gb.kv(b"split.count", gb.U32, struct.pack("<I", 1)),
    ]
    infos = [
        gb.info(b"a.weight", [32, 2], 8, 0),
        gb.info(b"b.weight", [4, 2], 0, 96),
        gb.info(b"c.weight", [256], 12, 128),
        gb.info(b"d.bias", [3], 1, 288),
    ]
    return gb.gguf(kvs, infos, bytes(range(256)) + bytes(64))


SIZES = {0: 1, 1: 1, 2: 2, 3: 2, 4: 4, 5: 4, 6: 4, 7: 1, 10: 8, 11: 8, 12: 8}


def read(path: Path, raw: bytes) -> None:
    """Open and touch everything; only the two typed errors may come out."""
    path.write_bytes(raw)
    tracemalloc.start()
    try:
        g = open_gguf(path)
        for value in g.metadata.values():
            if isinstance(value, GGUFArray):
                assert len(list(value)) == len(value)
        for tensor in g.tensors.values():
            if not g.header_only:
                assert tensor.data.size == tensor.n_bytes
        g.close()
    except (FileError, UnsupportedError) as e:
        message = str(e)
    else:
        message = str(path)
    finally:
        peak = tracemalloc.get_traced_memory()[1]
        tracemalloc.stop()
    assert str(path) in message
    assert peak <= FACTOR * len(raw) + FIXED


def test_the_file_that_is_damaged_here_is_sound(tmp_path: Path) -> None:
    path = tmp_path / "x.gguf"
    path.write_bytes(sound())
    g = open_gguf(path)
    assert len(g.tensors) == 4
    assert np.array_equal(g.tensors["a.weight"].data, np.arange(68, dtype=np.uint8))


@pytest.mark.slow
@given(flips=st.lists(st.tuples(st.integers(0, 1 << 20), st.integers(0, 7)), min_size=1))
@fuzz
def test_flipped_bits(tmp_path: Path, flips: list[tuple[int, int]]) -> None:
    raw = bytearray(sound())
    for at, bit in flips:
        raw[at % len(raw)] ^= 1 << bit
    read(tmp_path / "x.gguf", bytes(raw))


@pytest.mark.slow
@given(at=st.integers(0, 1 << 20), mark=st.sampled_from(MARKS), width=st.sampled_from([4, 8]))
@fuzz
def test_lengths_and_counts_replaced(tmp_path: Path, at: int, mark: int, width: int) -> None:
    raw = bytearray(sound())
    at %= len(raw) - width
    raw[at : at + width] = (mark & ((1 << 8 * width) - 1)).to_bytes(width, "little")
    read(tmp_path / "x.gguf", bytes(raw))


@pytest.mark.slow
@given(cut=st.integers(0, 1 << 20), junk=st.binary(max_size=64))
@fuzz
def test_cut_short_and_continued(tmp_path: Path, cut: int, junk: bytes) -> None:
    raw = sound()
    read(tmp_path / "x.gguf", raw[: cut % len(raw)] + junk)


@pytest.mark.slow
def test_every_shorter_file_is_refused(tmp_path: Path) -> None:
    raw = sound()
    data = raw.index(bytes(range(256)))
    path = tmp_path / "x.gguf"
    for n in range(len(raw)):
        if data - 32 < n <= data or n == data + 294:
            continue  # a header alone; all but the last padding, which some writers leave out
        path.write_bytes(raw[:n])
        with pytest.raises((FileError, UnsupportedError)):
            open_gguf(path)


@pytest.mark.slow
@given(body=st.binary(max_size=400), counts=st.tuples(st.integers(0, 9), st.integers(0, 9)))
@fuzz
def test_noise_behind_a_sound_start(tmp_path: Path, body: bytes, counts: tuple[int, int]) -> None:
    read(tmp_path / "x.gguf", b"GGUF" + struct.pack("<IQQ", 3, *counts) + body)


@pytest.mark.parametrize("kind", [*SIZES, gb.STRING, gb.ARRAY, 13])
def test_a_count_of_almost_all_memory(tmp_path: Path, kind: int) -> None:
    for n in (1 << 20, 1 << 36, 1 << 60, (1 << 64) - 1):
        value = struct.pack("<IQ", kind, n) + bytes(4096)
        read(tmp_path / "x.gguf", gb.gguf([gb.kv(b"x", gb.ARRAY, value)]))


@pytest.mark.slow
def test_megabytes_of_empty_strings(tmp_path: Path) -> None:
    n = 400_000
    value = struct.pack("<IQ", gb.STRING, n) + bytes(8 * n)
    read(tmp_path / "x.gguf", gb.gguf([gb.kv(b"x", gb.ARRAY, value)]))
