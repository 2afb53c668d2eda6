"""The memory that a model's engine may take, estimated from its header before it is loaded."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

from treadle.base.fast_classes import dataclass
from treadle.catalog.facts import PROGRAM_BYTES, ModelFacts, facts_of
from treadle.catalog.stored import StoredModel, stored_at
from treadle.hub.resume import size_of
from treadle.models.config import USUAL_CONTEXT
from treadle.server.router.served_model import MemoryRequest, ServedModel, kv_share

SHARED_BYTES = 256 << 20  # a default KV cache may have these even if they are more than its share
MOST_SHARE = 4  # a default KV cache may have 1 / MOST_SHARE of the memory of all engines
LEAST_BYTES = 1 << 20  # lower bound of any KV cache
LEAST_TOKENS = 512  # of a default KV cache; a model without room for them does not fit


@dataclass(frozen=True)
class MemoryNeed:
    """Bytes of memory of an engine: ``weights`` and projector, KV cache (``cache_bytes``), and the
    ``program`` itself. ``least_cache_bytes``: of the smallest KV cache with which the model is
    loaded.
    """

    weights: int
    cache_bytes: int
    least_cache_bytes: int
    program: int = PROGRAM_BYTES

    @property
    def n_bytes(self) -> int:
        """Bytes of weights, KV cache and program together."""
        return self.weights + self.cache_bytes + self.program

    @property
    def least(self) -> int:
        """Bytes of weights, the smallest KV cache and program together."""
        return self.weights + self.least_cache_bytes + self.program

    def within(self, n_bytes: int) -> MemoryNeed:
        """Return the need with the KV cache reduced so that all fits into ``n_bytes``, but not
        below the smallest.
        """
        room = n_bytes - self.weights - self.program
        cache = max(self.least_cache_bytes, min(self.cache_bytes, room))
        return MemoryNeed(self.weights, cache, self.least_cache_bytes, self.program)


def memory_need(
    stored: StoredModel, facts: ModelFacts, cache: MemoryRequest, most: int | None
) -> MemoryNeed:
    """Return the memory need of a model's engine. ``stored``, ``facts``: its files, and the facts
    from its header; ``cache``: the memory that its options ask for; ``most``: bytes for all engines
    together, which bound a default KV cache; None for no bound.
    """
    weights = facts.stored_bytes(stored) + sum(size_of(Path(file)) for file in cache.files)
    size = cache_size(facts, kv_share(cache.kv))
    if cache.n_bytes is not None:
        return MemoryNeed(weights, cache.n_bytes, cache.n_bytes)
    if cache.n_tokens is None:
        context = cache.context or min(USUAL_CONTEXT, facts.n_context or USUAL_CONTEXT)
        n_bytes = size(cache.n_sequences, cache.n_sequences * context)
        return MemoryNeed(weights, n_bytes, n_bytes)
    most_tokens = cache.n_sequences * (facts.n_context or cache.n_tokens)
    wanted = size(cache.n_sequences, min(cache.n_tokens, most_tokens))
    if most is not None:
        wanted = min(wanted, max(SHARED_BYTES, most // MOST_SHARE))
    return MemoryNeed(weights, wanted, min(wanted, size(1, LEAST_TOKENS)))


def cache_size(facts: ModelFacts, share: float) -> Callable[[int, int], int]:
    """Return a function (number of sequences, number of their tokens together) -> bytes of the KV
    cache, for a model of these ``facts``. Each sequence has some bytes whatever its length: states,
    windows. ``share``: size of the type of keys and values, relative to 16 bits.
    """
    usual = max(1, min(USUAL_CONTEXT, facts.n_context or USUAL_CONTEXT))
    per_token = facts.kv_bytes / usual
    if facts.n_context > usual:
        per_token = (facts.full_kv_bytes - facts.kv_bytes) / (facts.n_context - usual)
    per_text = max(0.0, facts.kv_bytes - per_token * usual)
    return lambda n_texts, n_tokens: max(
        LEAST_BYTES, int(share * (per_text * n_texts + per_token * n_tokens))
    )


def need_of(model: ServedModel, most: int | None) -> MemoryNeed | None:
    """Return the memory need of a model; None if it is not on this machine or cannot be read.
    ``most``: bytes for all engines together.
    """
    path = model.path()
    if path is None:
        return None
    stored = stored_at(path)
    facts = facts_of(stored)
    if facts.problem:  # the engine tells it
        return None
    return memory_need(stored, facts, model.cache, most)
