"""A sequence: the KV cache entry of one request or session (``cache.py``)."""

from __future__ import annotations

from array import array
from collections import deque
from dataclasses import field
from time import time_ns
from typing import TYPE_CHECKING

from treadle.base.fast_dataclass import dataclass
from treadle.kvcache.prefix_tree import Lora, PageNode

if TYPE_CHECKING:
    from treadle.kvcache.cache import KVCache
    from treadle.models.switch import Mark


@dataclass(eq=False)
class EncodedKeys:
    """The pages with keys and values of an encoder's rows; any number of sequences attend to them.
    The last holder to call ``drop`` releases the pages.
    """

    cache: KVCache
    n_keys: int
    pages: list[array[int]]  # per pool of ``KVCache.cross``, i64
    is_stored: bool = False  # whether the pages have been written
    holders: int = 0

    def hold(self) -> EncodedKeys:
        """Add a holder; return self."""
        self.holders += 1
        return self

    def drop(self) -> None:
        """Remove a holder; the last one releases the pages."""
        self.holders -= 1
        if self.holders:
            return
        for pool, pages in zip(self.cache.cross, self.pages, strict=True):
            for page in pages:
                pool.drop(page)
        self.pages = []


@dataclass(eq=False)
class Sequence:
    """The tokens of one request or session in the KV cache, with its pages in each pool."""

    cache: KVCache
    ids: list[int] = field(default_factory=list)  # tokens with keys and values
    pages: list[array[int]] = field(default_factory=list)  # per pool, i64
    slots: list[int] = field(default_factory=list)  # of its state: current, and to be written next
    n_state: int = 0  # number of ids that its state includes
    nodes: list[PageNode] = field(default_factory=list)  # full pages in the tree, from the root
    reserved: list[int] = field(default_factory=list)  # pages per pool, reserved and not yet taken
    lora: Lora = ()  # its adapters and control vectors
    # The encoder's rows that its tokens attend to, in a model with cross attention; the sequence is
    # one of their holders. Its keys and values depend on them, so no other sequence shares these.
    encoded: EncodedKeys | None = None
    # After each picture whose tokens share positions: the index behind it, and position minus index
    # from there on (``MediaRegistry.add_shifts``).
    shifts: list[tuple[int, int]] = field(default_factory=list)
    marks: list[Mark] = field(default_factory=list)  # of its control tokens (models/switch.py)
    n_drafted: int = 0  # drafted ids at the end, which may be dropped
    is_unshared: bool = False  # uses no other sequence's pages; its own are shared once it retires
    n_changes: int = 0  # counter of changes to ids: an unchanged counter means unchanged ids
    began_ns: int = field(default_factory=time_ns)  # time of its start or last lookup
    # Lengths in tokens, 0: none.
    system_end: int = 0  # of the system prompt: its state is worth a checkpoint
    branch_point: int = 0  # where it parts from cached texts: its state is worth a checkpoint
    tail_end: int = 0  # of its last checkpoint within a page
    prompt_end: int = 0  # of the last checkpoint in the prompt, which another answer starts from
    # Origin of its state at the last ``KVCache.match``: see ``PrefixHit.state``.
    state_from: str | None = None

    def __len__(self) -> int:
        return len(self.ids)

    def close(self) -> None:
        """Release the pages and the reservation; full pages stay in the prefix tree until their
        room is needed.
        """
        self.cache.truncate(self, 0)
        self.cache.reserve(self, 0)
        if self.encoded is not None:
            self.encoded.drop()
            self.encoded = None

    def attend_to(self, encoded: EncodedKeys) -> None:
        """Make this empty sequence attend to an encoder's rows. It becomes one of their holders, in
        place of the caller.
        """
        self.encoded = encoded
        self.is_unshared = True


class AbandonedSequences(deque[Sequence]):
    """Sequences of sessions that were garbage-collected (in any thread) without being closed."""

    def close(self) -> None:
        """Close these sequences, which releases their pages; called under the engine's lock."""
        while self:
            self.popleft().close()
