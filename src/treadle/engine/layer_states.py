"""Hidden states behind layers, read from the labelled steps of a plan.

A plan runs up to the last step of a layer, whose rows are then read, and goes on. The engine's own
plans and runs do not change.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from contextlib import ExitStack
from typing import TYPE_CHECKING, NamedTuple

import numpy as np
import numpy.typing as npt

from treadle.base.interrupts import interrupts_held
from treadle.engine.batch import BatchItem, RunInputs
from treadle.errors import ContextFullError, TreadleError, UnsupportedError
from treadle.kernels.matmul.sizes import COLUMNS
from treadle.kernels.spec import round_up

if TYPE_CHECKING:
    from treadle.engine.engine import Engine
    from treadle.kvcache.sequence import Sequence as CachedSequence
    from treadle.models.config import Config
    from treadle.plan.plan import Buffer, Plan

Floats = npt.NDArray[np.float32]
OF_LAYER = re.compile(r"L(\d+)\.")


class LayerEnd(NamedTuple):
    """The last step of a layer, and the buffer of the states that it writes."""

    step: int
    buffer: Buffer


class LayerStateReader:
    """Reads the hidden states behind each layer for texts.

    They are those of the model with its default adapters, without control vectors. Raises
    UnsupportedError for an encoder, whose plans may have the states in the layout of a product
    alone, and for a model in stages.
    """

    def __init__(self, engine: Engine) -> None:
        if not (engine.config.causal and engine.has_states):
            what = "an encoder" if engine.has_states else "a model in pipeline stages"
            raise UnsupportedError(f"the states behind the layers of {what}: not supported")
        self._engine = engine
        n_adapters = len(engine.adapters)
        self._lora = tuple(each for each in engine.cache.lora if each[0] < n_adapters)
        self._plans: dict[int, _LayerPlan] = {}  # by the engine's plan

    def read(self, texts: Sequence[Sequence[int]], n_last: Sequence[int]) -> list[Floats]:
        """Run texts; return for each the states of its last ``n_last`` tokens behind each layer,
        f32 ``[n_layer, n_last, n_embd]``. Texts that fit one run together share it.

        Raises ContextFullError if a text does not fit, TreadleError for a text without tokens, or
        for states that are not finite.
        """
        if not all(len(ids) for ids in texts):
            raise TreadleError("no tokens")
        result: list[Floats] = []
        for group in self._engine.together(texts):
            wanted = n_last[len(result) : len(result) + len(group)]
            try:
                result += self._run(group, wanted)
            except ContextFullError:
                if len(group) == 1:
                    raise
                for ids, n in zip(group, wanted, strict=True):  # too many pages at once
                    result += self._run([ids], [n])
        return result

    def _run(self, texts: Sequence[Sequence[int]], wanted: Sequence[int]) -> list[Floats]:
        """Run texts of one run, or a single one of any length."""
        engine = self._engine
        step = engine.max_tokens
        with ExitStack() as stack:
            with engine.lock:
                seqs = [engine.cache.sequence(lora=self._lora) for _ in texts]
            stack.callback(self._close, seqs)
            parts = [(seq, ids) for seq, ids in zip(seqs, texts, strict=True)]
            found: list[list[Floats]] = [[] for _ in texts]
            for at in range(0, max(len(ids) for ids in texts), step):
                items = [BatchItem(seq, ids[at : at + step], 0) for seq, ids in parts]
                with engine.lock, interrupts_held():
                    states = self._states(items)
                    for seq in seqs:
                        engine.cache.commit(seq)
                row = 0
                for rows, item in zip(found, items, strict=True):
                    rows.append(states[:, row : row + len(item.ids)])
                    row += len(item.ids)
        each = [np.concatenate(rows, 1) for rows in found]
        return [rows[:, -n:] for rows, n in zip(each, wanted, strict=True)]

    def _close(self, seqs: Sequence[CachedSequence]) -> None:
        with self._engine.lock, interrupts_held():
            for seq in seqs:
                seq.close()

    def _states(self, items: list[BatchItem]) -> Floats:
        """Run one batch; return the states of its tokens, f32 ``[n_layer, n_tokens, n_embd]``."""
        engine = self._engine
        device = engine.device
        whole, run = engine.steps(items)
        own = self._plans.get(id(whole))
        if own is None:
            own = self._plans[id(whole)] = _LayerPlan(whole, run, engine)
        n_tokens = sum(len(item.ids) for item in items)
        n_embd = engine.config.n_embd
        out = np.empty((len(own.ends), n_tokens, n_embd), np.float32)
        begin = 0
        for layer, (step, buffer) in enumerate(own.ends):
            device.run(own.program, range(begin, step + 1))
            begin = step + 1
            raw = own.arena.read(own.plan.offsets[buffer], n_tokens * buffer.row_bytes)
            out[layer] = raw.view(np.float32).reshape(n_tokens, -1)[:, :n_embd]
        engine.check_files()
        if not np.isfinite(out).all():
            layer = int(np.flatnonzero(~np.isfinite(out).all((1, 2)))[0])
            raise TreadleError(f"the states behind layer {layer} are not finite")
        return out


class _LayerPlan:
    """A copy of an engine's plan with memory of its own."""

    def __init__(self, plan: Plan, run: RunInputs, engine: Engine) -> None:
        self.source = plan  # kept alive, so that its id() is not reused
        self.plan = plan.with_steps(plan.steps)
        self.ends = layer_ends(self.plan, engine.config)
        self.arena = engine.device.memory(self.plan.arena_bytes)
        self.program = engine.device.ready(self.plan, self.arena, run.memory)


def layer_ends(plan: Plan, config: Config) -> list[LayerEnd]:
    """Return the end of each layer of a decoder's plan: its last step that writes rows of f32 as
    wide as the states. Steps behind that pack them for the next layer.
    """
    row_bytes = 4 * round_up(config.n_embd * config.n_streams, COLUMNS)
    ends: dict[int, LayerEnd] = {}
    for i, step in enumerate(plan.steps):
        found = OF_LAYER.match(step.label)
        buffer = step.writes[0] if step.writes else None
        if found and buffer is not None and (buffer.dtype, buffer.row_bytes) == ("f4", row_bytes):
            ends[int(found[1])] = LayerEnd(i, buffer)
    return [ends[layer] for layer in range(config.n_layer)]
