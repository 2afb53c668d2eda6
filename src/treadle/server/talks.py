"""Conversations that are kept in memory, for responses that go on from them by their ids."""

from __future__ import annotations

from collections import OrderedDict
from typing import Any

Message = dict[str, Any]
MOST = 256  # conversations
MOST_CHARACTERS = 16 << 20  # of all


class Talks:
    """The last conversations, by the id of their last response; and the items of those responses,
    by their own.
    """

    def __init__(self, most: int = MOST, most_characters: int = MOST_CHARACTERS) -> None:
        self._most, self._most_characters = most, most_characters
        self._kept: OrderedDict[str, tuple[list[Message], dict[str, Message], int]] = OrderedDict()
        self._of_item: dict[str, str] = {}  # the response that each item is of
        self._n = 0  # characters

    def keep(self, name: str, talk: list[Message], items: dict[str, Message]) -> None:
        """Keep what was said up to a response, and its ``items``. Those that nobody went on from
        for the longest time go.
        """
        messages = [*talk, *items.values()]
        n = sum(len(str(message)) for message in messages)
        self._kept[name] = messages, items, n
        self._of_item |= dict.fromkeys(items, name)
        self._n += n
        while len(self._kept) > self._most or self._n > self._most_characters:
            _, gone, n = self._kept.popitem(last=False)[1]
            self._n -= n
            for item in gone:
                del self._of_item[item]

    def get(self, name: str) -> list[Message] | None:
        """What was said, if it is still here."""
        found = self._kept.get(name)
        if found is None:
            return None
        self._kept.move_to_end(name)
        return list(found[0])

    def item(self, name: str) -> Message | None:
        """One item of a response, if that is still here."""
        of = self._of_item.get(name)
        if of is None:
            return None
        self._kept.move_to_end(of)
        return self._kept[of][1][name]
