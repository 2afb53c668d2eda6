"""The kinds of media, the words for them, and the types of parts that stand for them."""

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
    """Return the plural name of a kind: ``pictures``."""
    return f"{NOUNS[kind]}s"


def plurals(kinds: Iterable[str]) -> list[str]:
    """Return the plural names of kinds, always in the same order."""
    return [plural(kind) for kind in sorted(kinds)]


def kind_of_part(type_: object) -> MediaKind | None:
    """Return the kind of a message's part by its type; None for a type of another part."""
    return PART_KINDS.get(type_) if isinstance(type_, str) else None
