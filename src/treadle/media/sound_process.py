"""Process that decodes one compressed sound: a file on standard input, samples on standard output.

``sound_file`` starts it. Decoders are large C libraries that read what strangers wrote: a crash, an
endless loop or too much memory ends only this process. The reply begins with one byte that tells
samples (float32, one channel, 16 kHz) from an error's text.
"""

from __future__ import annotations

import importlib
import io
import json
import os
import signal
import sys
from collections.abc import Callable, Iterator
from typing import Any, NoReturn

import numpy as np

from treadle.errors import TreadleError, UnsupportedError
from treadle.media.limits import MediaLimits
from treadle.media.sound_buffer import SoundBuffer
from treadle.system import SYSTEM

SAMPLES = b"s"
DAMAGED = b"d"
REFUSED = b"r"
MEMORY = b"m"
_FRAMES = 1 << 16  # of one block

Blocks = Iterator[tuple[int, np.ndarray]]
"""The rate, and the mean of the channels, float32 [n]."""


def serve(request: str) -> NoReturn:
    """Decode one file. ``request``, JSON: the library and reader, the limits, and the place that
    errors name.
    """
    try:
        signal.signal(signal.SIGINT, signal.SIG_IGN)
        asked = json.loads(request)
        library = importlib.import_module(asked["library"])  # its memory is not the sound's
        data = sys.stdin.buffer.read()
        limits = MediaLimits(**asked["limits"])
        SYSTEM.bound_memory(limits.decoding_bytes)
        blocks = DECODERS[asked["library"]](library, data, asked["reader"])
        sys.stdout.buffer.writelines(_answer(blocks, limits, asked["place"]))
        sys.stdout.buffer.flush()
    except BaseException:
        os._exit(1)
    os._exit(0)


def _answer(blocks: Blocks, limits: MediaLimits, place: str) -> tuple[bytes, Any]:
    """Return the reply's first byte and the rest of it."""
    buffer: SoundBuffer | None = None
    try:
        for rate, samples in blocks:
            buffer = buffer or SoundBuffer(rate, limits, place)
            buffer.add(samples)
        if buffer is None:
            return DAMAGED, b"no samples"
        return SAMPLES, buffer.finish().data.cast("B")
    except UnsupportedError as error:
        return REFUSED, str(error).encode("utf-8", "surrogatepass")
    except MemoryError:
        return MEMORY, b""
    except Exception as error:
        text = str(error) if isinstance(error, TreadleError) else f"{type(error).__name__}: {error}"
        return DAMAGED, text.encode("utf-8", "surrogatepass")


def _av_blocks(av: Any, data: bytes, reader: str) -> Blocks:
    # The format is given, since some of those that FFmpeg detects open other files and addresses.
    with av.open(io.BytesIO(data), format=reader, metadata_errors="ignore") as container:
        if not container.streams.audio:
            raise ValueError("the file has no sound")
        stream = container.streams.audio[0]
        stream.codec_context.thread_count = 1  # each thread reserves memory
        planes = av.AudioResampler(format="fltp")
        for frame in container.decode(stream):
            for made in planes.resample(frame):
                yield made.rate, made.to_ndarray().mean(0)


def _soundfile_blocks(soundfile: Any, data: bytes, reader: str) -> Blocks:
    with soundfile.SoundFile(io.BytesIO(data)) as file:
        while len(samples := file.read(_FRAMES, dtype="float32", always_2d=True)):
            yield file.samplerate, samples.mean(1)


DECODERS: dict[str, Callable[[Any, bytes, str], Blocks]] = {
    "av": _av_blocks,
    "soundfile": _soundfile_blocks,
}
"""By library, the one that reads more formats first."""
