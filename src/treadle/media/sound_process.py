"""Process that decodes one compressed sound: the file on standard input, samples on standard
output.

``sound_file`` and ``sound_stream`` start it. Decoders are large C libraries that read untrusted
data: a crash, an endless loop or too much memory ends only this process. The reply is one byte that
tells samples from an error, then float32 samples (one channel, 16 kHz) or the error's text. A
stream is a sequence of such replies, each with its length after the first byte, and an empty
``END``.
"""

from __future__ import annotations

import importlib
import io
import json
import os
import signal
import struct
import sys
from collections.abc import Callable, Iterator
from typing import Any, BinaryIO, NoReturn

import numpy as np

from treadle.errors import TreadleError, UnsupportedError
from treadle.media.limits import MediaLimits
from treadle.media.sound_buffer import SoundBuffer, SoundResampling
from treadle.system import SYSTEM

SAMPLES = b"s"
DAMAGED = b"d"
REFUSED = b"r"
MEMORY = b"m"
LENGTH = b"l"  # of a stream: seconds, f64, 0 if the file does not tell
END = b"e"  # of a stream
PART_HEAD = struct.Struct("<cI")  # of a stream's part: its kind, and the bytes behind it
_FRAMES = 1 << 16  # of one block
MOST_FRAMES = 1 << 62  # libsndfile tells more where it does not know

Blocks = Iterator[tuple[float, np.ndarray | None]]
"""The rate, and the mean of the channels, float32 [n]; or the file's length in seconds, and
None."""


def serve(request: str) -> NoReturn:
    """Decode the sound on standard input, and exit. ``request``: a JSON object: "library", "reader"
    (its name of the format), "limits" (fields of ``MediaLimits``), "place" (names the sound in
    errors) and "streams" (reply block by block).
    """
    try:
        signal.signal(signal.SIGINT, signal.SIG_IGN)
        asked = json.loads(request)
        library = importlib.import_module(asked["library"])  # its memory is not the sound's
        limits = MediaLimits(**asked["limits"])
        streams = asked.get("streams", False)
        # A stream's input is a regular file, in which a decoder may seek.
        file = sys.stdin.buffer if streams else io.BytesIO(sys.stdin.buffer.read())
        SYSTEM.bound_memory(limits.decoding_bytes)
        blocks = DECODERS[asked["library"]](library, file, asked["reader"])
        if streams:
            _stream(blocks, limits, asked["place"])
        else:
            sys.stdout.buffer.writelines(_answer(blocks, limits, asked["place"]))
        sys.stdout.buffer.flush()
    except BaseException:
        os._exit(1)
    os._exit(0)


def _answer(blocks: Blocks, limits: MediaLimits, place: str) -> tuple[bytes, Any]:
    """Decode a whole sound; return the reply: its first byte, and its data (samples, or the text of
    an error). ``place`` names the sound in errors.
    """
    buffer: SoundBuffer | None = None
    try:
        for rate, samples in blocks:
            if samples is not None:
                buffer = buffer or SoundBuffer(int(rate), limits, place)
                buffer.add(samples)
        if buffer is None:
            return DAMAGED, b"no samples"
        return SAMPLES, buffer.finish().data.cast("B")
    except Exception as error:
        return _reply_of(error)


def _stream(blocks: Blocks, limits: MediaLimits, place: str) -> None:
    """Decode a sound; write each block of samples to standard output as one reply, then END or an
    error. The length, where the file tells it, is a reply too. ``place`` names the sound in errors.
    """
    stream: SoundResampling | None = None
    try:
        for rate, samples in blocks:
            if samples is None:
                _write(LENGTH, struct.pack("<d", rate))
                continue
            stream = stream or SoundResampling(int(rate), limits, place)
            _write(SAMPLES, stream.add(samples).tobytes())
        if stream is None:
            _write(DAMAGED, b"no samples")
            return
        _write(SAMPLES, stream.finish().tobytes())
        _write(END, b"")
    except Exception as error:
        _write(*_reply_of(error))


def _write(kind: bytes, data: bytes) -> None:
    sys.stdout.buffer.write(PART_HEAD.pack(kind, len(data)) + data)
    sys.stdout.buffer.flush()


def _reply_of(error: Exception) -> tuple[bytes, bytes]:
    """Return the first byte and the text of the reply for an error."""
    if isinstance(error, MemoryError):
        return MEMORY, b""
    text = str(error) if isinstance(error, TreadleError) else f"{type(error).__name__}: {error}"
    kind = REFUSED if isinstance(error, UnsupportedError) else DAMAGED
    return kind, text.encode("utf-8", "surrogatepass")


def _av_blocks(av: Any, file: BinaryIO, reader: str) -> Blocks:
    # The format is given, since some of those that FFmpeg detects open other files and addresses.
    with av.open(file, format=reader, metadata_errors="ignore") as container:
        if not container.streams.audio:
            raise ValueError("the file has no sound")
        if container.duration:
            yield container.duration / av.time_base, None
        stream = container.streams.audio[0]
        stream.codec_context.thread_count = 1  # each thread reserves memory
        planes = av.AudioResampler(format="fltp")
        for frame in container.decode(stream):
            for made in planes.resample(frame):
                yield made.rate, made.to_ndarray().mean(0)


def _soundfile_blocks(soundfile: Any, file: BinaryIO, reader: str) -> Blocks:
    with soundfile.SoundFile(file) as sound:
        if 0 < sound.frames < MOST_FRAMES:
            yield sound.frames / sound.samplerate, None
        while len(samples := sound.read(_FRAMES, dtype="float32", always_2d=True)):
            yield sound.samplerate, samples.mean(1)


DECODERS: dict[str, Callable[[Any, BinaryIO, str], Blocks]] = {
    "av": _av_blocks,
    "soundfile": _soundfile_blocks,
}
"""By library, the one that reads more formats first."""
