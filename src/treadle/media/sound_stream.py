"""Decodes sounds of any length block by block: memory use does not grow with the length."""

from __future__ import annotations

import io
import os
import queue
import struct
import subprocess
import tempfile
import threading
from collections.abc import Iterator
from contextlib import suppress
from typing import IO, Any

import numpy as np

from treadle.base.fork_safety import declare_harmless
from treadle.errors import FileError, TreadleError, UnsupportedError, why
from treadle.media.address_policy import is_address
from treadle.media.data_urls import is_data_url
from treadle.media.file_formats import WAV, MediaFormat
from treadle.media.limits import MediaLimits
from treadle.media.local_path import local_path
from treadle.media.sound_buffer import RATE, SoundResampling
from treadle.media.sound_file import decoder_command, decoder_error, library_for, sound_format
from treadle.media.source import read_bytes, read_sound
from treadle.media.wav import FRAMES, STREAMED, WavFormat, wav_format

LONG_SOUNDS = MediaLimits(sound_bytes=8_000_000_000, sound_seconds=24 * 3600)
"""Limits of sounds that are decoded block by block."""
_HEAD = 1024  # bytes from which the format is recognised
_COPY = 1 << 20
_MOST_CHUNK = 1 << 16  # bytes of a chunk that describes the samples
_MOST_SKIPPED = 1 << 24  # bytes of other chunks before the samples
_AHEAD = 8  # blocks decoded in advance


class SoundStream:
    """A sound's samples at 16 kHz, one channel, as float32 blocks. Iterate once, then ``close``.

    seconds: the sound's length as its file states it; None if it does not. Iterating raises
    FileError for a damaged or empty file, UnsupportedError beyond the limits.
    """

    def __init__(self, blocks: Iterator[np.ndarray], seconds: float | None = None) -> None:
        self._blocks = blocks
        self.seconds = seconds

    def __iter__(self) -> Iterator[np.ndarray]:
        return self._blocks

    def close(self) -> None:
        """Close the file, and end the process that decodes it."""
        close = getattr(self._blocks, "close", None)
        if close is not None:
            close()

    def __enter__(self) -> SoundStream:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()


def open_sound_stream(
    source: Any, limits: MediaLimits = LONG_SOUNDS, place: str | None = None
) -> SoundStream:
    """Open a sound for decoding block by block.

    ``source``: as for ``read_sound``, or an open binary file, such as a pipe. ``place`` names it in
    errors. Raises FileError for a damaged or empty file, UnsupportedError for another format and
    beyond the limits, TreadleError for any other type, or if the library for a format is not
    installed.
    """
    is_array = isinstance(source, np.ndarray) or (
        isinstance(source, tuple) and len(source) == 2 and isinstance(source[0], np.ndarray)
    )
    if is_array:
        samples = read_sound(source, limits, place=place)
        blocks = (samples[at : at + FRAMES] for at in range(0, len(samples), FRAMES))
        return SoundStream(blocks, len(samples) / RATE)
    place = place or _name(source)
    file = _opened(source, limits, place)
    try:
        return _stream_of(file, limits, place)
    except BaseException:
        file.close()
        raise


def _name(source: Any) -> str:
    if isinstance(source, str | os.PathLike) and not is_data_url(os.fsdecode(source)):
        return os.fsdecode(source)[:200]
    return "the sound"


def _opened(source: Any, limits: MediaLimits, place: str) -> IO[bytes]:
    """Return a sound's source (a path, bytes, a ``data:`` URL or an open file) as an open file;
    closing this does not close a file that the caller opened.
    """
    if isinstance(source, str | os.PathLike):
        text = os.fsdecode(source)
        if not is_data_url(text) and not is_address(text):
            try:
                file = local_path(source).open("rb")
            except (OSError, ValueError) as error:
                raise FileError(why(error), path=place) from None
            try:
                limits.check_bytes("audio", os.fstat(file.fileno()).st_size, place)
            except BaseException:
                file.close()
                raise
            return file
    if hasattr(source, "read") and not isinstance(source, str | bytes):
        return io.BufferedReader(_KeptOpen(source))
    return io.BytesIO(read_bytes(source, "audio", limits, place=place))


class _KeptOpen(io.RawIOBase):
    """A file that the caller opened, read from its current position; closing this wrapper does not
    close the file.
    """

    def __init__(self, file: Any) -> None:
        self._file = file

    def readable(self) -> bool:
        return True

    def readinto(self, buffer: Any) -> int:
        # ``read1`` returns the bytes available in a pipe; ``read`` would wait for all.
        read = getattr(self._file, "read1", self._file.read)
        data = read(len(buffer))
        if not isinstance(data, bytes):
            raise TreadleError(f"the open file gives {type(data).__name__}: expected bytes")
        buffer[: len(data)] = data
        return len(data)


def _stream_of(file: IO[bytes], limits: MediaLimits, place: str) -> SoundStream:
    reader = _PartReader(file, limits, place)
    head = reader.peek(_HEAD)
    if not head:
        raise FileError("an empty file", path=place, expected="a sound")
    found = sound_format(head, place)
    if found == WAV:
        return _wav_stream(reader, limits, place)
    library = library_for(found, place)
    with file:
        whole = reader.as_regular_file()
    return _decoded_stream(whole, found, library, limits, place)


class _PartReader:
    """Reads a file or a pipe in parts, and checks the number of bytes against the limits."""

    def __init__(self, file: IO[bytes], limits: MediaLimits, place: str) -> None:
        self._file = file
        self._limits = limits
        self._place = place
        self._head = b""
        self._n_read = 0
        self.left = _bytes_left(file)
        """Bytes of a regular file that were not read; None of a pipe."""

    def peek(self, n: int) -> bytes:
        """Return the next ``n`` bytes, or fewer at the end, without consuming them."""
        while len(self._head) < n and (part := self._part(n - len(self._head))):
            self._head += part
        return self._head[:n]

    def read(self, n: int) -> bytes:
        """Consume and return the next ``n`` bytes, or fewer at the end."""
        parts = [self._head[:n]]
        self._head = self._head[n:]
        n -= len(parts[0])
        while n and (part := self._part(min(n, _COPY))):
            parts.append(part)
            n -= len(part)
        data = b"".join(parts)
        if self.left is not None:
            self.left -= len(data)
        return data

    def _part(self, n: int) -> bytes:
        try:
            part = self._file.read(n) or b""
        except OSError as error:
            raise FileError(why(error), path=self._place) from None
        self._n_read += len(part)
        self._limits.check_bytes("audio", self._n_read, self._place)
        return part

    def as_regular_file(self) -> IO[bytes]:
        """Return the whole sound as a regular file at position 0, which the caller closes: the
        file itself, or a temporary copy of a pipe or of bytes.
        """
        if self.left is not None and not isinstance(self._file, io.BytesIO):
            again = os.fdopen(os.dup(self._file.fileno()), "rb")
            again.seek(0)
            return again
        copy = tempfile.TemporaryFile()  # noqa: SIM115 - the caller closes it
        try:
            while part := self.read(_COPY):
                copy.write(part)
            copy.seek(0)
        except OSError as error:
            copy.close()
            raise FileError(f"cannot be copied: {why(error)}", path=self._place) from None
        except BaseException:
            copy.close()
            raise
        return copy


def _bytes_left(file: IO[bytes]) -> int | None:
    """Return the size in bytes of a file that this module opened, or of bytes in memory; None for
    the caller's files and pipes, whose size is not known.
    """
    if isinstance(file, io.BytesIO):
        return len(file.getbuffer())
    if isinstance(getattr(file, "raw", None), _KeptOpen) or not file.seekable():
        return None
    return os.fstat(file.fileno()).st_size


# -- WAV -------------------------------------------------------------------------------------------


def _wav_stream(reader: _PartReader, limits: MediaLimits, place: str) -> SoundStream:
    form, n_bytes = _wav_head(reader, place)
    resampling = SoundResampling(form.rate, limits, place)
    seconds = None if n_bytes is None else n_bytes / form.frame_bytes / form.rate
    if seconds is not None:
        limits.check_seconds(seconds, place)
    return SoundStream(_wav_blocks(reader, form, n_bytes, resampling, place), seconds)


def _wav_head(reader: _PartReader, place: str) -> tuple[WavFormat, int | None]:
    """Read a WAV file up to its samples; return their format, and their number of bytes (None if
    ``reader`` does not know the file's size). Raises FileError for a damaged file.
    """
    reader.read(12)
    described: bytes | None = None
    skipped = 0
    while len(head := reader.read(8)) == 8:
        name = head[:4]
        (size,) = struct.unpack_from("<I", head, 4)
        if name == b"data":
            if described is None:
                raise FileError("the samples come before their format", path=place)
            form = wav_format(memoryview(described), place)
            left = reader.left
            if left is None:
                # A program that writes to a pipe cannot know the size; it states a large one.
                return form, None
            if size == STREAMED:
                size = left
            if size > left:
                raise FileError(
                    f"cut: {left} bytes of samples", path=place, expected=f"{size} bytes"
                )
            return form, size
        skipped += size
        if skipped > _MOST_SKIPPED or (name == b"fmt " and size > _MOST_CHUNK):
            raise FileError(f"a chunk {name!r} of {size} bytes before the samples", path=place)
        contents = reader.read(size + size % 2)  # chunks begin at even offsets
        if name == b"fmt ":
            described = contents[:size]
    raise FileError("no samples", path=place, expected="a data chunk")


def _wav_blocks(
    reader: _PartReader,
    form: WavFormat,
    n_bytes: int | None,
    resampling: SoundResampling,
    place: str,
) -> Iterator[np.ndarray]:
    try:
        while n_bytes is None or n_bytes > 0:
            n = FRAMES * form.frame_bytes if n_bytes is not None else form.rate * form.frame_bytes
            data = reader.read(n if n_bytes is None else min(n, n_bytes))
            whole = len(data) // form.frame_bytes * form.frame_bytes
            if n_bytes is not None:
                n_bytes -= len(data)
                if not data:
                    raise FileError("it became shorter while it was read", path=place)
            if whole:
                yield resampling.add(form.mono(data[:whole]))
            if n_bytes is None and len(data) < n:
                break
        yield resampling.finish()
    finally:
        reader._file.close()


# -- compressed formats ----------------------------------------------------------------------------


def _decoded_stream(
    file: IO[bytes], found: MediaFormat, library: str, limits: MediaLimits, place: str
) -> SoundStream:
    """Return a stream of the samples of a compressed regular file of the format ``found``, which a
    separate process decodes with ``library``.
    """
    # Imported there only: its constants are the protocol.
    from treadle.media.sound_process import LENGTH

    request = {
        "library": library,
        "reader": found.reader,
        "limits": vars(limits),
        "place": place[:200],
        "streams": True,
    }
    with file:
        try:
            process = subprocess.Popen(
                decoder_command(request),
                stdin=file,
                stdout=subprocess.PIPE,
                stderr=subprocess.DEVNULL,  # decoders write of every damaged frame
                start_new_session=True,  # Ctrl-C of the terminal does not reach it
            )
        except OSError as error:
            raise TreadleError(f"cannot start the process that decodes sounds: {error}") from None
    parts = _ProcessParts(process, found, limits, place)
    try:
        kind, data = parts.next()
    except BaseException:
        parts.close()
        raise
    seconds: float | None = None
    first: bytes | None = data
    if kind == LENGTH:
        (seconds,) = struct.unpack("<d", data)
        first = None
        try:
            limits.check_seconds(seconds or 0.0, place)
        except BaseException:
            parts.close()
            raise
    return SoundStream(_process_blocks(parts, kind, first), seconds)


def _process_blocks(parts: _ProcessParts, kind: bytes, data: bytes | None) -> Iterator[np.ndarray]:
    from treadle.media.sound_process import END

    try:
        while kind != END:
            if data:
                yield np.frombuffer(data, np.float32)
            kind, data = parts.next()
    finally:
        parts.close()


class _ProcessParts:
    """The replies of a decoding process, which a thread reads up to _AHEAD blocks in advance."""

    def __init__(
        self, process: subprocess.Popen[bytes], found: MediaFormat, limits: MediaLimits, place: str
    ) -> None:
        self._process = process
        self._found = found
        self._limits = limits
        self._place = place
        self._queue: queue.Queue[tuple[bytes, bytes] | None] = queue.Queue(_AHEAD)
        self._closed = False
        thread = threading.Thread(target=self._read, name="treadle-sound", daemon=True)
        declare_harmless(thread)
        thread.start()

    def _read(self) -> None:
        from treadle.media.sound_process import PART_HEAD

        assert self._process.stdout is not None
        with self._process.stdout as pipe:
            part: tuple[bytes, bytes] | None = (b"", b"")
            while part is not None:
                head = pipe.read(PART_HEAD.size)
                part = None
                if len(head) == PART_HEAD.size:
                    kind, n = PART_HEAD.unpack(head)
                    data = pipe.read(n)
                    part = (kind, data) if len(data) == n else None
                while not self._closed:
                    with suppress(queue.Full):
                        self._queue.put(part, timeout=0.2)
                        break
                if self._closed:
                    return

    def next(self) -> tuple[bytes, bytes]:
        """Return the next reply: its first byte, and its data. Raises FileError if the process
        ended early, UnsupportedError if a block takes longer than ``decoding_seconds``, and the
        exception of ``decoder_error`` for an error reply.
        """
        from treadle.media.sound_process import DAMAGED, MEMORY, REFUSED

        seconds = self._limits.decoding_seconds
        try:
            part = self._queue.get(timeout=seconds)
        except queue.Empty:
            raise UnsupportedError(
                f"{self._place}: decoding one block takes more than {seconds} s, the limit"
            ) from None
        if part is None:
            code = self._process.wait()
            raise FileError(
                f"damaged: its decoder ended with exit code {code}",
                path=self._place,
                expected=self._found.name,
            )
        kind, data = part
        if kind in (DAMAGED, MEMORY, REFUSED):
            raise decoder_error(kind, data, self._found, self._limits, self._place)
        return part

    def close(self) -> None:
        """End the process."""
        self._closed = True
        self._process.kill()
        self._process.wait()
