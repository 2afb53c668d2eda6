"""Prefix-cache hit report: how many prompt tokens were reused, and why reuse stopped."""

from __future__ import annotations

from collections.abc import Sequence as Seq
from typing import TYPE_CHECKING

from treadle.base.fast_dataclass import dataclass
from treadle.kernels.run_state import PAGE
from treadle.kvcache.page_pool import FREED
from treadle.kvcache.state_slots import NO_CHECKPOINT

if TYPE_CHECKING:
    from treadle.kvcache.cache import KVCache, Sequence

WHY = {
    "end": "the rest of the prompt is less than a page and the last token",
    "off": "the call disabled prefix reuse",
    "new": "no cached text continues this way",
    "evicted": "its page was evicted",
    "window": "pages of the sliding window were freed",
    "state": "no state was kept at this position",
    "room": "no free page to load it into",
    "damaged": "its page file is damaged",
    "other model": "its page file has another model, --kv or version",
}
# Origins of a reused state, besides the places of checkpoints (``state_slots.py``).
NOTHING_REUSED = "none"
OWN = "sequence"  # the end of the sequence itself


@dataclass
class PrefixHit:
    """Prompt tokens that were reused: ``memory`` from the cache, ``files`` from page files; and
    where reuse stopped.

    left_at, token, why: the index at which reuse stopped, the prompt's token there, and the reason,
        a key of WHY.
    state: origin of the reused state: NOTHING_REUSED, OWN, or the place of its checkpoint; None if
        no layer keeps a state.

    Indices are multiples of the page size, except within the caller's own sequence, and at the end
    of a system prompt, which is found as a whole: otherwise a stranger could discover other users'
    texts token by token.
    """

    memory: int = 0
    files: int = 0
    left_at: int | None = None
    token: int | None = None
    why: str = ""
    state: str | None = None


def reuse_stop_reason(cache: KVCache, seq: Sequence, ids: Seq[int]) -> str:
    """Return the reason, a key of WHY, that ``seq`` holds no more of the prompt ``ids`` after
    ``KVCache.match`` and ``PageStore.fetch``.
    """
    p = len(seq.ids) // PAGE
    store = cache.store
    page = tuple(ids[p * PAGE : (p + 1) * PAGE])
    if (p + 1) * PAGE >= len(ids):
        return "end"
    if store is not None and store.miss_reason:
        return store.miss_reason
    parent = seq.nodes[p - 1] if p else cache.tree.root_of(seq.lora)
    node = parent.next.get(page)
    if node is not None:
        if cache.states and node.state == NO_CHECKPOINT:
            return "state"
        return "window" if FREED in node.pages else "room"
    if cache.tree.has_evicted(parent, page):
        return "evicted"
    return "other model" if store is not None and store.is_foreign(parent, page) else "new"
