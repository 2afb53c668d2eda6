"""Sounds block by block: equal to those that are read at once, from files, bytes and pipes."""

from __future__ import annotations

import io
import os
import struct
import subprocess
import threading
import wave
from collections.abc import Callable
from contextlib import closing, nullcontext, suppress
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from treadle.errors import FileError, TreadleError, UnsupportedError
from treadle.media import sound_file, sound_stream
from treadle.media.limits import MediaLimits
from treadle.media.sound_stream import open_sound_stream
from treadle.media.source import read_sound


@pytest.fixture
def media(data: Path) -> Path:
    return data / "media" / "media"


def whole(source: Any, **settings: Any) -> np.ndarray:
    with open_sound_stream(source, **settings) as stream:
        return np.concatenate([*stream])


def piped(data: bytes) -> io.BufferedReader:
    """The read end of a pipe, which a thread fills."""
    read, write = os.pipe()

    def fill() -> None:
        # A reader that has found an error does not read on.
        with suppress(BrokenPipeError), os.fdopen(write, "wb") as end:
            end.write(data)

    threading.Thread(target=fill, daemon=True).start()
    return os.fdopen(read, "rb")


def test_wav_files(media: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sound_stream, "FRAMES", 700)
    for path in sorted(media.glob("*.wav")):
        expected = read_sound(path)
        stream = open_sound_stream(path)
        assert stream.seconds == pytest.approx(len(expected) / 16000, abs=1e-3)
        blocks = [*stream]
        assert len(blocks) > 3
        # Resampled blocks are equal up to rounding.
        np.testing.assert_allclose(np.concatenate(blocks), expected, atol=1e-6)
        np.testing.assert_allclose(whole(path.read_bytes()), expected, atol=1e-6)
        with piped(path.read_bytes()) as pipe:
            stream = open_sound_stream(pipe)
            assert stream.seconds is None
            np.testing.assert_allclose(np.concatenate([*stream]), expected, atol=1e-6)


@pytest.mark.parametrize(
    "name", ["s48.flac", "s48.ogg", pytest.param("s16.mp3", marks=pytest.mark.slow)]
)
def test_compressed_files(media: Path, name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sound_file, "is_installed", lambda library: library == "soundfile")
    expected = read_sound(media / name)
    stream = open_sound_stream(media / name)
    assert stream.seconds == pytest.approx(3.0, abs=0.1)
    assert np.array_equal(np.concatenate([*stream]), expected)
    with piped((media / name).read_bytes()) as pipe:
        assert np.array_equal(whole(pipe), expected)


@pytest.mark.slow
def test_by_av(media: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    if not sound_file.is_installed("av"):
        pytest.skip("PyAV is not installed: make test-all")
    for name in ("s44.m4a", "s48.webm", "s48.opus"):
        assert np.array_equal(whole(media / name), read_sound(media / name))


def test_arrays() -> None:
    samples = np.linspace(-1, 1, 32000, dtype=np.float32)
    assert np.array_equal(whole(samples), samples)
    assert len(whole((samples, 8000))) == 64000
    assert open_sound_stream(samples).seconds == 2.0


def test_closing_ends_the_decoder(media: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sound_file, "is_installed", lambda library: library == "soundfile")
    started: list[Any] = []
    popen = subprocess.Popen

    def start(*args: Any, **settings: Any) -> Any:
        started.append(popen(*args, **settings))
        return started[-1]

    monkeypatch.setattr(subprocess, "Popen", start)
    stream = open_sound_stream(media / "s48.flac")
    next(iter(stream))
    stream.close()
    assert started[0].poll() is not None


def header(size: int, *, riff: int = 0xFFFFFFFF, chunk: bytes = b"") -> bytes:
    form = struct.pack("<HHIIHH", 1, 1, 16000, 32000, 2, 16)
    return (
        struct.pack("<4sI4s", b"RIFF", riff, b"WAVE")
        + chunk
        + struct.pack("<4sI", b"fmt ", 16)
        + form
        + struct.pack("<4sI", b"data", size)
    )


def test_a_pipe_whose_size_is_unknown() -> None:
    data = (np.arange(5000) % 100).astype("<i2").tobytes()
    for size in (0xFFFFFFFF, 0x7FFFF000, 0, len(data)):
        with piped(header(size) + data + b"\1") as pipe:
            assert len(whole(pipe)) == 5000
    listed = struct.pack("<4sI3s1x", b"LIST", 3, b"abc")  # chunks begin at even offsets
    assert len(whole(header(len(data), chunk=listed) + data)) == 5000
    assert len(whole(header(0xFFFFFFFF) + data)) == 5000


Make = Callable[[Path], Any]


@pytest.mark.every_case
@pytest.mark.parametrize(
    ("make", "error", "text"),
    [
        (lambda media: b"", FileError, "an empty file"),
        (lambda media: piped(b""), FileError, "an empty file"),
        (lambda media: header(4)[:30], FileError, "no samples"),
        (lambda media: header(0), FileError, "no samples"),
        (lambda media: header(9) + b"1234", FileError, "cut: 4 bytes of samples"),
        (lambda media: (media / "s48.flac").read_bytes()[:60], FileError, "damaged"),
        (lambda media: media / "plain.png", UnsupportedError, "PNG is not read"),
        (lambda media: media / "expected.json", UnsupportedError, "unknown format"),
        (lambda media: media / "none.wav", FileError, "No such file"),
        (lambda media: io.StringIO("text"), TreadleError, "gives str: expected bytes"),
        (lambda media: 5, TreadleError, "int is not read as a sound"),
        (
            lambda media: struct.pack("<4sI4s4sI", b"RIFF", 9, b"WAVE", b"fmt ", 1 << 30),
            FileError,
            "a chunk b'fmt ' of 1073741824 bytes",
        ),
        (
            lambda media: struct.pack("<4sI4s4sI", b"RIFF", 9, b"WAVE", b"data", 4),
            FileError,
            "come before their format",
        ),
    ],
)
def test_what_is_no_sound(make: Make, error: type[Exception], text: str, data: Path) -> None:
    source = make(data / "media" / "media")
    closed = closing(source) if hasattr(source, "close") else nullcontext()
    with closed, pytest.raises(error, match=text):
        whole(source)


def test_limits(media: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    short = MediaLimits(sound_seconds=2)
    with pytest.raises(UnsupportedError, match="the sound is 3 s long: the limit is 2 s"):
        whole(media / "s48.flac", limits=short)
    path = tmp_path / "long.wav"
    with wave.open(str(path), "wb") as file:
        file.setparams((1, 2, 16000, 0, "NONE", ""))
        file.writeframes(bytes(2 * 16000 * 3))
    with pytest.raises(UnsupportedError, match="the limit is 2 s"):
        whole(path, limits=short)
    with piped(path.read_bytes()) as pipe, pytest.raises(UnsupportedError, match="limit is 2 s"):
        whole(pipe, limits=short)
    few = MediaLimits(sound_bytes=1000)
    with pytest.raises(UnsupportedError, match="the limit for a sound"):
        whole(path, limits=few)
    with piped(path.read_bytes()) as pipe, pytest.raises(UnsupportedError, match="the limit"):
        whole(pipe, limits=few)
    monkeypatch.setattr(sound_file, "is_installed", lambda library: library == "soundfile")
    monkeypatch.setattr(sound_file, "_START", "import time; time.sleep(100)")
    with pytest.raises(UnsupportedError, match="more than 1 s, the limit"):
        whole(media / "s48.flac", limits=MediaLimits(decoding_seconds=1))
    monkeypatch.setattr(sound_file, "_START", "import sys; sys.exit(3)")
    with pytest.raises(FileError, match="ended with exit code 3"):
        whole(media / "s48.flac")
    monkeypatch.setattr(sound_stream, "decoder_command", lambda request: ["/nowhere/python"])
    with pytest.raises(TreadleError, match="cannot start the process"):
        whole(media / "s48.flac")
