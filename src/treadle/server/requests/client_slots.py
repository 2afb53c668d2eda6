"""Numbered slots, as llama.cpp has them: which request is in each, and its last tokens."""

from __future__ import annotations

from collections.abc import Iterator
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from treadle.kvcache.prefix_tree import Lora
    from treadle.server.requests.request_stream import OutputStream

NONE = -1  # slot number of a request without a slot
BLOCK = 256  # tokens that ``alike`` compares at once


class ClientSlot:
    """One slot, number ``id``: its running output, if any, and the tokens of the last output that
    has ended.
    """

    def __init__(self, id: int) -> None:
        self.id = id
        self.used = 0
        self.ids: list[int] = []
        self.lora: Lora = ()  # the LoRA adapters of ``ids``
        self.output: OutputStream | None = None


class ClientSlots:
    """``n`` numbered slots. An output gets the free slot whose last tokens share the longest prefix
    with its prompt (at least half of them), else the least recently used; none if no slot is free.
    """

    def __init__(self, n: int) -> None:
        self._slots = [ClientSlot(id) for id in range(n)]
        self._n_taken = 0

    def __iter__(self) -> Iterator[ClientSlot]:
        return iter(self._slots)

    def __len__(self) -> int:
        return len(self._slots)

    def __getitem__(self, id: int) -> ClientSlot:
        return self._slots[id]

    def take(self, output: OutputStream, wanted: int = NONE) -> None:
        """Assign a free slot to the output, if there is one: number ``wanted`` if that is free,
        else the best one. Otherwise the output has no slot.
        """
        free = [slot for slot in self._slots if slot.output is None]
        if not free:
            return
        slot = next((slot for slot in free if slot.id == wanted), None) or self._best(free, output)
        self._n_taken += 1
        slot.output = output
        slot.used = self._n_taken
        output.slot = slot.id

    def _best(self, free: list[ClientSlot], output: OutputStream) -> ClientSlot:
        """Return the free slot with the longest common prefix; of equal ones the least recently
        used. Called for each output of an HTTP request: there may be as many as slots, all with the
        same prompt.
        """
        ids = output.request.ids
        best, *others = sorted(free, key=lambda slot: slot.used)
        most = alike(best.ids, ids)
        for slot in others:
            longer = most < len(slot.ids) and most < len(ids) and slot.ids[most] == ids[most]
            if longer and (n := alike(slot.ids, ids)) > most:
                best = slot
                most = n
        return best

    def leave(self, output: OutputStream) -> None:
        """Free the slot of an output that is finished or cancelled, and keep its tokens in the
        slot.
        """
        if output.slot != NONE and self._slots[output.slot].output is output:
            slot = self._slots[output.slot]
            slot.output = None
            slot.ids = list(output.request.ids)
            slot.lora = output.request.lora


def alike(a: list[int], b: list[int]) -> int:
    """Return the length of the common prefix of ``a`` and ``b`` if it is at least half of ``a``,
    else 0.
    """
    n = min(len(a), len(b))
    if a[:n] != b[:n]:  # comparing slices is much faster than comparing items
        at = 0
        while a[at : at + BLOCK] == b[at : at + BLOCK]:
            at += BLOCK
        n = next(i for i in range(at, n) if a[i] != b[i])
    return n if 2 * n >= len(a) else 0
