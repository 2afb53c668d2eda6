"""Conversations that are kept in memory, for responses that go on from them by their ids, and the
responses themselves.
"""

from __future__ import annotations

from collections import OrderedDict
from functools import cached_property
from typing import Any

from treadle.record import dataclass

Message = dict[str, Any]
MOST = 256  # conversations
MOST_CHARACTERS = 16 << 20  # of all


@dataclass
class Kept:
    """One response: what was said up to its end, its own items by their ids, and its object."""

    talk: list[Message]
    items: dict[str, Message]
    whole: dict[str, Any]

    @cached_property
    def n(self) -> int:
        """Characters, of which there may be so many."""
        return sum(len(str(each)) for each in (*self.talk, self.whole))


class Talks:
    """The last conversations, by the id of their last response; and the items of those responses,
    by their own.
    """

    def __init__(self, most: int = MOST, most_characters: int = MOST_CHARACTERS) -> None:
        self._most, self._most_characters = most, most_characters
        self._kept: OrderedDict[str, Kept] = OrderedDict()
        self._of_item: dict[str, str] = {}  # the response that each item is of
        self._n = 0  # characters

    def keep(
        self, name: str, talk: list[Message], items: dict[str, Message], whole: dict[str, Any]
    ) -> None:
        """Keep a response, ``whole``, what was said before it, and its ``items``. Those that
        nobody asked for for the longest time go.
        """
        kept = Kept([*talk, *items.values()], items, whole)
        self._kept[name] = kept
        self._of_item |= dict.fromkeys(items, name)
        self._n += kept.n
        while len(self._kept) > self._most or self._n > self._most_characters:
            self.drop(next(iter(self._kept)))

    def get(self, name: str) -> Kept | None:
        """A response, if it is still here."""
        found = self._kept.get(name)
        if found is not None:
            self._kept.move_to_end(name)
        return found

    def drop(self, name: str) -> bool:
        """Forget a response; whether it was here. Others that went on from it stay as they are."""
        gone = self._kept.pop(name, None)
        if gone is None:
            return False
        self._n -= gone.n
        for item in gone.items:
            del self._of_item[item]
        return True

    def item(self, name: str) -> Message | None:
        """One item of a response, if that is still here."""
        of = self._of_item.get(name)
        if of is None:
            return None
        self._kept.move_to_end(of)
        return self._kept[of].items[name]
