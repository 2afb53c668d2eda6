"""Decodes sound files: WAV in this process, compressed formats with a library in a separate one."""

from __future__ import annotations

import json
import subprocess
import sys
from importlib.util import find_spec
from typing import Any

import numpy as np

from treadle.base.python_process import import_path, interpreter
from treadle.errors import FileError, TreadleError, UnsupportedError
from treadle.media.file_formats import AAC, MP4, SOUNDS, WAV, WEBM, MediaFormat, media_format
from treadle.media.limits import MediaLimits
from treadle.media.sound_buffer import SoundBuffer
from treadle.media.wav import open_wav

_ONLY_AV = (AAC, MP4, WEBM)
_START = (
    "import sys; sys.path[:] = sys.argv[2:]; "
    "from treadle.media.sound_process import serve; serve(sys.argv[1])"
)


def decode_sound(data: bytes, limits: MediaLimits, place: str) -> np.ndarray:
    """Return a file's samples, float32 ``[n]`` at 16 kHz: the mean of its channels.

    The format is told from the bytes. Raises UnsupportedError for formats other than WAV, FLAC,
    Ogg, MP3, AAC, MP4 and WebM and beyond the limits, FileError for a damaged file, TreadleError if
    the library for a format is not installed.
    """
    limits.check_bytes("audio", len(data), place)
    if not data:
        raise FileError("an empty file", path=place, expected="a sound")
    found = sound_format(data, place)
    if found != WAV:
        return _decode_elsewhere(data, found, library_for(found, place), limits, place)
    sound = open_wav(data, place)
    buffer = SoundBuffer(sound.rate, limits, place)
    buffer.expect(sound.n_frames)
    for samples in sound.blocks():
        buffer.add(samples)
    return buffer.finish()


def sound_format(head: bytes, place: str) -> MediaFormat:
    """Return the format of a sound file, told from its first bytes ``head``. Raises
    UnsupportedError for any other file.
    """
    found = media_format(head)
    if found is None or found not in SOUNDS:
        what = "a file of unknown format" if found is None else f"{found.name} is not read"
        raise UnsupportedError(
            f"{place}: {what}: expected {', '.join(known.name for known in SOUNDS)}"
        )
    return found


def library_for(found: MediaFormat, place: str) -> str:
    """Return the name of an installed library that decodes the format ``found``, "av" or
    "soundfile". Raises TreadleError, which names ``place``, if there is none.
    """
    if is_installed("av"):
        return "av"
    if found in _ONLY_AV:
        raise TreadleError(
            f"{place}: {found.name} needs PyAV, which is not installed: pip install av"
        )
    if is_installed("soundfile"):
        return "soundfile"
    raise TreadleError(
        f"{place}: {found.name} needs a decoder, and none is installed: "
        'pip install "treadle[sound]"'
    )


def is_installed(library: str) -> bool:
    """Whether a library can be imported."""
    return find_spec(library) is not None


def _decode_elsewhere(
    data: bytes, found: MediaFormat, library: str, limits: MediaLimits, place: str
) -> np.ndarray:
    """Decode a compressed file of the format ``found`` with ``library`` in a separate process;
    return its samples, float32 ``[n]`` at 16 kHz. Raises as ``decode_sound`` does.
    """
    # Imported there only: its constants are the protocol.
    from treadle.media.sound_process import DAMAGED, MEMORY, REFUSED, SAMPLES

    request = {
        "library": library,
        "reader": found.reader,
        "limits": vars(limits),
        "place": place[:200],
    }
    try:
        done = subprocess.run(
            decoder_command(request),
            input=data,
            stdout=subprocess.PIPE,
            stderr=subprocess.DEVNULL,  # decoders write of every damaged frame
            timeout=limits.decoding_seconds,
            start_new_session=True,  # Ctrl-C of the terminal does not reach it
            check=False,
        )
    except subprocess.TimeoutExpired:
        raise UnsupportedError(
            f"{place}: decoding takes more than {limits.decoding_seconds} s, the limit"
        ) from None
    except OSError as error:
        raise TreadleError(f"cannot start the process that decodes sounds: {error}") from None
    kind = done.stdout[:1]
    reply = memoryview(done.stdout)[1:]
    if done.returncode == 0 and kind == SAMPLES and len(reply) % 4 == 0:
        return np.frombuffer(reply, np.float32).copy()  # aligned, and writable
    if done.returncode == 0 and kind in (REFUSED, MEMORY, DAMAGED):
        raise decoder_error(kind, bytes(reply), found, limits, place)
    reason = f"its decoder ended with exit code {done.returncode}"
    raise FileError(f"damaged: {reason}", path=place, expected=found.name)


def decoder_command(request: dict[str, Any]) -> list[str]:
    """Return the command line of a process that decodes one sound. ``request``: what to decode and
    how, the argument of ``sound_process.serve``.
    """
    flags = ["-I", "-S", *(["-B"] if sys.dont_write_bytecode else [])]
    return [interpreter(), *flags, "-c", _START, json.dumps(request), *import_path()]


def decoder_error(
    kind: bytes, text: bytes, found: MediaFormat, limits: MediaLimits, place: str
) -> TreadleError:
    """Return the exception for an error reply of the decoding process: UnsupportedError for a sound
    beyond the limits, else FileError. ``kind``: the reply's first byte; ``text``: the message.
    """
    from treadle.media.sound_process import MEMORY, REFUSED

    told = text.decode("utf-8", "replace")
    if kind == REFUSED:
        return UnsupportedError(told)
    if kind == MEMORY:
        return UnsupportedError(
            f"{place}: decoding takes more than {limits.decoding_bytes >> 20} MiB, the limit"
        )
    return FileError(f"damaged: {told[:300]}", path=place, expected=found.name)
