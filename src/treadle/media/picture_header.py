"""A picture's size from the header of its file, without decoding.

The layouts are those of the PNG specification (IHDR), ITU-T T.81 (B.2.2, frame header), RFC 9649
(WebP), the GIF89a specification (logical screen) and Microsoft's BITMAPINFOHEADER.
"""

from __future__ import annotations

import struct
from collections.abc import Callable

from treadle.errors import FileError
from treadle.media.file_formats import BMP, GIF, JPEG, PNG, WEBP, MediaFormat

_JPEG_TABLES = (0xC4, 0xC8, 0xCC)  # markers 0xC0 to 0xCF that are not frame headers
_JPEG_ALONE = (0x01, *range(0xD0, 0xD9))  # markers without a segment
_JPEG_ENDS = (0xD9, 0xDA)  # end of the image; a scan, which follows its frame header


def picture_size(data: bytes | memoryview, file_format: MediaFormat, place: str) -> tuple[int, int]:
    """Return the height and width that a picture's header states, before EXIF turns it.
    ``place`` names the picture in errors.

    Raises FileError if the header is cut or damaged.
    """
    try:
        size = _READERS[file_format](data)
    except (struct.error, IndexError):
        size = None
    if size is None:
        raise FileError(
            f"no size in its {len(data)} bytes", path=place, expected=f"a {file_format.name} header"
        )
    return size


def _png(data: bytes | memoryview) -> tuple[int, int] | None:
    if data[12:16] != b"IHDR":
        return None
    width, height = struct.unpack_from(">II", data, 16)
    return height, width


def _gif(data: bytes | memoryview) -> tuple[int, int] | None:
    width, height = struct.unpack_from("<HH", data, 6)
    return height, width


def _bmp(data: bytes | memoryview) -> tuple[int, int] | None:
    (n_header,) = struct.unpack_from("<I", data, 14)
    width, height = struct.unpack_from("<HH" if n_header == 12 else "<ii", data, 18)
    return abs(height), width  # a negative height: rows from the top


def _webp(data: bytes | memoryview) -> tuple[int, int] | None:
    kind = bytes(data[12:16])
    if kind == b"VP8X":
        width = int.from_bytes(data[24:27], "little") + 1
        height = int.from_bytes(data[27:30], "little") + 1
        return (height, width) if len(data) >= 30 else None
    if kind == b"VP8L" and data[20] == 0x2F:
        (bits,) = struct.unpack_from("<I", data, 21)
        return (bits >> 14 & 0x3FFF) + 1, (bits & 0x3FFF) + 1
    if kind == b"VP8 " and data[23:26] == b"\x9d\x01\x2a":
        width, height = struct.unpack_from("<HH", data, 26)
        return height & 0x3FFF, width & 0x3FFF  # the upper two bits scale what is shown
    return None


def _jpeg(data: bytes | memoryview) -> tuple[int, int] | None:
    at = 2
    while True:
        while data[at] != 0xFF:  # decoders skip bytes between segments
            at += 1
        while data[at] == 0xFF:
            at += 1
        marker = data[at]
        at += 1
        if marker in _JPEG_ENDS:
            return None
        if marker in _JPEG_ALONE or marker == 0:
            continue
        if marker & 0xF0 == 0xC0 and marker not in _JPEG_TABLES:
            height, width = struct.unpack_from(">HH", data, at + 3)
            return height, width
        (n_segment,) = struct.unpack_from(">H", data, at)
        at += max(n_segment, 2)


_READERS: dict[MediaFormat, Callable[[bytes | memoryview], tuple[int, int] | None]] = {
    PNG: _png,
    GIF: _gif,
    BMP: _bmp,
    WEBP: _webp,
    JPEG: _jpeg,
}
