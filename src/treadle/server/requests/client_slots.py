"""Texts in numbered places: which slot each is in, and what was written there last."""

from __future__ import annotations

from collections.abc import Iterator
from typing import TYPE_CHECKING, Protocol

if TYPE_CHECKING:
    from treadle.kvcache.prefix_tree import Lora
    from treadle.scheduler.request import Request

NONE = -1  # of a text without a slot
BLOCK = 256


class SlotText(Protocol):
    """One that is written; see ``treadle.server.requests.request_stream.OutputStream``."""

    request: Request
    slot: int  # that it is in, or has been in


class ClientSlot:
    """One place: its ``text`` while one is written, and the tokens of the last one."""

    def __init__(self, id: int) -> None:
        self.id, self.used = id, 0
        self.ids: list[int] = []
        self.lora: Lora = ()  # the adapters that it was read with
        self.text: SlotText | None = None


class ClientSlots:
    """``n`` places. A text goes where one that begins alike was, else where none was longest."""

    def __init__(self, n: int) -> None:
        self._slots = [ClientSlot(id) for id in range(n)]
        self._n_taken = 0

    def __iter__(self) -> Iterator[ClientSlot]:
        return iter(self._slots)

    def __len__(self) -> int:
        return len(self._slots)

    def __getitem__(self, id: int) -> ClientSlot:
        return self._slots[id]

    def take(self, text: SlotText, wanted: int = NONE) -> None:
        """Find a place: the one that is ``wanted``, where that is free."""
        free = [slot for slot in self._slots if slot.text is None]
        if not free:
            return
        slot = next((slot for slot in free if slot.id == wanted), None) or self._best(free, text)
        self._n_taken += 1
        slot.text, slot.used, text.slot = text, self._n_taken, slot.id

    def _best(self, free: list[ClientSlot], text: SlotText) -> ClientSlot:
        """Where most of the text was, of equals the one that was longest none's. Called for each of
        a call's texts, which may be as many as the slots, and all alike.
        """
        ids = text.request.ids
        best, *others = sorted(free, key=lambda slot: slot.used)
        most = alike(best.ids, ids)
        for slot in others:
            longer = most < len(slot.ids) and most < len(ids) and slot.ids[most] == ids[most]
            if longer and (n := alike(slot.ids, ids)) > most:
                best, most = slot, n
        return best

    def leave(self, text: SlotText) -> None:
        """It is written, or given up: its place is free."""
        if text.slot != NONE and self._slots[text.slot].text is text:
            slot = self._slots[text.slot]
            slot.text, slot.ids, slot.lora = None, list(text.request.ids), text.request.lora


def alike(a: list[int], b: list[int]) -> int:
    """Tokens that two texts begin with, where that is half of the first at least; else 0."""
    n = min(len(a), len(b))
    if a[:n] != b[:n]:  # slices are compared much quicker than numbers
        at = 0
        while a[at : at + BLOCK] == b[at : at + BLOCK]:
            at += BLOCK
        n = next(i for i in range(at, n) if a[i] != b[i])
    return n if 2 * n >= len(a) else 0
