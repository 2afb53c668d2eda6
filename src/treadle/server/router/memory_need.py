"""The memory that a model's engine may take, estimated from its header before it is loaded."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

from treadle.base.fast_dataclass import dataclass
from treadle.catalog.facts import PROGRAM_BYTES, ModelFacts, facts_of
from treadle.catalog.stored import StoredModel, stored_at
from treadle.hub.resume import size_of
from treadle.models.config import USUAL_CONTEXT
from treadle.server.router.served_model import MemoryRequest, ServedModel, kv_share

SHARED_BYTES = 256 << 20  # of a default KV cache, at least so many if it has a use for them
MOST_SHARE = 4  # of all memory, a default KV cache takes at most one part of so many
LEAST_BYTES = 1 << 20  # of any KV cache
LEAST_TOKENS = 512  # of a default KV cache; a model without room for them does not fit


@dataclass(frozen=True)
class MemoryNeed:
    """Bytes of an engine: of the weights and the projector, of its KV cache, and of the program
    itself. ``least_cache_bytes``: of the smallest KV cache with which it is loaded.
    """

    weights: int
    cache_bytes: int
    least_cache_bytes: int
    program: int = PROGRAM_BYTES

    @property
    def n_bytes(self) -> int:
        """All bytes."""
        return self.weights + self.cache_bytes + self.program

    @property
    def least(self) -> int:
        """All bytes, with the smallest KV cache."""
        return self.weights + self.least_cache_bytes + self.program

    def within(self, n_bytes: int) -> MemoryNeed:
        """Return the need with as large a KV cache as fits into ``n_bytes``."""
        room = n_bytes - self.weights - self.program
        cache = max(self.least_cache_bytes, min(self.cache_bytes, room))
        return MemoryNeed(self.weights, cache, self.least_cache_bytes, self.program)


def memory_need(
    stored: StoredModel, facts: ModelFacts, cache: MemoryRequest, most: int | None
) -> MemoryNeed:
    """Return the need of a model's engine. ``most``: bytes of memory for all engines."""
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
    """Return a function from the number of texts and of their tokens together to the bytes of the
    KV cache. Each text has some whatever its length: states, windows. ``share``: bytes of the type
    of keys and values, of those in 16 bits.
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
    """Return the need of a model that is on this machine and can be read, else None. Reads its
    header once.
    """
    path = model.path()
    if path is None:
        return None
    stored = stored_at(path)
    facts = facts_of(stored)
    if facts.problem:  # the engine tells it
        return None
    return memory_need(stored, facts, model.cache, most)
