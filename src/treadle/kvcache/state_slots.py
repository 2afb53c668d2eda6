"""Slots of recurrent states, and checkpoints at prefixes.

A sequence with a state holds two slots: a run reads one and writes the other, and they are swapped
when the run has succeeded. The slot that is read may have other holders: a fork, or a node of the
page tree whose checkpoint it is. Then it is never written to, so a checkpoint needs no copy.

Checkpoints are at page edges: at the end of a prefill run, at intervals during decoding, and where
two prompts part; and at the end of a system prompt, which may lie within a page. Those of a long
text are thinned out. When a slot is needed, a checkpoint is dropped: first the least recently used
of those that no later prompt has used, so that one long text cannot evict the states that many
prompts begin with.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Sequence as Seq
from itertools import chain as joined
from itertools import pairwise
from typing import TYPE_CHECKING

from treadle.kernels.run_state import PAGE

if TYPE_CHECKING:
    from treadle.kvcache.prefix_tree import PageNode

# minimum tokens that a checkpoint must save a later prompt if it costs an extra run
MIN_SAVING = 8 * PAGE
MIN_SAVING_AT_BRANCH = 2 * PAGE  # the same, at a known branching point of prompts
SAVED_BYTES, SAVED = 256 << 20, range(4, 65)  # memory and number of checkpoints
NO_CHECKPOINT = -1  # a node without a checkpoint
# Places of a checkpoint.
RUN = "run"  # the end of a run, or an interval of a text that is written
SYSTEM = "system"  # the end of a system prompt
PARTING = "parting"  # the place where two prompts part


def n_saved(state_bytes: int) -> int:
    """Return how many checkpoints to keep, given the bytes of a state: SAVED_BYTES of them, within
    the range SAVED.
    """
    return min(max(SAVED_BYTES // max(state_bytes, 1), SAVED.start), SAVED.stop - 1)


def last_saved(chain: Seq[PageNode]) -> int:
    """Return the number of tokens up to the last checkpoint of a chain of full pages; 0 without
    one.
    """
    return PAGE * next(
        (p for p in range(len(chain), 0, -1) if chain[p - 1].state != NO_CHECKPOINT), 0
    )


class StateSlots:
    """Slots for the states of ``n_sequences`` sequences, two each, and ``n_saved`` checkpoints."""

    def __init__(self, n_sequences: int, n_saved: int) -> None:
        self.n_slots = 2 * n_sequences + n_saved
        self.room = n_sequences  # sequences that can still get a state
        self._free = list(range(self.n_slots))
        self._holders = [0] * self.n_slots
        # A segmented LRU of places by node, in each segment least recently used first: checkpoints
        # that no prompt has used since, and those that one has used or is expected to use.
        self._fresh: OrderedDict[PageNode, str] = OrderedDict()
        self._used: OrderedDict[PageNode, str] = OrderedDict()
        self._max_used = n_saved - n_saved // 4  # bound of ``_used``: new ones need room, too

    # -- of sequences ------------------------------------------------------------------------------

    def allocate(self, node: PageNode | None = None) -> list[int]:
        """Return two slots for one more sequence: its state, new or the checkpoint of ``node``, and
        the one to write next. The caller has checked ``room``.
        """
        self.room -= 1
        if node is None:
            return [self._allocate(), self._allocate()]
        self._note_use(node)
        return [self._hold(node.state), self._allocate()]

    def fork(self, slots: list[int]) -> list[int]:
        """Return two slots for a second sequence with the state of ``slots``. The caller has
        checked ``room``.
        """
        self.room -= 1
        return [self._hold(slots[0]), self._allocate()]

    def release(self, slots: list[int]) -> None:
        """Release a sequence's slots, and empty the list."""
        self.room += bool(slots)
        while slots:
            self._drop(slots.pop())

    def advance(self, slots: list[int]) -> None:
        """Swap a sequence's two slots after a run: the one it wrote is the state now. The next run
        writes the other, or a new slot if that one has other holders.
        """
        slots.reverse()
        if self._holders[slots[1]] > 1:
            self._drop(slots[1])
            slots[1] = self._allocate()

    def rewind(self, slots: list[int], node: PageNode) -> None:
        """Reset the state of the sequence with these ``slots`` to the checkpoint of ``node``."""
        self._drop(slots[0])
        slots[0] = self._hold(node.state)
        self._note_use(node)

    # -- of nodes ----------------------------------------------------------------------------------

    @property
    def saved(self) -> list[PageNode]:
        """The nodes with a checkpoint, in the order in which checkpoints are dropped."""
        return [*self._fresh, *self._used]

    def place_of(self, node: PageNode) -> str:
        """Return the place of a node's checkpoint: RUN, SYSTEM or PARTING."""
        return self._used.get(node) or self._fresh[node]

    def save(self, node: PageNode, slot: int, place: str = RUN) -> None:
        """Keep the state in ``slot`` as the checkpoint of ``node``, unless it has one; ``place``:
        RUN, SYSTEM or PARTING.
        """
        if node.state == NO_CHECKPOINT:
            node.state = self._hold(slot)
            self._fresh[node] = place
        if place != RUN or node in self._used:
            self._note_use(node)
        else:
            self._fresh.move_to_end(node)

    def thin_checkpoints(self, chain: Seq[PageNode], prompt_end: int = 0) -> None:
        """Drop checkpoints of a chain of pages that lie close to the one before and the one after,
        if they are at ends of runs, no prompt has used them, and they are not at ``prompt_end``
        tokens.

        The distance that remains is at most half of that to the nearer end of the text, or
        ``2 * MIN_SAVING`` if that is more. So a text of n tokens keeps about ``4 log2(n /
        MIN_SAVING)`` checkpoints.
        """
        at = [p for p, node in enumerate(chain, 1) if node.state != NO_CHECKPOINT]
        before = 0
        for p, after in pairwise(at):
            room = max(2 * MIN_SAVING, min(before, len(chain) - after) * PAGE // 2)
            node = chain[p - 1]
            is_thin = (after - before) * PAGE <= room and p * PAGE != prompt_end
            if is_thin and self._fresh.get(node) == RUN:
                self.forget(node)
            else:
                before = p

    def forget(self, node: PageNode) -> None:
        """Drop a node's checkpoint, if it has one."""
        if node.state != NO_CHECKPOINT:
            segment = self._fresh if node in self._fresh else self._used
            del segment[node]
            self._drop(node.state)
            node.state = NO_CHECKPOINT

    def forget_all(self) -> None:
        """Drop every checkpoint."""
        for node in self.saved:
            self.forget(node)

    def _note_use(self, node: PageNode) -> None:
        """Move a node's checkpoint to the segment of those that prompts use, as the most recently
        used one.
        """
        self._used[node] = self.place_of(node)
        self._used.move_to_end(node)
        self._fresh.pop(node, None)
        if len(self._used) > self._max_used:
            oldest, place = self._used.popitem(last=False)
            self._fresh[oldest] = place

    # -- slots -------------------------------------------------------------------------------------

    def _hold(self, slot: int) -> int:
        self._holders[slot] += 1
        return slot

    def _drop(self, slot: int) -> None:
        self._holders[slot] -= 1
        if not self._holders[slot]:
            self._free.append(slot)

    def _allocate(self) -> int:
        """Take a slot with one holder, dropping a checkpoint if necessary. One is always available:
        sequences hold at most two each, and all other holders are checkpoints.
        """
        if not self._free:
            saved = joined(self._fresh, self._used)
            self.forget(next(node for node in saved if self._holders[node.state] == 1))
        return self._hold(self._free.pop())
