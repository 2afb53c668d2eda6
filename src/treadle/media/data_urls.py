"""Decodes base64 and ``data:`` URLs of base64, both strictly."""

from __future__ import annotations

import base64
import re

from treadle.errors import FileError
from treadle.media.kinds import MediaKind
from treadle.media.limits import MediaLimits

# RFC 2397: a media type with its parameters, each optional.
_PREFIX = re.compile(
    r"data:(?:[\w.+-]+/[\w.+-]+)?(?:;[\w.+-]+=[\w.+\"/-]+)*;base64,", re.IGNORECASE | re.ASCII
)
_MAX_PREFIX = 300  # characters


def is_data_url(text: str) -> bool:
    """Whether a text begins with ``data:``, in any case."""
    return text[:5].lower() == "data:"


def decode_data_url(text: str, kind: MediaKind, limits: MediaLimits, place: str) -> bytes:
    """Return the bytes of a ``data:`` URL. Its media type is ignored: the bytes tell their format.
    ``kind``: whose limit applies; ``place``: name of the source in errors.

    Raises FileError if it is not base64, UnsupportedError if it is larger than the limit.
    """
    prefix = _PREFIX.match(text, 0, _MAX_PREFIX)
    if prefix is None:
        raise FileError(
            f"{text[:40]!r} is not a data: URL of base64",
            path=place,
            expected="data:image/png;base64,... or another media type",
        )
    return decode_base64(text[prefix.end() :], kind, limits, place)


def decode_base64(text: str, kind: MediaKind, limits: MediaLimits, place: str) -> bytes:
    """Return the bytes of a base64 text: RFC 4648's standard alphabet, padded, without spaces.
    ``kind``: whose limit applies; ``place``: name of the source in errors.

    Raises FileError if it is anything else, UnsupportedError if it is larger than the limit, which
    is checked before decoding.
    """
    limits.check_bytes(kind, len(text) // 4 * 3 - 2, place)  # the padding stands for up to 2 bytes
    try:
        data = base64.b64decode(text, validate=True)
    except ValueError as error:  # binascii.Error is one
        raise FileError(f"not base64: {error}", path=place) from None
    limits.check_bytes(kind, len(data), place)
    return data
