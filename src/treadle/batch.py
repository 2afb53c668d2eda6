"""One run's inputs: what the compiled steps read through RUN_STATE.

A batch mixes chunks of prompts and single decoding tokens of any number of sequences; each part
says of how many of its last tokens logits are wanted.

Between two tokens nothing else of treadle's runs in Python, with caches that the weights have just
swept clean. So a plan's arrays are made once, and a batch is laid out by writing numbers into them,
through memoryviews: numpy takes twice as long to put one number in its place.
"""

from __future__ import annotations

from array import array
from collections.abc import Sequence as Ids
from struct import Struct
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np

from treadle.kernels.attention_item import ITEM, SPLIT
from treadle.kernels.kv import PAGE
from treadle.kernels.merge import MERGE
from treadle.kernels.spec import RUN_STATE

if TYPE_CHECKING:
    from treadle.kvcache import KVCache, Sequence
    from treadle.plan import Plan

ROPE_ROWS = 64  # positions that a table of rotations grows by
WHOLE = 1 << 40  # keys in one item where histories are not cut: all there can be
ITEM_RECORD, MERGE_RECORD = (Struct(f"={dtype.itemsize // 8}q") for dtype in (ITEM, MERGE))
FIELDS = {name: at for at, name in enumerate(RUN_STATE.names or ())}


class Part(NamedTuple):
    """``ids`` go behind what ``seq`` holds; logits of the last ``n_outputs`` of them are wanted."""

    seq: Sequence
    ids: Ids[int]
    n_outputs: int = 1


class RopeTable:
    """Cosines and sines by position, computed when first reached."""

    def __init__(self, inverse: np.ndarray, factor: float, n_ctx: int) -> None:
        self._inverse, self._factor = inverse, np.float32(factor)
        self._rows = np.empty((n_ctx, 2, len(inverse)), np.float32)  # memory is used when written
        self._filled = 0

    def upto(self, n: int) -> np.ndarray:
        """The first ``n`` positions' at least: f32 ``[n, 2, rope_dims / 2]``, exact to f32."""
        if n > self._filled:
            start = self._filled
            self._filled = min(-(-n // ROPE_ROWS) * ROPE_ROWS, len(self._rows))
            angles = np.arange(start, self._filled)[:, None] * self._inverse
            rows = np.stack([np.cos(angles), np.sin(angles)], 1)
            self._rows[start : self._filled] = rows.astype(np.float32) * self._factor
        return self._rows


class Run:
    """The inputs of a plan's runs, and the RUN_STATE record that points to them: filled anew by
    each ``lay_out``, for nobody looks at the last batch's by then (a thread that comes late may,
    but believes nothing of it).

    ``run["n_tokens"]`` reads a count; the properties are what the numpy twins take.
    """

    def __init__(self, plan: Plan, cache: KVCache, ropes: Ids[RopeTable]) -> None:
        n = plan.n_tokens
        self._parts: Ids[Part] = ()
        self._tables = ropes
        self._tokens = np.zeros(n, np.int32)
        self._output_rows = np.zeros(plan.n_outputs, np.int32)
        self._ropes = [np.zeros((n, *table.upto(0).shape[1:]), np.float32) for table in ropes]
        step = SPLIT if plan.split_keys else WHOLE
        n_items = cache.max_partials(n, step)
        self._pools = [_Pool(n, n_items, plan.query_tile, step, p.window) for p in cache.pools]
        self.state = np.zeros(1, RUN_STATE)
        self.address = int(self.state.ctypes.data)
        self._counts = self.state.view(np.int64).data
        self._put_token, self._put_output = self._tokens.data, self._output_rows.data
        first, last = self._pools[0], self._pools[-1]
        for field, held in {
            "tokens": self._tokens,
            "output_rows": self._output_rows,
            "rope_global": self._ropes[0],
            "rope_local": self._ropes[-1],
            "kv_slots_global": first.slots,
            "kv_slots_local": last.slots,
            "attn_items_global": first.items,
            "attn_items_local": last.items,
            "attn_merges_global": first.merges,
            "attn_merges_local": last.merges,
        }.items():
            self.state[field] = held.ctypes.data

    def lay_out(self, parts: Ids[Part], starts: Ids[int]) -> None:
        """Write down a batch: each part's tokens go behind the ``starts`` that its sequence had,
        whose pages are there already.
        """
        row = n_outputs = 0
        self._parts = parts
        for pool in self._pools:
            pool.n_items = pool.n_merges = pool.n_partials = 0
        for part, start in zip(parts, starts, strict=True):
            n = len(part.ids)
            end = row + n
            for at, token in enumerate(part.ids, row):
                self._put_token[at] = token
            for rope, table in zip(self._ropes, self._tables, strict=True):
                rope[row:end] = table.upto(start + n)[start : start + n]
            for pool, pages in zip(self._pools, part.seq.pages, strict=True):
                pool.add(pages, row, start, n)
            for row in range(end - part.n_outputs, end):
                self._put_output[n_outputs] = row
                n_outputs += 1
            row = end
        counts, first, last = self._counts, self._pools[0], self._pools[-1]
        counts[FIELDS["n_tokens"]], counts[FIELDS["n_outputs"]] = row, n_outputs
        counts[FIELDS["n_attn_items"]] = first.n_items
        counts[FIELDS["n_attn_merges"]] = first.n_merges
        counts[FIELDS["n_attn_items_local"]] = last.n_items
        counts[FIELDS["n_attn_merges_local"]] = last.n_merges

    def __getitem__(self, field: str) -> int:
        return self._counts[FIELDS[field]]

    # -- as the numpy twins see it --------------------------------------------------------------

    @property
    def tokens(self) -> np.ndarray:
        return self._tokens[: self["n_tokens"]]

    @property
    def output_rows(self) -> np.ndarray:
        return self._output_rows[: self["n_outputs"]]

    @property
    def rope_global(self) -> np.ndarray:
        return self._ropes[0][: self["n_tokens"]]

    @property
    def rope_local(self) -> np.ndarray:
        return self._ropes[-1][: self["n_tokens"]]

    @property
    def kv_slots_global(self) -> np.ndarray:
        return self._pools[0].slots[: self["n_tokens"]]

    @property
    def kv_slots_local(self) -> np.ndarray:
        return self._pools[-1].slots[: self["n_tokens"]]

    @property
    def attn_items_global(self) -> list[tuple[Any, np.ndarray]]:
        return self._items(0)

    @property
    def attn_items_local(self) -> list[tuple[Any, np.ndarray]]:
        return self._items(-1)

    @property
    def attn_merges_global(self) -> np.ndarray:
        return self._pools[0].merges[: self._pools[0].n_merges]

    @property
    def attn_merges_local(self) -> np.ndarray:
        return self._pools[-1].merges[: self._pools[-1].n_merges]

    def _items(self, which: int) -> list[tuple[Any, np.ndarray]]:
        """A pool's attention items, each with its sequence's pages."""
        pool = self._pools[which]
        pages = [np.array(p.seq.pages[which], np.int64) for p in self._parts for _ in p.ids]
        return [(item, pages[item["token"]]) for item in pool.items[: pool.n_items]]


class _Pool:
    """What one pool's layers are to do: where to write, and the attention items: ``tile`` query
    tokens each, and ``step`` keys of their histories at most.
    """

    def __init__(self, n_tokens: int, n_items: int, tile: int, step: int, window: int) -> None:
        self.tile, self.step, self.window = tile, step, window
        self.slots = np.zeros(n_tokens, np.int64)
        self.items, self.merges = np.zeros(n_items, ITEM), np.zeros(n_tokens, MERGE)
        self._put_slot = self.slots.data
        self._item_bytes = self.items.view(np.uint8).data
        self._merge_bytes = self.merges.view(np.uint8).data
        self.n_items = self.n_merges = self.n_partials = 0

    def add(self, pages: array[int], token: int, start: int, n: int) -> None:
        """``n`` tokens of one sequence, rows ``token`` and on of the batch, behind ``start``."""
        end = start + n
        for at in range(start, end):
            self._put_slot[token + at - start] = pages[at // PAGE] * PAGE + at % PAGE
        address, _ = pages.buffer_info()
        for position in range(start, end, self.tile):
            count = min(self.tile, end - position)
            self._attend(address, token + position - start, count, position)

    def _attend(self, address: int, token: int, count: int, position: int) -> None:
        """Items for the keys that ``count`` queries from ``position`` on see, in runs that begin
        at multiples of ``step``: where there is more than one, a merge joins them.
        """
        begin, end = self._seen(position), position + count
        cuts = range(begin // self.step * self.step, end, self.step)
        if len(cuts) > 1:
            merge = (token, count, self.n_partials, len(cuts))
            MERGE_RECORD.pack_into(self._merge_bytes, self.n_merges * MERGE_RECORD.size, *merge)
            self.n_merges += 1
        for cut in cuts:
            partial = -1
            if len(cuts) > 1:
                partial = self.n_partials
                self.n_partials += 1
            keys = (max(begin, cut), min(end, cut + self.step))
            at = self.n_items * ITEM_RECORD.size
            ITEM_RECORD.pack_into(
                self._item_bytes, at, token, count, position, *keys, address, partial, 0
            )
            self.n_items += 1

    def _seen(self, position: int) -> int:
        """The first key that a query at ``position`` sees."""
        return max(0, position - self.window + 1) if self.window else 0
