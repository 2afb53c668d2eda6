"""In-memory store of /v1/responses, for ``previous_response_id`` and look-ups by id."""

from __future__ import annotations

from collections import OrderedDict
from typing import Any

from treadle.base.fast_classes import cached_property, dataclass
from treadle.base.fork_safety import free_lock

Message = dict[str, Any]
Item = dict[str, Any]
MOST = 256  # responses
MOST_CHARACTERS = 16 << 20  # of all responses together
MOST_MEDIA_CHARACTERS = 128 << 20  # of all, where the model reads pictures or sounds


@dataclass
class StoredResponse:
    """One stored response. ``chat_messages``: its conversation as chat messages; ``inputs``: all
    input items, including those of earlier responses; ``whole``: the response object.
    """

    chat_messages: list[Message]
    inputs: list[Item]
    whole: dict[str, Any]

    @property
    def items(self) -> list[Item]:
        """All items of the conversation: inputs, then output."""
        return [*self.inputs, *self.whole["output"]]

    @cached_property
    def n(self) -> int:
        """Size in characters, which counts against ``MOST_CHARACTERS``."""
        return sum(len(str(each)) for each in (*self.chat_messages, *self.inputs, self.whole))


class ResponseStore:
    """The most recently used responses by id, and their items by id: at most ``most`` responses,
    and ``most_characters`` in all. The event loop stores them, pool threads look them up.
    """

    def __init__(self, most: int = MOST, most_characters: int = MOST_CHARACTERS) -> None:
        self._most = most
        self._most_characters = most_characters
        self._responses: OrderedDict[str, StoredResponse] = OrderedDict()
        self._of_item: dict[str, dict[str, None]] = {}  # the responses that have each item
        self._n = 0  # characters
        self._lock = free_lock()

    def keep(self, name: str, kept: StoredResponse) -> None:
        """Store the response ``kept`` under the id ``name``; drop the least recently used ones
        above the limits of number and characters.
        """
        n = kept.n  # slow for a long one, so computed before the lock
        with self._lock:
            self._responses[name] = kept
            for item in kept.items:
                self._of_item.setdefault(item["id"], {})[name] = None
            self._n += n
            while len(self._responses) > self._most or self._n > self._most_characters:
                self._drop(next(iter(self._responses)))

    def get(self, name: str) -> StoredResponse | None:
        """Return the response with the id ``name``, None if it is not stored (any more)."""
        with self._lock:
            found = self._responses.get(name)
            if found is not None:
                self._responses.move_to_end(name)
            return found

    def drop(self, name: str) -> bool:
        """Delete the response with the id ``name``; return whether it existed. Responses that
        continue it stay.
        """
        with self._lock:
            return self._drop(name)

    def _drop(self, name: str) -> bool:
        gone = self._responses.pop(name, None)
        if gone is None:
            return False
        self._n -= gone.n
        for item in {item["id"] for item in gone.items}:
            del self._of_item[item][name]
            if not self._of_item[item]:
                del self._of_item[item]
        return True

    def item(self, name: str) -> Item | None:
        """Return the item with the id ``name``; None unless a stored response has it."""
        with self._lock:
            if name not in self._of_item:
                return None
            of = next(reversed(self._of_item[name]))
            self._responses.move_to_end(of)
            found = self._responses[of]
        return next(item for item in found.items if item["id"] == name)
