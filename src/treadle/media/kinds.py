"""The kinds of media, their words in messages, and the types of message parts for each."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Literal

MediaKind = Literal["image", "audio"]
NOUNS: Mapping[str, str] = {"image": "picture", "audio": "sound"}
"""Names of the kinds in messages."""
PART_KINDS: Mapping[str, MediaKind] = {
    "image": "image",
    "image_url": "image",
    "input_image": "image",
    "audio": "audio",
    "audio_url": "audio",
    "input_audio": "audio",
}
"""Kinds by the type of a message's part, in every protocol's spelling."""


def plural(kind: str) -> str:
    """Return the plural name of a kind of media: "pictures" for "image"."""
    return f"{NOUNS[kind]}s"


def plurals(kinds: Iterable[str]) -> list[str]:
    """Return the plural names of kinds, sorted by kind."""
    return [plural(kind) for kind in sorted(kinds)]


def kind_of_part(type_: object) -> MediaKind | None:
    """Return the kind of media that a message part of the type ``type_`` (such as "image_url")
    holds; None for other types.
    """
    return PART_KINDS.get(type_) if isinstance(type_, str) else None
