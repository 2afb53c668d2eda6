"""Keys and values of the encoder's rows, for all layers of a decoder."""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING

import numpy as np

from treadle.engine.batch import RunInputs
from treadle.models.graphs.cross import ENCODED
from treadle.plan.lowering.weights import Weights

if TYPE_CHECKING:
    from treadle.engine.engine import Engine
    from treadle.kvcache.cache import EncodedKeys
    from treadle.models.config import Config


class CrossKeys:
    """The plan that stores the keys and values of an encoder's rows in an engine's cross pools.

    ``config``: the decoder's, of the graph ``cross_keys``. The plan is made on first use.
    """

    def __init__(self, engine: Engine, config: Config, n_rows: int) -> None:
        self._engine = engine
        self._config = replace(config, ignored=())
        self._n_rows = n_rows
        self._weights = Weights(engine.gguf, engine.device)
        self._made = False

    def _make(self) -> None:
        device = self._engine.device
        cache = self._engine.cache
        self._plan = device.plan(self._config, self._weights, cache, self._n_rows, 1, output="keys")
        self._inputs = RunInputs(self._plan, cache, (), device)
        self._arena = device.memory(self._plan.arena_bytes)
        self._program = device.ready(self._plan, self._arena, self._inputs.memory)
        self._made = True

    def store(self, states: np.ndarray, to: EncodedKeys) -> None:
        """Store the keys and values of an encoder's states, f32 ``[n_keys, n_embd]``. The caller
        holds the engine's lock.
        """
        if not self._made:
            self._make()
        buffer = self._plan.takes[ENCODED]
        rows = np.zeros((len(states), buffer.row_bytes // 4), np.float32)
        rows[:, : states.shape[1]] = states
        self._arena.write(self._plan.offsets[buffer], rows.reshape(-1).view(np.uint8))
        self._inputs.lay_out_encoder(to)
        self._engine.device.run(self._program)
        self._engine.check_files()

    def close(self) -> None:
        """Release the plan and the weights."""
        self._weights.consts.clear()
        if self._made:
            del self._plan, self._inputs, self._arena, self._program
            self._made = False
