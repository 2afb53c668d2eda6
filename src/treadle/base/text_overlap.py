"""Lengths of common prefixes, and of overlaps of a text and a stop string."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any


def overlap(text: str, stop: str) -> int:
    """Return the length of the longest suffix of ``text`` that is a proper prefix of ``stop``."""
    longest = min(len(text), len(stop) - 1)
    return next((n for n in range(longest, 0, -1) if stop.startswith(text[-n:])), 0)


def n_common(one: Sequence[Any], other: Sequence[Any]) -> int:
    """Return the length of the longest common prefix of the sequences ``one`` and ``other``."""
    pairs = enumerate(zip(one, other, strict=False))
    return next((i for i, (a, b) in pairs if a != b), min(len(one), len(other)))
