"""One run's inputs: what the compiled steps read through RUN_STATE.

A batch mixes chunks of prompts and single decoding tokens of any number of sequences; each part
says of how many of its last tokens logits are wanted.
"""

from __future__ import annotations

from collections.abc import Sequence as Ids
from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np

from treadle.kernels.attention import ITEM, SPLIT
from treadle.kernels.kv import PAGE
from treadle.kernels.merge import MERGE
from treadle.kernels.spec import RUN_STATE

if TYPE_CHECKING:
    from treadle.kvcache import KVCache, Sequence


@dataclass(frozen=True)
class Part:
    """``ids`` go behind what ``seq`` holds; logits of the last ``n_outputs`` of them are wanted."""

    seq: Sequence
    ids: Ids[int]
    n_outputs: int = 1


class Run:
    """The arrays of one run (kept alive here) and the RUN_STATE record that points to them.

    ``run["n_tokens"]`` reads a count; the attributes are what the numpy twins take.
    """

    def __init__(
        self, parts: Ids[Part], starts: Ids[int], ropes: Ids[np.ndarray], tokens: np.ndarray
    ) -> None:
        n = len(tokens)
        self.tokens = tokens
        self.positions = np.concatenate(
            [np.arange(s, s + len(p.ids)) for p, s in zip(parts, starts, strict=True)]
        )
        ends = np.cumsum([len(p.ids) for p in parts])
        self.output_rows = np.concatenate(
            [np.arange(end - p.n_outputs, end) for p, end in zip(parts, ends, strict=True)]
        ).astype(np.int32)
        self.rope_global, self.rope_local = ropes[0], ropes[-1]
        self.state = np.zeros(1, RUN_STATE)
        self.state["n_tokens"], self.state["n_outputs"] = n, len(self.output_rows)
        for field in ("tokens", "output_rows", "rope_global", "rope_local"):
            self.state[field] = getattr(self, field).ctypes.data
        self._kept: list[np.ndarray] = []  # what RUN_STATE points to

    def __getitem__(self, field: str) -> int:
        return int(self.state[field][0])

    def lay_out(
        self, cache: KVCache, parts: Ids[Part], starts: Ids[int], tile: int, split: bool
    ) -> None:
        """Slots and attention items in each pool: ``tile`` query tokens an item, long histories cut
        where ``split``.
        """
        for which, pool in enumerate(cache.pools):
            layout, token = _Layout(tile, split, pool.window), 0
            for part, start in zip(parts, starts, strict=True):
                layout.add(np.array(part.seq.pages[which], np.int64), token, start, len(part.ids))
                token += len(part.ids)
            self._point(("global", "local")[which], layout)

    def _point(self, name: str, layout: _Layout) -> None:
        """Let RUN_STATE, and the attributes for the twins, name what was laid out for a pool."""
        slots, merges = np.concatenate(layout.slots), np.array(layout.merges, MERGE)
        items = np.array(layout.items, ITEM)
        suffix = "_local" if name == "local" else ""
        self.state[f"n_attn_items{suffix}"] = len(items)
        self.state[f"n_attn_merges{suffix}"] = len(merges)
        arrays = {"kv_slots": slots, "attn_items": items, "attn_merges": merges}
        for field, array in arrays.items():
            self.state[f"{field}_{name}"] = array.ctypes.data
        self._kept += [items, *layout.pages]
        setattr(self, f"kv_slots_{name}", slots)
        setattr(self, f"attn_items_{name}", list(zip(items, layout.pages_of, strict=True)))
        setattr(self, f"attn_merges_{name}", merges)


class _Layout:
    """What one pool's layers are to do: where to write, and the attention items."""

    def __init__(self, tile: int, split: bool, window: int) -> None:
        self.tile, self.split, self.window = tile, split, window
        self.slots: list[np.ndarray] = []
        self.pages: list[np.ndarray] = []
        self.items: list[tuple[int, ...]] = []
        self.pages_of: list[np.ndarray] = []  # of each item
        self.merges: list[tuple[int, ...]] = []
        self.n_partials = 0

    def add(self, pages: np.ndarray, token: int, start: int, n: int) -> None:
        """``n`` tokens of one sequence, rows ``token`` and on of the batch, behind ``start``."""
        at = np.arange(start, start + n)
        self.pages.append(pages)
        self.slots.append(pages[at // PAGE] * PAGE + at % PAGE)
        for first in range(0, n, self.tile):
            count, position = min(self.tile, n - first), start + first
            runs = self._runs(position, position + count)
            for begin, end in runs:
                partial = self.n_partials if len(runs) > 1 else -1
                self.n_partials += partial >= 0
                tokens = (token + first, count, position)
                self.items.append((*tokens, begin, end, pages.ctypes.data, partial, 0))
                self.pages_of.append(pages)
            if len(runs) > 1:
                first_partial = self.n_partials - len(runs)
                self.merges.append((token + first, count, first_partial, len(runs)))

    def _runs(self, position: int, end: int) -> list[tuple[int, int]]:
        """The keys that queries from ``position`` to ``end`` see, in runs of SPLIT where cut."""
        begin = max(0, position - self.window + 1) if self.window else 0
        if not self.split:
            return [(begin, end)]
        cuts = range(begin // SPLIT * SPLIT, end, SPLIT)
        return [(max(begin, cut), min(end, cut + SPLIT)) for cut in cuts]
