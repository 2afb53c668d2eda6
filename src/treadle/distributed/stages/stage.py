"""One pipeline stage: an engine of some layers, which runs batches laid out by the front engine.

The front engine decides which sequences run, the pages of their tokens, and copies. A stage has the
pages of its own layers, under the same numbers.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any, NamedTuple

import numpy as np

from treadle.convert.open import open_model
from treadle.devices.cpu.device import Cpu
from treadle.devices.cpu.mapping_faults import guard_mappings
from treadle.engine.engine import Engine
from treadle.errors import TreadleError
from treadle.isa import choose
from treadle.jit.host import host_features
from treadle.models.load import load_config
from treadle.models.stages import staged

Given = dict[str, np.ndarray]  # outputs of a stage by name: rows of f32 as bytes


class CellCopy(NamedTuple):
    """A copy of a page or a layer state, before a run: from the cell number ``cell`` to the number
    ``to`` of a pool. ``pool``: its index among the cache's pools of pages, then of states.
    """

    pool: int
    cell: int
    to: int


class Batch(NamedTuple):
    """A run as laid out by the front engine: the sizes of the plan, and its inputs."""

    n_tokens: int  # the most tokens of the plan
    n_outputs: int  # the most outputs of the plan
    output: str  # the graph's output that the last stage computes
    inputs: bytes  # the block of engine/batch.py
    copies: tuple[CellCopy, ...] = ()


class Stage(Engine):
    """An engine for ``layers`` of a model file, on a CPU device with ``isa`` (a name) and
    ``n_threads``; the other settings are those of ``Engine``.

    Raises the errors of ``treadle.load``, and UnsupportedError for layers that cannot be split.
    """

    def __init__(
        self,
        path: str,
        layers: range,
        *,
        isa: str,
        n_threads: int,
        n_ctx: int,
        **settings: Any,
    ) -> None:
        guard_mappings()
        gguf = open_model(path)
        config = staged(load_config(gguf), layers)
        device = Cpu(choose(host_features(), isa), n_threads)
        super().__init__(gguf, config, device, n_ctx=n_ctx, **settings)
        self.layers = layers
        self._last: Any = None  # the last plan, whose logits may be read

    @property
    def is_last(self) -> bool:
        """Whether this is the last stage of the model."""
        return self.layers.stop == self.config.n_layer

    def run_laid_out(self, batch: Batch, given: Given) -> Given:
        """Run one batch. ``given``: the previous stage's outputs, {} for the first stage. Return
        ``stream`` (the residual stream, a row of f32 for each token) or, in the last stage, all
        outputs except the logits, which ``read`` returns.
        """
        with self.lock:
            self._copy(batch.copies)
            output = batch.output if self.is_last else "stream"
            ready = self._last = self.plan_for(batch.n_tokens, batch.n_outputs, output)
            block = ready.run.block
            block[:] = np.frombuffer(batch.inputs, np.uint8, len(block))
            for name, buffer in ready.plan.takes.items():
                ready.arena.write(ready.plan.offsets[buffer], given[name])
            self.device.run(ready.program)
            self.check_files()
            return {name: self._rows_of(name) for name in ready.plan.outputs if name != "logits"}

    def read(self, name: str) -> np.ndarray:
        """Return the rows of the output called ``name`` of the last run, as bytes: uint8
        ``[n_bytes]``.
        """
        with self.lock:
            return self._rows_of(name)

    def _rows_of(self, name: str) -> np.ndarray:
        plan = self._last.plan
        run = self._last.run
        arena = self._last.arena
        counts = {"top": "n_sampled", "logits": "n_outputs", "stream": "n_tokens"}
        n = run[counts.get(name, "n_tokens" if name == "states" else "n_parts")]
        buffer = plan.outputs[name]
        return np.array(arena.read(plan.offsets[buffer], n * buffer.row_bytes))

    def _copy(self, copies: Iterable[CellCopy]) -> None:
        """Copy pages and states, but only the parts of this stage's layers, as the other layers'
        parts were written by other stages.
        """
        cells = (*self.cache.pools, *self.cache.states)
        for which, cell, to in copies:
            pool = cells[which]
            if not pool.layers:
                continue
            n_bytes = pool.cell_bytes // len(pool.layers)
            for layer in set(pool.layers) & set(self.layers):
                at = pool.layer_off(layer)
                self.device.copy(
                    pool.const.memory,
                    to * pool.cell_bytes + at,
                    cell * pool.cell_bytes + at,
                    n_bytes,
                )

    def close(self) -> None:
        """Stop the threads and close the file."""
        super().close()
        self.gguf.close()


def run_chain(stages: Iterable[Stage], batch: Batch) -> Given:
    """Run a batch through all stages in this process. Return the last stage's outputs, by name.
    Raises TreadleError if there is no stage, and the errors that stages raise.
    """
    given: Given = {}
    for stage in stages:
        given = stage.run_laid_out(batch, given)
    if not given:
        raise TreadleError("no stage")
    return given
