"""Reads WAV files: samples as float32 from -1 to 1.

Source: Microsoft's "Multimedia Programming Interface and Data Specifications 1.0" (1991) and
"Multiple channel audio data and WAVE files" (2007).
"""

from __future__ import annotations

import struct
from collections.abc import Iterator

import numpy as np

from treadle.base.fast_classes import dataclass
from treadle.errors import FileError, UnsupportedError

PCM = 1
FLOAT = 3
EXTENSIBLE = 0xFFFE  # the format's number stands in a later field
# Numbers of RFC 2361's registry, so that an error can name them.
_CODECS = {2: "ADPCM", 6: "A-law", 7: "mu-law", 0x11: "IMA ADPCM", 0x31: "GSM", 0x55: "MP3"}
_WIDTHS = {PCM: (8, 16, 24, 32), FLOAT: (32, 64)}  # bits of a sample
STREAMED = 0xFFFFFFFF  # a size that was unknown when the header was written
_MAX_CHANNELS = 64
FRAMES = 1 << 18  # of one block


@dataclass(frozen=True)
class WavFormat:
    """Format of a WAV file's samples.

    rate: frames a second; a frame has one sample for each channel.
    codec: ``PCM`` (integers) or ``FLOAT``.
    bits: bits of a sample.
    channels: samples of a frame.
    """

    rate: int
    codec: int
    bits: int
    channels: int

    @property
    def frame_bytes(self) -> int:
        """Number of bytes of a frame."""
        return self.channels * self.bits // 8

    def mono(self, data: bytes | memoryview) -> np.ndarray:
        """Decode ``data``, the bytes of whole frames; return the mean of their channels, float32
        ``[n_frames]``.
        """
        samples = self._decoded(data)
        return samples if self.channels == 1 else samples.reshape(-1, self.channels).mean(1)

    def _decoded(self, data: bytes | memoryview) -> np.ndarray:
        """Return the samples in ``data``, whole frames, as float32 ``[n_frames * channels]``,
        channels interleaved.
        """
        if self.codec == FLOAT:
            with np.errstate(over="ignore"):  # infinite then, which is refused
                return np.frombuffer(data, f"<f{self.bits // 8}").astype(np.float32)
        if self.bits == 8:  # the only width without a sign
            return (np.frombuffer(data, np.uint8).astype(np.float32) - 128) / 128
        if self.bits == 24:
            wide = np.zeros((len(data) // 3, 4), np.uint8)
            wide[:, 1:] = np.frombuffer(data, np.uint8).reshape(-1, 3)
            values = wide.view("<i4").reshape(-1)
            return values.astype(np.float32) / np.float32(1 << 31)
        values = np.frombuffer(data, f"<i{self.bits // 8}")
        return values.astype(np.float32) / np.float32(1 << self.bits - 1)


@dataclass(frozen=True)
class WavSound:
    """A WAV file's samples, not yet decoded."""

    format: WavFormat
    n_frames: int
    _data: memoryview

    @property
    def rate(self) -> int:
        """Frames a second."""
        return self.format.rate

    def blocks(self) -> Iterator[np.ndarray]:
        """Yield the mean of the channels as float32 ``[n]``, in blocks of at most FRAMES frames."""
        n_bytes = self.format.frame_bytes
        for begin in range(0, self.n_frames, FRAMES):
            end = min(begin + FRAMES, self.n_frames)
            yield self.format.mono(self._data[begin * n_bytes : end * n_bytes])


def open_wav(data: bytes, place: str) -> WavSound:
    """Read a WAV file's header; return its samples, not yet decoded.

    Raises FileError for a damaged or cut file, UnsupportedError for samples other than integers of
    8, 16, 24 or 32 bits and floats of 32 or 64.
    """
    view = memoryview(data)
    described: memoryview | None = None
    at = 12
    while at + 8 <= len(view):
        name = bytes(view[at : at + 4])
        (size,) = struct.unpack_from("<I", view, at + 4)
        at += 8
        if name == b"data":
            if described is None:
                raise FileError("the samples come before their format", path=place, offset=at)
            if size == STREAMED:
                size = len(view) - at
            if size > len(view) - at:
                raise FileError(
                    f"cut: {len(view) - at} bytes of samples", path=place, expected=f"{size} bytes"
                )
            form = wav_format(described, place)
            return WavSound(form, size // form.frame_bytes, view[at : at + size])
        if name == b"fmt ":
            described = view[at : at + size]
        at += size + size % 2  # chunks begin at even offsets
    raise FileError("no samples", path=place, expected="a data chunk")


def wav_format(described: memoryview, place: str) -> WavFormat:
    """Return the format that the contents of a ``fmt`` chunk describe. Raises FileError for an
    invalid one, UnsupportedError for samples of another kind than ``open_wav`` reads.
    """
    try:
        codec, channels, rate, _, n_bytes, bits = struct.unpack_from("<HHIIHH", described)
        if codec == EXTENSIBLE:
            (codec,) = struct.unpack_from("<H", described, 24)
    except struct.error:
        raise FileError(
            f"its format has {len(described)} bytes", path=place, expected="at least 16"
        ) from None
    if codec not in _WIDTHS or bits not in _WIDTHS[codec]:
        name = _CODECS.get(codec, f"format {codec}") if codec not in _WIDTHS else "samples"
        raise UnsupportedError(
            f"{place}: WAV with {name} of {bits} bits is not read: expected integers of 8, 16, 24 "
            "or 32 bits, or floats of 32 or 64: ffmpeg -i IN.wav -c:a pcm_s16le OUT.wav"
        )
    if not 1 <= channels <= _MAX_CHANNELS or n_bytes != channels * bits // 8:
        raise FileError(
            f"{channels} channels of {bits} bits in frames of {n_bytes} bytes",
            path=place,
            expected=f"1 to {_MAX_CHANNELS} channels that fill a frame",
        )
    return WavFormat(rate, codec, bits, channels)
