"""Prompts that an encoder has read, by their ids: their keys and values in the cross pools.

Requests with the same prompt share its pages. The pages of a prompt that no sequence uses stay
until their room is needed.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from treadle.errors import NoRoomError

if TYPE_CHECKING:
    from treadle.kvcache.cache import EncodedKeys, KVCache

Ids = tuple[int, ...]


class EncodedInputs:
    """The encoded prompts of one cache. It is itself one holder of each, so a prompt with a single
    holder is idle. The caller holds the engine's lock.
    """

    def __init__(self, cache: KVCache) -> None:
        self._cache = cache
        self._by_ids: dict[Ids, EncodedKeys] = {}  # the most recently used last

    def __len__(self) -> int:
        return len(self._by_ids)

    def __contains__(self, ids: Ids) -> bool:
        return ids in self._by_ids

    def hold(self, ids: Ids, *, shared: bool = True) -> EncodedKeys:
        """Return the keys and values of the prompt ``ids``, with one more holder. Those of a new
        prompt are not stored yet (``EncodedKeys.is_stored``). Without ``shared`` they are always
        new, and no other request finds them. Evicts idle prompts if necessary, the least recently
        used first.

        Raises NoRoomError, with no prompt in use changed, if there are not enough pages.
        """
        if not shared:
            return self._new(len(ids)).hold()
        keys = self._by_ids.pop(ids, None)
        if keys is None:
            keys = self._new(len(ids)).hold()
        self._by_ids[ids] = keys
        return keys.hold()

    def _new(self, n: int) -> EncodedKeys:
        while True:
            try:
                return self._cache.encoded(n)
            except NoRoomError:
                if not self._evict():
                    raise

    def _evict(self) -> bool:
        """Release the least recently used idle prompt; return whether there was one."""
        idle = next((ids for ids, keys in self._by_ids.items() if keys.holders == 1), None)
        if idle is None:
            return False
        self._by_ids.pop(idle).drop()
        return True

    def forget(self) -> None:
        """Release all idle prompts."""
        while self._evict():
            pass
