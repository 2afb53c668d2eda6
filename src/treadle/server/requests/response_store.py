"""Conversations that are kept in memory, for responses that go on from them by their ids, and the
responses themselves.
"""

from __future__ import annotations

from collections import OrderedDict
from typing import Any

from treadle.base.cached_property import cached_property
from treadle.base.fast_dataclass import dataclass
from treadle.base.fork_safety import free_lock

Message = dict[str, Any]
Item = dict[str, Any]
MOST = 256  # conversations
MOST_CHARACTERS = 16 << 20  # of all


@dataclass
class StoredResponse:
    """One response: what was said up to its end as messages of a chat, the items that it was asked
    with, those of responses before it among them, and its object.
    """

    talk: list[Message]
    inputs: list[Item]
    whole: dict[str, Any]

    @property
    def items(self) -> list[Item]:
        """All of the conversation."""
        return [*self.inputs, *self.whole["output"]]

    @cached_property
    def n(self) -> int:
        """Characters, of which there may be so many."""
        return sum(len(str(each)) for each in (*self.talk, *self.inputs, self.whole))


class ResponseStore:
    """The last conversations, by the id of their last response; and their items, by their own. The
    event loop keeps them, threads of the pool look for them.
    """

    def __init__(self, most: int = MOST, most_characters: int = MOST_CHARACTERS) -> None:
        self._most, self._most_characters = most, most_characters
        self._kept: OrderedDict[str, StoredResponse] = OrderedDict()
        self._of_item: dict[str, dict[str, None]] = {}  # the responses that have each item
        self._n = 0  # characters
        self._lock = free_lock()

    def keep(self, name: str, kept: StoredResponse) -> None:
        """Keep a response. Those that nobody asked for for the longest time go."""
        n = kept.n  # takes long for a long one
        with self._lock:
            self._kept[name] = kept
            for item in kept.items:
                self._of_item.setdefault(item["id"], {})[name] = None
            self._n += n
            while len(self._kept) > self._most or self._n > self._most_characters:
                self._drop(next(iter(self._kept)))

    def get(self, name: str) -> StoredResponse | None:
        """A response, if it is still here."""
        with self._lock:
            found = self._kept.get(name)
            if found is not None:
                self._kept.move_to_end(name)
            return found

    def drop(self, name: str) -> bool:
        """Forget a response; whether it was here. Others that went on from it stay as they are."""
        with self._lock:
            return self._drop(name)

    def _drop(self, name: str) -> bool:
        gone = self._kept.pop(name, None)
        if gone is None:
            return False
        self._n -= gone.n
        for item in {item["id"] for item in gone.items}:
            del self._of_item[item][name]
            if not self._of_item[item]:
                del self._of_item[item]
        return True

    def item(self, name: str) -> Item | None:
        """One item of a conversation, if a response of that is still here."""
        with self._lock:
            if name not in self._of_item:
                return None
            of = next(reversed(self._of_item[name]))
            self._kept.move_to_end(of)
            found = self._kept[of]
        return next(item for item in found.items if item["id"] == name)
