"""Inputs of an encoder whose keys and values are in memory, by their ids.

Requests with the same input share its pages. Those of an input that no sequence uses stay until
their room is needed.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from treadle.errors import NoRoomError

if TYPE_CHECKING:
    from treadle.kvcache.cache import KVCache
    from treadle.kvcache.sequence import EncodedKeys

Ids = tuple[int, ...]


class EncodedInputs:
    """The encoded inputs of one cache. It is a holder of each, so that one with a single holder is
    idle. The caller holds the engine's lock.
    """

    def __init__(self, cache: KVCache) -> None:
        self._cache = cache
        self._by_ids: dict[Ids, EncodedKeys] = {}  # the most recently used last

    def __len__(self) -> int:
        return len(self._by_ids)

    def __contains__(self, ids: Ids) -> bool:
        return ids in self._by_ids

    def hold(self, ids: Ids, *, shared: bool = True) -> EncodedKeys:
        """Return the keys and values of an input, held once more; not stored yet if it is new. If
        not ``shared``, they are new, and nobody else's. Evicts idle inputs if necessary, the least
        recently used first.

        Raises NoRoomError, with no input that is in use changed, if there are not enough pages.
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
        """Release the least recently used idle input; return whether there was one."""
        idle = next((ids for ids, keys in self._by_ids.items() if keys.holders == 1), None)
        if idle is None:
            return False
        self._by_ids.pop(idle).drop()
        return True

    def forget(self) -> None:
        """Release all idle inputs."""
        while self._evict():
            pass
