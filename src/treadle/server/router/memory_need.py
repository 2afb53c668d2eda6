"""The memory that a model's engine may take, estimated from its header before it is loaded."""

from __future__ import annotations

from pathlib import Path

from treadle.base.fast_dataclass import dataclass
from treadle.catalog.facts import PROGRAM_BYTES, ModelFacts, facts_of
from treadle.catalog.stored import StoredModel, stored_at
from treadle.hub.resume import size_of
from treadle.models.config import USUAL_CONTEXT
from treadle.server.router.served_model import KV_BYTES, MemoryRequest, ServedModel

SHARED_BYTES = 256 << 20  # of a default KV cache, at least so many if it has a use for them
MOST_SHARE = 4  # of all memory, a default KV cache takes at most one part of so many
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
    usual = max(1, min(USUAL_CONTEXT, facts.n_context or USUAL_CONTEXT))
    per_token = facts.kv_bytes / usual * KV_BYTES.get(cache.kv or "f16", 1.0)
    weights = facts.stored_bytes(stored) + sum(size_of(Path(file)) for file in cache.files)
    if cache.n_bytes is not None:
        return MemoryNeed(weights, cache.n_bytes, cache.n_bytes)
    if cache.n_tokens is None:
        n_tokens = cache.n_sequences * (cache.context or usual)
        n_bytes = int(per_token * n_tokens)
        return MemoryNeed(weights, n_bytes, n_bytes)
    wanted = int(per_token * cache.n_tokens)
    if most is not None:
        wanted = min(wanted, max(SHARED_BYTES, most // MOST_SHARE))
    return MemoryNeed(weights, wanted, min(wanted, int(per_token * LEAST_TOKENS)))


def need_of(model: ServedModel, most: int | None) -> MemoryNeed | None:
    """Return the need of a model that is on this machine, else None. Reads its header once."""
    path = model.path()
    if path is None:
        return None
    stored = stored_at(path)
    return memory_need(stored, facts_of(stored), model.cache, most)
