"""Keys and values of an encoder's rows, for all layers of a decoder."""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING

import numpy as np

from treadle.engine.batch import RunInputs
from treadle.engine.prepared_plan import write_rows
from treadle.models.graphs.cross import ENCODED
from treadle.plan.lowering.weights import Weights

if TYPE_CHECKING:
    from treadle.devices.protocol import Device
    from treadle.kvcache.cache import EncodedKeys, KVCache
    from treadle.models.config import Config
    from treadle.plan.plan import Plan

SMALLEST = 64  # rows of the smallest plan


class CrossKeysPlan:
    """A compiled plan, with its inputs and memory, that stores an encoder's keys and values in a
    cache's cross pools.
    """

    def __init__(self, plan: Plan, cache: KVCache, device: Device) -> None:
        self.plan = plan
        self.inputs = RunInputs(plan, cache, (), device)
        self.arena = device.memory(plan.arena_bytes)
        self.program = device.ready(plan, self.arena, self.inputs.memory)


class CrossKeys:
    """Stores the keys and values of an encoder's rows in a decoder's cache. Plans are made on first
    use, for a power of two of rows from SMALLEST on, at most ``n_rows``.

    ``config``, ``weights``: the decoder's; the config names a graph that only stores keys and
    values.
    """

    def __init__(
        self, config: Config, weights: Weights, cache: KVCache, device: Device, n_rows: int
    ) -> None:
        self._config = replace(config, ignored=())
        self._device = device
        self._cache = cache
        self._n_rows = n_rows
        self._weights = weights
        self._plans: dict[int, CrossKeysPlan] = {}

    def plan_for(self, n_rows: int) -> CrossKeysPlan:
        """Return the smallest plan with room for ``n_rows`` rows, ready to run; it is made and
        compiled on first use. ``n_rows``: at least 1, at most the constructor's.
        """
        size = min(max(SMALLEST, 1 << (n_rows - 1).bit_length()), self._n_rows)
        if size not in self._plans:
            given = self._config, self._weights, self._cache, size, 1
            plan = self._device.plan(*given, output="keys")
            self._plans[size] = CrossKeysPlan(plan, self._cache, self._device)
        return self._plans[size]

    def store(self, states: np.ndarray, to: EncodedKeys) -> None:
        """Store the keys and values of an encoder's states, f32 ``[n_keys, n_embd]``, in the pages
        of ``to``. The caller holds the engine's lock. Raises FileError if the model's file changed.
        """
        made = self.plan_for(len(states))
        write_rows(made.plan, made.arena, ENCODED, states)
        made.inputs.lay_out_encoder(to)
        self._device.run(made.program)
        self._weights.gguf.check()
        to.is_stored = True

    def close(self) -> None:
        """Drop the plans and the constants of the weights."""
        self._weights.consts.clear()
        self._plans.clear()
