"""Slots of states: who holds which, and checkpoints of texts' beginnings.

A sequence with a state holds two slots, one that a run reads and one that it writes; they change
places when the run has ended well. A slot that is read may have other holders: a fork, or a node of
the page tree, whose checkpoint it is. Nobody writes to it then, so a checkpoint is no copy.

Checkpoints stand at page edges: at the end of a run that read a prompt, and now and then where a
text is written. The least recently used ones give way.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Sequence as Ids
from typing import Protocol

from treadle.kernels.attention.page_layout import PAGE

WORTH = 8 * PAGE  # tokens that a checkpoint saves a later text, at least, where it costs a run
AGAIN = 2 * PAGE  # the same, where another text has begun alike
SAVED_BYTES, SAVED = 256 << 20, range(4, 65)  # checkpoints: what they may take, and how many
NONE = -1  # of a node without a checkpoint


class StateNode(Protocol):
    """Of the page tree: a text's beginning up to a page's edge."""

    state: int  # the slot of its checkpoint, or NONE


def n_saved(state_bytes: int) -> int:
    """How many checkpoints there is room for, of states of so many bytes."""
    return min(max(SAVED_BYTES // max(state_bytes, 1), SAVED.start), SAVED.stop - 1)


def last_saved(chain: Ids[StateNode]) -> int:
    """Tokens up to the last checkpoint of a text's pages."""
    return PAGE * next((p for p in range(len(chain), 0, -1) if chain[p - 1].state != NONE), 0)


class StateSlots:
    """``n_sequences`` may have a state, two slots each; ``n_saved`` are for checkpoints."""

    def __init__(self, n_sequences: int, n_saved: int) -> None:
        self.n_slots = 2 * n_sequences + n_saved
        self.room = n_sequences  # sequences that may still have a state
        self._free = list(range(self.n_slots))
        self._holders = [0] * self.n_slots
        self._saved: OrderedDict[StateNode, None] = OrderedDict()  # the least recently used first

    # -- of sequences ---------------------------------------------------------------------------

    def take(self, node: StateNode | None = None) -> list[int]:
        """For a new state, or with that of ``node``; the caller knows of ``room``."""
        self.room -= 1
        if node is None:
            return [self._one(), self._one()]
        self._saved.move_to_end(node)
        return [self._held(node.state), self._one()]

    def fork(self, slots: list[int]) -> list[int]:
        """For a second sequence with the state of these; the caller knows of ``room``."""
        self.room -= 1
        return [self._held(slots[0]), self._one()]

    def give_back(self, slots: list[int]) -> None:
        """A sequence has no state any more."""
        self.room += bool(slots)
        while slots:
            self._drop(slots.pop())

    def advance(self, slots: list[int]) -> None:
        """A run has written the second: it is the state now, and the first is written next, or
        another one where somebody else holds it.
        """
        slots.reverse()
        if self._holders[slots[1]] > 1:
            self._drop(slots[1])
            slots[1] = self._one()

    def go_back(self, slots: list[int], node: StateNode) -> None:
        """A sequence's state is that of ``node`` again."""
        self._drop(slots[0])
        slots[0] = self._held(node.state)
        self._saved.move_to_end(node)

    # -- of nodes -------------------------------------------------------------------------------

    def save(self, node: StateNode, slot: int) -> None:
        """The state in ``slot`` is that at the node's end."""
        if node.state == NONE:
            node.state = self._held(slot)
        self._saved[node] = None
        self._saved.move_to_end(node)

    def forget(self, node: StateNode) -> None:
        """Drop a node's checkpoint, if it has one."""
        if node.state != NONE:
            del self._saved[node]
            self._drop(node.state)
            node.state = NONE

    def forget_all(self) -> None:
        """Drop every checkpoint."""
        for node in list(self._saved):
            self.forget(node)

    # -- slots ----------------------------------------------------------------------------------

    def _held(self, slot: int) -> int:
        self._holders[slot] += 1
        return slot

    def _drop(self, slot: int) -> None:
        self._holders[slot] -= 1
        if not self._holders[slot]:
            self._free.append(slot)

    def _one(self) -> int:
        """A slot of one's own, if need be a checkpoint's. There always is one: sequences hold at
        most two each, and what else is held is of checkpoints alone.
        """
        if not self._free:
            self.forget(next(node for node in self._saved if self._holders[node.state] == 1))
        return self._held(self._free.pop())
