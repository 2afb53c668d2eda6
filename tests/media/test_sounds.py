"""Sounds in every form and format that a caller gives, as samples; and those that are refused."""

from __future__ import annotations

import base64
import io
import json
import os
import struct
import sys
import wave
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from treadle.errors import FileError, TreadleError, UnsupportedError
from treadle.media import sound_file
from treadle.media.limits import MediaLimits
from treadle.media.resample import PASSBAND, STOPBAND_DB, Resampler, resample
from treadle.media.source import read_sound

LIBRARIES = (pytest.param("av", marks=pytest.mark.slow), "soundfile")  # av is in the extra dev
STEP = 10 ** (-STOPBAND_DB / 20)  # what the filters leave


@pytest.fixture
def media(data: Path) -> Path:
    return data / "media" / "media"


def original(seconds: float = 3.0) -> np.ndarray:
    """The sound of all files: a chirp, beats and a little noise."""
    t = np.arange(int(seconds * 16000)) / 16000
    sound = 0.3 * np.sin(2 * np.pi * (200 + 300 * t) * t)
    sound += 0.1 * np.sin(2 * np.pi * 1800 * t) * (np.sin(2 * np.pi * 3 * t) > 0)
    return sound + 0.02 * np.random.default_rng(5).standard_normal(t.shape)


def correlation(got: np.ndarray, most_lag: int) -> float:
    """Largest one of ``got`` with the original, over shifts of up to ``most_lag`` samples."""
    truth = original()[: len(got)]
    got = got[: len(truth)].astype(np.float64)
    size = 2 * len(truth)
    products = np.fft.irfft(np.fft.rfft(got, size) * np.fft.rfft(truth, size).conj(), size)
    lags = np.arange(-most_lag, most_lag + 1)
    lag = int(lags[products[lags].argmax()])
    n = len(truth) - abs(lag)
    a = got[max(lag, 0) :][:n]
    b = truth[max(-lag, 0) :][:n]
    return float(a @ b) / float(np.linalg.norm(a) * np.linalg.norm(b))


# -- files -----------------------------------------------------------------------------------------


@pytest.fixture
def expected(media: Path) -> dict[str, Any]:
    found: dict[str, Any] = json.loads((media / "expected.json").read_text("utf-8"))
    return {name: row for name, row in found.items() if "length" in row}


def test_every_wav_file(media: Path, expected: dict[str, Any]) -> None:
    names = [name for name in expected if name.endswith(".wav")]
    assert len(names) == 5
    for name in names:
        got = read_sound(media / name)
        assert got.dtype == np.float32
        assert len(got) == expected[name]["length"]
        assert correlation(got, 0) >= expected[name]["soundfile"]["correlation"] - 3e-4
    exact = read_sound(media / "float.wav")
    np.testing.assert_allclose(exact, original(1), atol=1e-7)
    for name, step in (("s16.wav", 2.0**-15), ("s24.wav", 2.0**-23), ("u8.wav", 2.0**-7)):
        assert np.abs(read_sound(media / name) - exact).max() <= step
    # 0.75: the mean of the channels; the noise above 7.2 kHz is not kept
    stereo = read_sound(media / "stereo44.wav")
    assert np.abs(stereo - 0.75 * exact)[200:-200].std() < 0.75 * 0.02


@pytest.mark.parametrize("library", LIBRARIES)
def test_every_compressed_file(
    media: Path, expected: dict[str, Any], library: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    use(library, monkeypatch)
    names = [name for name in expected if not name.endswith(".wav")]
    assert len(names) == 6
    for name in names:
        row = expected[name][library]
        if isinstance(row, str):
            with pytest.raises(TreadleError, match=r"(MP4|WebM) needs PyAV, .*: pip install av"):
                read_sound(media / name)
            continue
        got = read_sound(media / name)
        assert got.dtype == np.float32
        assert got.flags.writeable
        assert abs(len(got) - row["length"]) <= 1
        n_lag = 1600 if name in ("s16.mp3", "s44.m4a") else 0
        assert correlation(got, n_lag) >= row["correlation"] - 3e-4


def use(library: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Let ``library`` be the only one; soundfile is the tests', av is there for all tests."""
    if not sound_file.is_installed(library):
        if library == "av" and os.environ.get("CI") != "true":
            pytest.skip("PyAV is not installed: make test-all")
        pytest.fail(f"{library} is not installed")
    monkeypatch.setattr(sound_file, "is_installed", lambda name: name == library)


def test_without_a_library(media: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sound_file, "is_installed", lambda name: False)
    with pytest.raises(TreadleError, match=r'FLAC needs a decoder.*"treadle\[sound\]"'):
        read_sound(media / "s48.flac")
    with pytest.raises(TreadleError, match="MP4 needs PyAV"):
        read_sound(media / "s44.m4a")
    assert len(read_sound(media / "s16.wav")) == 16000


def test_every_source_of_a_file(media: Path) -> None:
    path = media / "s16.wav"
    raw = path.read_bytes()
    truth = read_sound(path)
    url = "data:audio/wav;base64," + base64.b64encode(raw).decode()
    for source in (str(path), path.as_uri(), raw, bytearray(raw), memoryview(raw), url):
        np.testing.assert_array_equal(read_sound(source), truth)


@pytest.mark.parametrize("source", [None, 5, [0.1], {"array": 1}, (1, 2)])
def test_other_types(source: Any) -> None:
    with pytest.raises(TreadleError, match=r"^message 1: .* is not read as a sound: expected"):
        read_sound(source, place="message 1")


# -- WAV -------------------------------------------------------------------------------------------


def wav(
    frames: bytes,
    *,
    codec: int = 1,
    channels: int = 1,
    rate: int = 16000,
    bits: int = 16,
    between: bytes = b"",
    stated: int | None = None,
    extension: bytes = b"",
) -> bytes:
    """A WAV file of raw frames; ``between``: chunks before the samples."""
    n_bytes = channels * bits // 8
    described = struct.pack("<HHIIHH", codec, channels, rate, 0, n_bytes, bits)
    described += extension
    size = len(frames) if stated is None else stated
    body = b"fmt " + struct.pack("<I", len(described)) + described + between
    body += b"data" + struct.pack("<I", size) + frames
    return b"RIFF" + struct.pack("<I", (4 + len(body)) & 0xFFFFFFFF) + b"WAVE" + body


@pytest.mark.parametrize("bits", [16, 32])
def test_integers(bits: int) -> None:
    edge = 1 << bits - 1
    values = np.array([0, 1, -1, edge - 1, -edge, 12345], f"<i{bits // 8}")
    got = read_sound(wav(values.tobytes(), bits=bits))
    np.testing.assert_allclose(got, values / edge, rtol=1e-7)
    assert got[4] == -1


def test_integers_of_24_bits() -> None:
    values = np.array([0, 1, -1, 2**23 - 1, -(2**23), 123456, -654321])
    frames = b"".join(int(v).to_bytes(3, "little", signed=True) for v in values)
    np.testing.assert_array_equal(read_sound(wav(frames, bits=24)), np.float32(values / 2**23))


def test_bytes_have_no_sign() -> None:
    got = read_sound(wav(bytes([0, 128, 255]), bits=8))
    np.testing.assert_array_equal(got, [-1, 0, 127 / 128])


@pytest.mark.parametrize("bits", [32, 64])
def test_floats(bits: int) -> None:
    values = np.array([0, 0.1, -1, 1.5], f"<f{bits // 8}")
    np.testing.assert_array_equal(
        read_sound(wav(values.tobytes(), codec=3, bits=bits)), values.astype(np.float32)
    )


def test_channels_are_averaged() -> None:
    frames = np.arange(-300, 300, dtype="<i2").reshape(-1, 3)
    got = read_sound(wav(frames.tobytes(), channels=3))
    np.testing.assert_allclose(got, frames.mean(1) / 32768, atol=1e-8)


def test_as_the_standard_library_writes_it() -> None:
    out = io.BytesIO()
    values = np.arange(-1000, 1000, dtype="<i2")
    with wave.open(out, "wb") as file:
        file.setnchannels(2)
        file.setsampwidth(2)
        file.setframerate(16000)
        file.writeframes(values.tobytes())
    truth = values.reshape(-1, 2).mean(1) / 32768
    np.testing.assert_allclose(read_sound(out.getvalue()), truth, atol=1e-8)


def test_more_than_one_block(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("treadle.media.wav.FRAMES", 7)
    values = np.arange(1000, dtype="<i2")
    got = read_sound(wav(values.tobytes(), channels=2))
    np.testing.assert_array_equal(got, np.float32(values.reshape(-1, 2).mean(1) / 32768))


def test_headers_of_many_programs() -> None:
    values = np.arange(100, dtype="<i2")
    truth = np.float32(values / 32768)
    guid = struct.pack("<HHIH", 22, 16, 4, 1) + bytes.fromhex("000000001000800000aa00389b71")
    odd = b"LIST" + struct.pack("<I", 3) + b"abc\0"  # an odd size has a byte of padding
    for data in (
        wav(values.tobytes(), codec=0xFFFE, extension=guid),
        wav(values.tobytes(), extension=b"\0\0"),
        wav(values.tobytes(), between=odd),
        wav(values.tobytes(), stated=0xFFFFFFFF),  # written to a pipe
        wav(values.tobytes()) + b"LIST\4\0\0\0abcd",
        wav(values.tobytes() + b"\1", stated=201),  # half a frame at the end
    ):
        np.testing.assert_array_equal(read_sound(data), truth)


def test_codecs_are_refused_by_name() -> None:
    for codec, bits, name in ((6, 8, "A-law"), (7, 8, "mu-law"), (2, 4, "ADPCM"), (85, 0, "MP3")):
        with pytest.raises(UnsupportedError, match=f"WAV with {name} of {bits} bits is not read"):
            read_sound(wav(bytes(100), codec=codec, bits=bits))
    for codec, bits in ((1, 12), (1, 64), (3, 16), (0x1234, 16)):
        with pytest.raises(UnsupportedError, match="expected integers of 8, 16, 24 or 32 bits"):
            read_sound(wav(bytes(96), codec=codec, bits=bits))


def test_damaged_wav_files() -> None:
    frames = bytes(200)
    whole = wav(frames)
    bad = [
        (whole[:-1], "cut: 199 bytes of samples .expected 200 bytes"),
        (wav(frames, stated=400), "cut"),
        (wav(b""), "no samples"),
        (whole[:20], "no samples"),
        (whole[:12], "no samples"),
        (whole[:12] + whole[36:], "come before their format"),
        (whole[:12] + b"fmt \4\0\0\0abcd" + whole[36:], "its format has 4 bytes"),
        (wav(frames, channels=0), "0 channels"),
        (wav(bytes(65 * 2), channels=65), "65 channels"),
        (wav(frames, rate=0), "0 samples a second .expected 1000 to 384000"),
        (wav(frames, rate=4_000_000_000), "4000000000 samples a second"),
        (wav(np.array([0, np.nan], "<f4").tobytes(), codec=3, bits=32), "NaN or infinite"),
        (wav(np.array([0, 1e300], "<f8").tobytes(), codec=3, bits=64), "NaN or infinite"),
        (b"", "an empty file"),
    ]
    for data, words in bad:
        with pytest.raises(FileError, match=rf"^a call.*: .*{words}"):
            read_sound(data, place="a call")


def test_formats_that_are_not_read() -> None:
    for data, name in ((b"#EXTM3U\nhttp://a\n", "M3U"), (b"FORM\0\0\0\0AIFF", "AIFF")):
        with pytest.raises(UnsupportedError, match=f"{name} is not read: expected WAV, FLAC"):
            read_sound(data)
    with pytest.raises(UnsupportedError, match="PNG is not read"):
        read_sound(b"\x89PNG\r\n\x1a\n")
    with pytest.raises(UnsupportedError, match="unknown format"):
        read_sound(b"abcdefgh")


def test_limits() -> None:
    long = wav(bytes(2 * 16000 * 3))
    cases = [
        (MediaLimits(sound_seconds=2), "the sound is 3 s long: the limit is 2 s"),
        (MediaLimits(sound_bytes=len(long) - 1), "the limit for a sound is 96.0 kB"),
        (MediaLimits(sound_bytes=3 * 16000 * 4 - 1), "192 kB: the limit for a sound is 192 kB"),
    ]
    for limits, words in cases:
        with pytest.raises(UnsupportedError, match=words):
            read_sound(long, limits)
    assert len(read_sound(long, MediaLimits(sound_seconds=3, sound_bytes=3 * 16000 * 4))) == 48000


def test_a_long_sound_is_refused_before_it_is_decoded(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("treadle.media.wav.WavSound.blocks", lambda self: pytest.fail("decoded"))
    with pytest.raises(UnsupportedError, match="1801 s long"):
        read_sound(wav(bytes(1801 * 1000), bits=8, rate=1000))


# -- compressed files in their process -------------------------------------------------------------


@pytest.mark.parametrize("library", LIBRARIES)
def test_limits_of_compressed_files(
    media: Path, library: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    use(library, monkeypatch)
    for limits, words in (
        (MediaLimits(sound_seconds=1), "the sound is .* s long: the limit is 1 s"),
        (MediaLimits(sound_bytes=100_000), "the limit for a sound is 100 kB"),
    ):
        with pytest.raises(UnsupportedError, match=rf"^a call: .*{words}"):
            read_sound(media / "s48.ogg", limits, place="a call")


@pytest.mark.parametrize("library", LIBRARIES)
def test_damaged_compressed_files(
    media: Path, library: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    use(library, monkeypatch)
    for data in (
        b"OggS" + bytes(500),
        b"fLaC" + bytes(500),
        b"ID3\4" + b"#EXTM3U\n/etc/passwd\n" * 9,
    ):
        with pytest.raises(FileError, match=r"^a call: damaged: "):
            read_sound(data, place="a call")
    if library == "av":
        for data in (b"\0\0\0\x20ftypM4A " + bytes(99), b"\x1a\x45\xdf\xa3" + bytes(99)):
            with pytest.raises(FileError, match=r"^a call: damaged: "):
                read_sound(data, place="a call")


def process_that(monkeypatch: pytest.MonkeyPatch, code: str) -> None:
    monkeypatch.setattr(sound_file, "_START", code)


def test_a_decoder_that_crashes(media: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    use("soundfile", monkeypatch)
    process_that(monkeypatch, "import os; os.abort()")
    with pytest.raises(FileError, match="its decoder ended with exit code"):
        read_sound(media / "s48.flac")


def test_a_decoder_that_does_not_end(media: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    use("soundfile", monkeypatch)
    process_that(monkeypatch, "while True: pass")
    with pytest.raises(UnsupportedError, match="decoding takes more than 1 s, the limit"):
        read_sound(media / "s48.flac", MediaLimits(decoding_seconds=1))


@pytest.mark.skipif(sys.platform != "linux", reason="Linux alone holds a process to its memory")
def test_a_decoder_that_takes_too_much_memory(media: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    use("soundfile", monkeypatch)
    for n_bytes in (1 << 10, 1 << 20):
        with pytest.raises(TreadleError, match=r"decoding takes more|its decoder ended"):
            read_sound(media / "s48.flac", MediaLimits(decoding_bytes=n_bytes))
    assert len(read_sound(media / "s48.flac", MediaLimits(decoding_bytes=1 << 28))) == 48000


def test_without_an_interpreter(media: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    use("soundfile", monkeypatch)
    monkeypatch.setattr(sound_file, "interpreter", lambda: "/nowhere/python")
    with pytest.raises(TreadleError, match="cannot start the process that decodes sounds"):
        read_sound(media / "s48.flac")


# -- arrays ----------------------------------------------------------------------------------------


def test_arrays() -> None:
    values = original(0.1)
    np.testing.assert_array_equal(read_sound(values), np.float32(values))
    np.testing.assert_array_equal(read_sound((values, 16000)), np.float32(values))
    both = np.stack([values, 3 * values], 1)
    np.testing.assert_allclose(read_sound(both), 2 * values, atol=1e-7)
    whole = np.rint(values * 32767).astype(np.int16)
    np.testing.assert_array_equal(read_sound(whole), np.float32(whole / 32768))
    slow = read_sound((values.astype(np.float32), 8000))
    np.testing.assert_array_equal(slow, resample(values.astype(np.float32), 8000, 16000))
    single = values.astype(np.float32)
    assert not np.shares_memory(read_sound(single), single)


@pytest.mark.parametrize(
    ("array", "words"),
    [
        (np.zeros(0), "no samples"),
        (np.zeros((2, 100)), r"expected \[n, channels\]"),
        (np.zeros((2, 2, 2)), "expected floats or int16"),
        (np.zeros(9, np.int32), "expected floats or int16"),
        (np.full(9, np.inf), "NaN or infinite"),
        ((np.zeros(9), 100), "100 samples a second"),
        ((np.zeros(9), 16000.5), "expected an integer"),
    ],
)
def test_arrays_that_are_refused(array: Any, words: str) -> None:
    with pytest.raises(TreadleError, match=words):
        read_sound(array)


# -- the change of rate ----------------------------------------------------------------------------

# The last two have 2000 and 4000 filters, more than whole periods are computed for.
RATES = [8000, 11025, 22050, 24000, 44100, 48000, 88200, 96000, 192000, 44104, 7996]


@pytest.mark.parametrize("rate", RATES)
def test_sines_pass_and_aliases_do_not(rate: int) -> None:
    """The filter's ripple and its stopband are both 96 dB down: 1.6e-5."""
    t = np.arange(rate // 4 + 17) / rate
    half = min(rate, 16000) / 2
    for frequency in (0, 50, 0.3 * half, (PASSBAND - 0.01) * half):
        got = resample(np.cos(2 * np.pi * frequency * t).astype(np.float32), rate, 16000)
        assert len(got) == round(len(t) * 16000 / rate)
        truth = np.cos(2 * np.pi * frequency * np.arange(len(got)) / 16000)
        assert np.abs(got - truth)[300:-300].max() < 1.5 * STEP
    if rate > 17000:
        for frequency in (8001, 8500, 0.99 * rate / 2):
            got = resample(np.cos(2 * np.pi * frequency * t).astype(np.float32), rate, 16000)
            assert np.abs(got)[300:-300].max() < 1.5 * STEP


@pytest.mark.parametrize("rate", [8000, 44100, 48000, 44104, 16000])
def test_parts_of_any_size(rate: int) -> None:
    draw = np.random.default_rng(rate)
    samples = draw.standard_normal(20_000).astype(np.float32)
    whole = resample(samples, rate, 16000)
    for most in (1, 50, 5000):
        resampler = Resampler(rate, 16000)
        parts = []
        at = 0
        while at < (2000 if most == 1 else len(samples)):
            n = int(draw.integers(0, most, endpoint=True))
            parts.append(resampler.push(samples[at : at + n]))
            at += n
        got = np.concatenate([*parts, resampler.finish()])
        n_same = len(got) - (400 if most == 1 else 0)
        # float32 sums of up to 400 products, in another order
        np.testing.assert_allclose(got[:n_same], whole[:n_same], atol=400 * 2**-24)


def test_the_same_rate_is_left_as_it_is() -> None:
    samples = np.random.default_rng(0).standard_normal(999).astype(np.float32)
    np.testing.assert_array_equal(resample(samples, 16000, 16000), samples)


@pytest.mark.parametrize("n", [0, 1, 2, 3, 5])
@pytest.mark.parametrize("rate", [8000, 44100, 48000, 44104, 16000])
def test_very_short_sounds(n: int, rate: int) -> None:
    got = resample(np.ones(n, np.float32), rate, 16000)
    assert len(got) == (2 * n * 16000 + rate) // (2 * rate)
    assert np.isfinite(got).all()
