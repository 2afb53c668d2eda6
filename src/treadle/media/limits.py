"""Limits of pictures and sounds: a file of a few hundred bytes may claim gigabytes."""

from __future__ import annotations

from treadle.base.fast_classes import dataclass
from treadle.base.humanize import scaled
from treadle.base.validate import positive
from treadle.errors import UnsupportedError
from treadle.media.kinds import NOUNS, MediaKind

MOST_RATIO = 200
"""Longer side by shorter side of a picture, at most: the limit of transformers' processor of
Qwen's pictures, which families' sizes keep to as well."""


@dataclass(frozen=True)
class MediaLimits:
    """Largest picture and sound that are read, and how many a request may have. Each limit is an
    integer of at least 1. In the checks, ``place`` names the source in errors.
    """

    per_request: int = 32
    """Pictures and sounds of one request together."""
    picture_bytes: int = 20_000_000
    """Bytes of a picture's file."""
    pixels: int = 64_000_000
    """Height times width of a picture."""
    request_pixels: int = 512_000_000
    """Pixels of all pictures of one request together."""
    aspect_ratio: int = MOST_RATIO
    """Longer side by shorter side of a picture; a larger limit than the usual one has no effect, as
    no family resizes such pictures."""
    sound_bytes: int = 200_000_000
    """Bytes of a sound's file, and of its samples once decoded: 16 kHz, one channel, 32 bits."""
    sound_seconds: int = 1800
    """Length of a sound."""
    decoding_seconds: int = 60
    """Time that the process which decodes a compressed sound may take."""
    decoding_bytes: int = 1 << 30
    """Memory that this process may take, beyond what it has at its start."""

    def __post_init__(self) -> None:
        for name, value in vars(self).items():
            positive(name, value)

    def check_count(self, n_parts: int, place: str) -> None:
        """Raise UnsupportedError if a request has more than ``per_request`` pictures and sounds."""
        if n_parts > self.per_request:
            raise UnsupportedError(
                f"{place}: {n_parts} pictures and sounds: the limit is {self.per_request} a request"
            )

    def check_pixels(self, n_pixels: int, place: str) -> None:
        """Raise UnsupportedError if a request's pictures have more than ``request_pixels``
        together. ``n_pixels``: their sum up to the picture at ``place``.
        """
        if n_pixels > self.request_pixels:
            raise UnsupportedError(
                f"{place}: the pictures up to this one have {n_pixels / 1e6:.0f} million pixels: "
                f"the limit is {self.request_pixels / 1e6:g} million a request"
            )

    def file_bytes(self, kind: MediaKind) -> int:
        """Return the largest size of a file of this kind, in bytes."""
        return self.picture_bytes if kind == "image" else self.sound_bytes

    def check_bytes(self, kind: MediaKind, n_bytes: int, place: str) -> None:
        """Raise UnsupportedError if a file of this kind, or a sound's decoded samples, have more
        bytes than ``file_bytes``.
        """
        limit = self.file_bytes(kind)
        if n_bytes > limit:
            raise UnsupportedError(
                f"{place}: {scaled(n_bytes, 'B')}: the limit for a {NOUNS[kind]} is "
                f"{scaled(limit, 'B')}"
            )

    def check_size(self, height: int, width: int, place: str) -> None:
        """Raise UnsupportedError for a picture without pixels, with more than ``pixels``, or whose
        longer side is more than ``aspect_ratio`` times the shorter one.
        """
        if height < 1 or width < 1:
            raise UnsupportedError(f"{place}: {width} x {height} pixels: expected at least one")
        if height * width > self.pixels:
            raise UnsupportedError(
                f"{place}: {width} x {height} pixels are {height * width / 1e6:.1f} million: the "
                f"limit is {self.pixels / 1e6:g} million"
            )
        if max(height, width) > self.aspect_ratio * min(height, width):
            raise UnsupportedError(
                f"{place}: {width} x {height} pixels: the longer side may be at most "
                f"{self.aspect_ratio} times the shorter one"
            )

    def check_seconds(self, seconds: float, place: str) -> None:
        """Raise UnsupportedError if a sound is longer than ``sound_seconds``."""
        if seconds > self.sound_seconds:
            raise UnsupportedError(
                f"{place}: the sound is {seconds:.0f} s long: the limit is {self.sound_seconds} s"
            )
