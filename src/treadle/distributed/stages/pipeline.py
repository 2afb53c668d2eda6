"""Pipeline device: its plans run in stages elsewhere, each with some of the layers.

The front engine uses it as any other device (``devices/protocol.py``). Its memory is the stages'
memory; a run's inputs are sent as one block; the last stage's outputs come back. A ``StageChain``
runs the stages: processes on other machines (``treadle.distributed.cluster``), or engines in this
process.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, NamedTuple, Protocol

import numpy as np

from treadle.devices.cpu.thread_team import HostMemory
from treadle.devices.cpu.tuned_rows import tuned_row
from treadle.devices.protocol import Device, PlanRequest
from treadle.distributed.stages.stage import Batch, CellCopy, Given
from treadle.errors import TreadleError, UnsupportedError
from treadle.jit.cache import source_hash
from treadle.jit.kernel import CompileStats, isa_key
from treadle.plan.plan import Const, DeviceMemory, Plan

if TYPE_CHECKING:
    from treadle.isa.isa import Isa
    from treadle.kvcache.page_pool import Cells


class StageLostError(TreadleError):
    """A stage has ended, and its KV cache is lost."""


class StageChain(Protocol):
    """Interface to the stages of a pipeline: runs batches through them in order."""

    def run(self, batch: Batch) -> Given:
        """Run a batch through all stages. Return the last stage's outputs except the logits, by
        name. Raises StageLostError, and errors that stages raise.
        """

    def read(self, name: str) -> np.ndarray:
        """Return the output called ``name`` of the last run, as bytes: the logits, which ``run``
        does not return.
        """

    def restart(self) -> None:
        """Replace the stages that have ended. Raises TreadleError if that fails."""

    def close(self) -> None:
        """End the stages. Idempotent."""


class StageMemory(DeviceMemory):
    """Placeholder for memory that the stages have. If it is an arena, its outputs can be read after
    a run; all else raises UnsupportedError.
    """

    bytes = None

    def __init__(self, n_bytes: int) -> None:
        self.n_bytes = n_bytes
        self.arena: StageOutputs | None = None

    def _read(self, at: int, n_bytes: int) -> np.ndarray:
        if self.arena is None:
            raise UnsupportedError("cache files are not supported with pipeline stages")
        return self.arena.read(at, n_bytes)

    def _write(self, at: int, data: np.ndarray) -> None:
        raise UnsupportedError("cache files are not supported with pipeline stages")


class StageOutputs:
    """Outputs of the last run of ``chain``; logits are fetched on demand."""

    def __init__(self, chain: StageChain) -> None:
        self._chain, self._plan = chain, Plan(0, 0)
        self._given: Given = {}

    def set(self, plan: Plan, given: Given) -> None:
        """Store ``given``, the outputs of a finished run of ``plan`` by name, without the
        logits.
        """
        self._plan = plan
        self._given = given

    def read(self, at: int, n_bytes: int) -> np.ndarray:
        """Return ``n_bytes`` of an output, uint8; ``at``: their offset in the plan's arena."""
        for name, buffer in self._plan.outputs.items():
            start = self._plan.offsets[buffer]
            if start <= at < start + buffer.n_bytes:
                if name not in self._given:
                    self._given[name] = self._chain.read(name)
                return self._given[name][at - start : at - start + n_bytes]
        raise AssertionError(f"byte {at} of the arena belongs to no output")


class StagePlan(NamedTuple):
    """A plan with the memory of its runs. ``output``: the name of the graph's output that stages
    compute.
    """

    n_steps: int
    plan: Plan
    output: str
    arena: StageMemory
    inputs: HostMemory


class Pipeline(Device):
    """A device that runs plans through ``chain``."""

    def __init__(self, isa: Isa, n_threads: int, chain: StageChain) -> None:
        self.isa = isa
        self.n_threads = n_threads
        self.chain = chain
        self.kernels, self._table = CompileStats(), tuned_row(isa).table
        self._outputs = StageOutputs(chain)
        self._cells: list[Cells] = []
        self._copies: list[CellCopy] = []

    @property
    def variant(self) -> str:
        return f"{isa_key(self.isa)}\0{source_hash()}\0{self._table}"

    def memory(self, n_bytes: int, *, host: bool = False) -> Any:
        return HostMemory(n_bytes) if host else StageMemory(n_bytes)

    def weights(self, name: str, array: np.ndarray) -> Const:
        return Const(name, StageMemory(0), array)

    def _copy(self, memory: Any, to: int, start: int, n_bytes: int) -> None:
        """Record a copy of a page or state, ``n_bytes`` long, which the stages make before the next
        run.
        """
        if n_bytes:
            which = [cells.const.memory for cells in self._cells].index(memory)
            self._copies.append(CellCopy(which, start // n_bytes, to // n_bytes))

    def _plan(self, request: PlanRequest) -> Plan:
        """Build the whole model's plan; its arena contains only the outputs."""
        self._cells = [*request.cache.pools, *request.cache.states]
        plan = request.build(self.isa, self.n_threads, self._table)
        plan.offsets = {}
        plan.arena_bytes = 0
        for buffer in plan.outputs.values():
            plan.offsets[buffer] = plan.arena_bytes
            plan.arena_bytes += buffer.n_bytes
        return plan

    def ready(self, plan: Plan, arena: Any, inputs: Any) -> StagePlan:
        arena.arena = self._outputs
        names = [name for name in plan.outputs if name not in ("top", "pooled")]
        return StagePlan(len(plan.steps), plan, names[0], arena, inputs)

    def _run(self, program: Any, steps: range, times: list[float] | None, stoppable: bool) -> bool:
        """Run the plan; a run cannot be interrupted, so signals wait for its end."""
        if len(steps) < program.n_steps or times is not None:
            raise UnsupportedError(
                "running or timing single steps is not supported with pipeline stages"
            )
        _, plan, output, _, inputs = program
        assert inputs.bytes is not None
        copies = tuple(self._copies)
        self._copies = []
        batch = Batch(plan.n_tokens, plan.n_outputs, output, inputs.bytes.tobytes(), copies)
        self._outputs.set(plan, self.chain.run(batch))
        return True

    def restart(self) -> None:
        """Replace stages that have ended; the KV cache is lost."""
        self._copies = []
        self.chain.restart()

    def close(self) -> None:
        self.chain.close()
