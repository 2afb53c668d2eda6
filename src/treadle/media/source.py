"""Reads pictures as pixels and sounds as samples, from every form that a caller may give."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

import numpy as np

from treadle.base.validate import positive
from treadle.errors import FileError, TreadleError, why
from treadle.media.address_policy import AddressPolicy, is_address
from treadle.media.data_urls import decode_data_url, is_data_url
from treadle.media.kinds import NOUNS, MediaKind
from treadle.media.limits import MediaLimits
from treadle.media.local_path import local_path
from treadle.media.picture_arrays import rgb_of_array
from treadle.media.picture_file import decode_picture, is_pillow_image, rgb_of_image, upright_size
from treadle.media.sound_buffer import RATE, SoundBuffer
from treadle.media.sound_file import decode_sound

LIMITS = MediaLimits()
CLOSED = AddressPolicy()


def read_picture(
    source: Any,
    limits: MediaLimits = LIMITS,
    policy: AddressPolicy = CLOSED,
    place: str | None = None,
) -> np.ndarray:
    """Return a picture as uint8 ``[h, w, 3]``: red, green, blue, upright, with alpha blended with
    white.

    ``source``: a path, the bytes of a file (PNG, JPEG, WebP, BMP, or GIF, of which the first frame
    is read), a ``data:`` URL of base64, an http(s) address if ``policy`` allows it, an image of
    Pillow's, or an array (see ``rgb_of_array``). ``place`` names it in errors.

    Raises FileError for a file that is damaged or cannot be opened, UnsupportedError for another
    format and beyond ``limits``, TreadleError for any other type, or if Pillow is not installed.
    """
    if isinstance(source, np.ndarray):
        return rgb_of_array(source, place or "the picture", limits)
    if is_pillow_image(source):
        return rgb_of_image(source, limits, place or "the picture")
    data = read_bytes(source, "image", limits, policy, place)
    return decode_picture(data, limits, place or _name(source, "image"))


def read_picture_size(
    source: str | os.PathLike[str],
    limits: MediaLimits = LIMITS,
    policy: AddressPolicy = CLOSED,
) -> tuple[int, int]:
    """Return the height and width that ``read_picture`` would give for a path or an address,
    without decoding pixels. Raises as ``read_picture`` does, but does not find damage after the
    header.
    """
    data = read_bytes(source, "image", limits, policy)
    return upright_size(data, limits, _name(source, "image"))


def read_sound(
    source: Any,
    limits: MediaLimits = LIMITS,
    policy: AddressPolicy = CLOSED,
    place: str | None = None,
) -> np.ndarray:
    """Return a sound as float32 ``[n]``: 16,000 samples a second, the mean of its channels.

    ``source``: a path, the bytes of a file (WAV; FLAC, Ogg, MP3, AAC, MP4 and WebM if a library for
    them is installed), a ``data:`` URL of base64, an http(s) address if ``policy`` allows it, an
    array ``[n]`` or ``[n, channels]`` of floats or int16 at 16 kHz, or a tuple of such an array and
    its rate. ``place`` names it in errors.

    Raises FileError, UnsupportedError and TreadleError as ``read_picture`` and ``decode_sound`` do.
    """
    place = place or _name(source, "audio")
    array = source
    rate = RATE
    if isinstance(source, tuple) and len(source) == 2:
        array, rate = source
        rate = positive("the sound's rate", rate)
    if isinstance(array, np.ndarray):
        return _samples(array, rate, limits, place)
    return decode_sound(read_bytes(source, "audio", limits, policy, place), limits, place)


def _samples(array: np.ndarray, rate: int, limits: MediaLimits, place: str) -> np.ndarray:
    """Convert an array of samples at ``rate`` Hz, ``[n]`` or ``[n, channels]``, to float32 ``[n]``
    at 16 kHz, the mean of the channels.
    """
    if array.ndim not in (1, 2) or (array.dtype.kind != "f" and array.dtype != np.int16):
        raise TreadleError(
            f"{place}: an array of {array.dtype}, shape {list(array.shape)}: expected floats or "
            "int16, [n] or [n, channels]"
        )
    if array.ndim == 2 and array.shape[1] > array.shape[0]:
        raise TreadleError(
            f"{place}: an array of shape {list(array.shape)}: expected [n, channels]"
        )
    samples = array.astype(np.float32)
    if array.dtype == np.int16:
        samples /= 32768
    if samples.ndim == 2:
        samples = samples.mean(1)
    buffer = SoundBuffer(rate, limits, place)
    buffer.add(samples)
    return buffer.finish()


def read_bytes(
    source: Any,
    kind: MediaKind,
    limits: MediaLimits = LIMITS,
    policy: AddressPolicy = CLOSED,
    place: str | None = None,
) -> bytes:
    """Return a file's bytes from a path, bytes, a ``data:`` URL or an http(s) address. ``kind``:
    whose limit of bytes applies; ``place`` names the source in errors.

    Raises as ``read_picture`` does. At most one byte more than the limit is read.
    """
    place = place or _name(source, kind)
    if isinstance(source, bytes | bytearray | memoryview):
        limits.check_bytes(kind, memoryview(source).nbytes, place)
        return bytes(source)
    if isinstance(source, str):
        if is_data_url(source):
            return decode_data_url(source, kind, limits, place)
        if is_address(source):
            from treadle.media.addresses import fetch_media  # imports http and ssl

            return fetch_media(source, policy, place)
    if isinstance(source, str | os.PathLike):
        return _read_file(local_path(source), kind, limits, place)
    raise TreadleError(
        f"{place}: {type(source).__name__} is not read as a {NOUNS[kind]}: expected a path, bytes, "
        "an array, a data: URL" + (" or an image of Pillow's" if kind == "image" else "")
    )


def _read_file(path: Path, kind: MediaKind, limits: MediaLimits, place: str) -> bytes:
    try:
        with path.open("rb") as file:
            # A pipe has no size; reading one byte more than the limit shows whether it is exceeded.
            limits.check_bytes(kind, os.fstat(file.fileno()).st_size, place)
            data = file.read(limits.file_bytes(kind) + 1)
    except (OSError, ValueError) as error:
        where = place if str(path) in place else f"{place}: {path}"
        raise FileError(why(error), path=where) from None
    limits.check_bytes(kind, len(data), place)
    return data


def _name(source: Any, kind: MediaKind) -> str:
    """Return the name of a source for error messages: its path or address, or "the picture", "the
    sound".
    """
    if isinstance(source, str | os.PathLike) and not is_data_url(os.fsdecode(source)):
        return os.fsdecode(source)[:200]
    return f"the {NOUNS[kind]}"
