"""One run's inputs: what the compiled steps read through RUN_STATE.

A batch mixes chunks of prompts and single decoding tokens of any number of sequences; each part
says of how many of its last tokens logits are wanted.
"""

from __future__ import annotations

from collections.abc import Sequence as Ids
from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np

from treadle.kernels.attention import ITEM, MERGE, SPLIT
from treadle.kernels.kv import PAGE
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
        self._pages: list[np.ndarray] = []

    def __getitem__(self, field: str) -> int:
        return int(self.state[field][0])

    def lay_out(
        self, cache: KVCache, parts: Ids[Part], starts: Ids[int], tile: int, split: bool
    ) -> None:
        """Slots and attention items. ``tile``: query tokens of an item; ``split``: cut long
        histories.
        """
        for which, name in ((0, "global"), (-1, "local")):
            pool = cache.pools[which]
            slots, rows, merges, token = [], [], [], 0
            n_partials = 0
            for part, start in zip(parts, starts, strict=True):
                pages = np.array(part.seq.pages[which], np.int64)
                self._pages.append(pages)
                at = np.arange(start, start + len(part.ids))
                slots.append(pages[at // PAGE] * PAGE + at % PAGE)
                for first in range(0, len(part.ids), tile):
                    count = min(tile, len(part.ids) - first)
                    position = start + first
                    begin = max(0, position - pool.window + 1) if pool.window else 0
                    end = position + count
                    cuts = (
                        range(begin // SPLIT * SPLIT, end, SPLIT)
                        if split
                        else range(begin, begin + 1)
                    )
                    many = len(cuts) > 1
                    for cut in cuts:
                        key_begin = max(begin, cut)
                        key_end = min(end, cut + SPLIT) if split else end
                        partial = n_partials if many else -1
                        row = (
                            token + first,
                            count,
                            position,
                            key_begin,
                            key_end,
                            pages.ctypes.data,
                            partial,
                            0,
                        )
                        rows.append((row, pages))
                        n_partials += many
                    if many:
                        merges.append((token + first, count, n_partials - len(cuts), len(cuts)))
                token += len(part.ids)
            items = np.array([row for row, _ in rows], ITEM)
            merged = np.array(merges, MERGE)
            both = (np.concatenate(slots), items, merged)
            for field, array in zip(("kv_slots", "attn_items", "attn_merges"), both, strict=True):
                setattr(self, f"_{field}_{name}", array)
                self.state[f"{field}_{name}"] = array.ctypes.data
            suffix = "_local" if name == "local" else ""
            self.state[f"n_attn_items{suffix}"] = len(items)
            self.state[f"n_attn_merges{suffix}"] = len(merged)
            setattr(self, f"kv_slots_{name}", both[0])
            setattr(
                self,
                f"attn_items_{name}",
                [(item, pages) for item, (_, pages) in zip(items, rows, strict=True)],
            )
            setattr(self, f"attn_merges_{name}", merged)
