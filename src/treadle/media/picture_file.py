"""Decodes picture files with Pillow (the extra ``pictures``), which only this module imports."""

from __future__ import annotations

import importlib
import io
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any

import numpy as np

from treadle.errors import FileError, TreadleError, UnsupportedError
from treadle.media.file_formats import PICTURES, media_format
from treadle.media.limits import MediaLimits
from treadle.media.picture_arrays import rgb_of_array
from treadle.media.picture_header import picture_size

if TYPE_CHECKING:
    from PIL import Image

GREY_16 = ("I;16", "I;16L", "I;16B", "I;16N")  # Pillow's modes of 16 bits, by the order of bytes
WITH_ALPHA = ("RGBA", "LA", "PA", "RGBa", "La")
ORIENTATION = 0x0112  # tag of EXIF
TURNED = (5, 6, 7, 8)  # its values for pictures that lie on a side
OPAQUE = ("RGB", "L", "P", "1", "CMYK", "YCbCr", "HSV")


def pillow(module: str) -> Any:
    """Return a module of Pillow, ``Image`` or ``ImageOps``.

    Raises TreadleError if Pillow is not installed.
    """
    try:
        return importlib.import_module(f"PIL.{module}")
    except ImportError:
        raise TreadleError(
            'pictures need Pillow, which is not installed: pip install "treadle[pictures]"'
        ) from None


def is_pillow_image(source: object) -> bool:
    """Whether ``source`` is an image of Pillow's. Pillow is not imported: if it is not loaded,
    there is none.
    """
    module = sys.modules.get("PIL.Image")
    return module is not None and isinstance(source, module.Image)


def decode_picture(data: bytes | memoryview, limits: MediaLimits, place: str) -> np.ndarray:
    """Return a file's pixels, uint8 ``[h, w, 3]``: the first frame, turned upright, alpha blended
    with white.

    The format is told from the bytes, and the size is checked before anything is decoded. ``place``
    names the picture in errors. Raises UnsupportedError for formats other than PNG, JPEG, WebP, GIF
    and BMP and beyond the limits, FileError for a damaged or cut file.
    """
    with _opened(data, limits, place) as image:
        pillow("ImageOps").exif_transpose(image, in_place=True)
        return _pixels(image, place)


def upright_size(data: bytes | memoryview, limits: MediaLimits, place: str) -> tuple[int, int]:
    """Return the height and width that ``decode_picture`` would give, without decoding pixels.

    Raises as ``decode_picture`` does, but does not find damage after the header. EXIF after the
    pixels of a PNG is ignored.
    """
    with _opened(data, limits, place) as image:
        # A PNG's own ``getexif`` decodes the pixels to find EXIF behind them.
        orientation = pillow("Image").Image.getexif(image).get(ORIENTATION)
        size = image.height, image.width
        return size[::-1] if orientation in TURNED else size


@contextmanager
def _opened(data: bytes | memoryview, limits: MediaLimits, place: str) -> Iterator[Image.Image]:
    """Open a picture file as an image of Pillow's, for a ``with`` block. Raises UnsupportedError
    beyond the limits and for an unknown format; errors of Pillow's in the block become FileError.
    """
    limits.check_bytes("image", len(data), place)
    if not data:
        raise FileError("an empty file", path=place, expected="a picture")
    found = media_format(data)
    if found not in PICTURES:
        what = "a file of unknown format" if found is None else f"{found.name} is not read"
        raise UnsupportedError(
            f"{place}: {what}: expected {', '.join(known.name for known in PICTURES)}"
        )
    limits.check_size(*picture_size(data, found, place), place)
    with _plain_errors(place, found.name), _open(data, found.reader) as image:
        limits.check_size(image.height, image.width, place)
        yield image


def _open(data: bytes | memoryview, reader: str) -> Image.Image:
    """Open a file with the one of Pillow's readers named ``reader``; no other is tried."""
    opened: Image.Image = pillow("Image").open(io.BytesIO(data), formats=[reader])
    return opened


def rgb_of_image(image: Image.Image, limits: MediaLimits, place: str) -> np.ndarray:
    """Return an image of Pillow's as uint8 ``[h, w, 3]``: turned as EXIF says, alpha blended with
    white. The image is not changed.

    Raises UnsupportedError beyond the limits and for modes whose values have no fixed range,
    FileError if the image's file is damaged.
    """
    limits.check_size(image.height, image.width, place)
    with _plain_errors(place, "an image"):
        return _pixels(pillow("ImageOps").exif_transpose(image), place)


def _pixels(image: Image.Image, place: str) -> np.ndarray:
    mode = image.mode
    transparent = image.info.get("transparency")
    if mode in GREY_16:
        # Pillow's own conversion to 8 bits cuts at 255 instead of scaling.
        grey = np.asarray(image).astype(np.uint16)
        if isinstance(transparent, int):
            grey[grey == transparent] = 65535
        return rgb_of_array(grey, place)
    if mode in WITH_ALPHA or (mode in OPAQUE and transparent is not None):
        direct = image.convert("LA") if mode == "La" else image
        return rgb_of_array(np.asarray(direct.convert("RGBA")), place)
    if mode in OPAQUE:
        return np.array(image.convert("RGB"))
    raise UnsupportedError(
        f"{place}: an image of mode {mode}: its values have no fixed range: expected one of "
        f"{', '.join((*OPAQUE, *WITH_ALPHA, *GREY_16))}"
    )


@contextmanager
def _plain_errors(place: str, expected: str) -> Iterator[None]:
    """Convert errors in a ``with`` block to FileError, since Pillow's readers raise many types;
    treadle's own errors and MemoryError pass, and Pillow's error of too many pixels becomes
    UnsupportedError. ``expected``: what the file should be, for the message.
    """
    try:
        yield
    except (TreadleError, MemoryError):
        raise
    except Exception as error:
        if isinstance(error, pillow("Image").DecompressionBombError):
            raise UnsupportedError(f"{place}: {_reason(error)}") from None
        raise FileError(f"damaged: {_reason(error)}", path=place, expected=expected) from None


def _reason(error: Exception) -> str:
    """Return the first line of an error's message, or its type's name."""
    lines = str(error).strip().splitlines()
    return lines[0] if lines else type(error).__name__
