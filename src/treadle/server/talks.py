"""Conversations that are kept in memory, for responses that go on from them by their ids."""

from __future__ import annotations

from collections import OrderedDict
from typing import Any

MOST = 256  # conversations
MOST_CHARACTERS = 16 << 20  # of all


class Talks:
    """The last conversations, by the id of their last response."""

    def __init__(self, most: int = MOST, most_characters: int = MOST_CHARACTERS) -> None:
        self._most, self._most_characters = most, most_characters
        self._kept: OrderedDict[str, tuple[list[dict[str, Any]], int]] = OrderedDict()
        self._n = 0  # characters

    def keep(self, name: str, messages: list[dict[str, Any]]) -> None:
        """Keep one. Those that nobody went on from for the longest time go."""
        n = sum(len(str(message)) for message in messages)
        self._kept[name] = messages, n
        self._n += n
        while len(self._kept) > self._most or self._n > self._most_characters:
            self._n -= self._kept.popitem(last=False)[1][1]

    def get(self, name: str) -> list[dict[str, Any]] | None:
        """What was said, if it is still here."""
        found = self._kept.get(name)
        if found is None:
            return None
        self._kept.move_to_end(name)
        return list(found[0])
