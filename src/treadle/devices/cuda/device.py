"""The CUDA device: weights are uploaded once, and a plan is one graph of launches.

A plan is the CPU's lowering for the GPU's instruction set, with the kernels of
``devices/cuda/kernel_table.py``. A run uploads its inputs from pinned memory and starts the graph.
No size and no address in the graph changes: a kernel reads its number of items as it begins
(``devices/cuda/launch_args.py``).
"""

from __future__ import annotations

import weakref
from typing import TYPE_CHECKING, Any

import numpy as np

from treadle.base.humanize import n_bytes as in_words
from treadle.devices.cuda.driver import Launch, Upload
from treadle.devices.cuda.facts import copy_rate
from treadle.devices.cuda.kernel_table import swap
from treadle.devices.cuda.launch_args import (
    PerBlock,
    dynamic_shared_bytes,
    gpu_source_hash,
    scratch_bytes,
    threads_of,
)
from treadle.devices.protocol import Device, PlanRequest
from treadle.errors import NoMemoryError
from treadle.jit.kernel import CompileStats, isa_key
from treadle.kernels.run_state import run_offset
from treadle.plan.plan import Buffer, Const, DeviceMemory, Plan, Step, input_of_count

if TYPE_CHECKING:
    from treadle.devices.cuda.driver import Driver
    from treadle.files.gguf import GGUF
    from treadle.jit.kernel import Progress

CHUNK = 64 << 20  # bytes of weights between two updates of the progress bar
BLOCKS = 16  # of a launch for each multiprocessor, at most; the hardware schedules them
THREADS = 2048  # of a multiprocessor: steps are split into items for so many
SCRATCH = 256 << 20  # bytes of all threads' scratch: the more each needs, the fewer threads run
UNKNOWN = 1 << 20  # items assumed for a step whose number an earlier step computes


class CudaMemory(DeviceMemory):
    """GPU memory, freed when it is garbage collected.

    ``bytes``: pinned host memory of the same size for a run's inputs, if ``host``; else None.
    """

    def __init__(self, driver: Driver, n_bytes: int, *, host: bool = False) -> None:
        self._driver = driver
        self.n_bytes = n_bytes
        self.address = driver.alloc(n_bytes)
        weakref.finalize(self, driver.free, self.address)
        self.bytes = driver.pinned(n_bytes) if host else None
        if self.bytes is not None:
            weakref.finalize(self, driver.unpin, self.bytes)

    def _read(self, at: int, n_bytes: int) -> np.ndarray:
        return self._driver.read(self.address + at, n_bytes)

    def _write(self, at: int, data: np.ndarray) -> None:
        self._driver.write(self.address + at, data)


class CudaProgram:
    """A plan as launches of kernels, with the memory that they refer to."""

    def __init__(self, device: Cuda, plan: Plan, arena: Any, inputs: CudaMemory) -> None:
        assert inputs.bytes is not None
        self._driver = device.driver
        self.upload = Upload(inputs.address, inputs.bytes)
        kernels = device.load(plan)
        rows = [
            [self._place(plan, arena, arg) for arg in step.spec.args.in_order(step.args)]
            for step in plan.steps
        ]
        table = np.array([arg for row in rows for arg in row] or [0], np.int64).view(np.uint8)
        args = CudaMemory(self._driver, table.nbytes)
        args.write(0, table)
        sizes = [device.size(plan, step) for step in plan.steps]
        own = [
            n * threads_of(step.spec) * scratch_bytes(step.spec, device.isa)
            for n, step in zip(sizes, plan.steps, strict=True)
        ]
        scratch = device.scratch(max(own, default=0))
        self.launches: list[Launch] = []
        at = args.address
        for step, row, blocks in zip(plan.steps, rows, sizes, strict=True):
            grid = step.grid
            count = 0
            if isinstance(given := step.args.get(grid.count), Buffer):
                count = self._place(plan, arena, given)
            elif grid.count != "one":
                count = inputs.address + run_offset(grid.count)
            size = blocks, threads_of(step.spec), dynamic_shared_bytes(step.spec)
            where = at, inputs.address, count, grid.base, grid.per, scratch.address
            self.launches.append(Launch(kernels[step.spec.name], *size, *where))
            at += 8 * len(row)
        self.n_steps = len(self.launches)
        self._memory = arena, inputs, args, scratch  # alive while launches hold their addresses
        self._graphs: dict[range, Any] = {}

    @staticmethod
    def _place(plan: Plan, arena: Any, arg: Any) -> int:
        if type(arg) is Buffer:
            return int(arena.address) + plan.offsets[arg]
        memory: Any = arg.memory if type(arg) is Const else None
        return int(memory.address if memory else arg or 0)

    def graph(self, steps: range) -> Any:
        """Return the driver's graph of the launches of ``steps``, recorded on first use."""
        if steps not in self._graphs:
            launches = self.launches[steps.start : steps.stop]
            made = self._graphs[steps] = self._driver.graph(self.upload, launches)
            weakref.finalize(self, self._driver.drop, made)
        return self._graphs[steps]


class Cuda(Device):
    """The GPU behind ``driver`` as a device.

    ``n_threads``: host threads for work outside runs. ``progress``: called while weights are
    uploaded and kernels compiled.
    """

    def __init__(
        self, driver: Driver, n_threads: int = 1, progress: Progress | None = None
    ) -> None:
        self.driver = driver
        self.isa = driver.isa
        self.n_threads = n_threads
        self.kernels = CompileStats()
        self._progress = progress
        self._loaded: dict[str, Any] = {}
        self._scratch: CudaMemory | None = None
        self._uploaded = self._n_weights = 0  # bytes uploaded, and in total
        weakref.finalize(self, driver.close)

    @property
    def name(self) -> str:
        """The GPU's name as its maker gives it."""
        return self.driver.facts.name

    @property
    def variant(self) -> str:
        return f"{isa_key(self.isa)}\0{gpu_source_hash()}\0{self.name}"

    # -- memory -----------------------------------------------------------------------------------

    def memory(self, n_bytes: int, *, host: bool = False) -> CudaMemory:
        result = CudaMemory(self.driver, n_bytes, host=host)
        self.driver.clear(result.address, n_bytes)
        return result

    def weights(self, name: str, array: np.ndarray) -> Const:
        """Upload a tensor to the GPU, in chunks, so that a mapped file is never read all at once;
        return it as a constant.
        """
        flat = np.ascontiguousarray(array).reshape(-1).view(np.uint8)
        memory = CudaMemory(self.driver, flat.nbytes)
        for at in range(0, flat.nbytes, CHUNK):
            memory.write(at, flat[at : at + CHUNK])
            self._uploaded += min(CHUNK, flat.nbytes - at)
            if self._progress and self._uploaded < self._n_weights:
                self._progress("upload", self._uploaded, self._n_weights)
        return Const(name, memory, array)

    def _copy(self, memory: Any, to: int, start: int, n_bytes: int) -> None:
        self.driver.copy(memory.address + to, memory.address + start, n_bytes)

    def scratch(self, n_bytes: int) -> CudaMemory:
        """Return scratch memory of at least ``n_bytes``; plans run one after another and share
        it.
        """
        if self._scratch is None or self._scratch.n_bytes < n_bytes:
            self._scratch = CudaMemory(self.driver, n_bytes)
        return self._scratch

    # -- plans ------------------------------------------------------------------------------------

    def _plan(self, request: PlanRequest) -> Plan:
        self._check_room(request.weights.gguf)
        try:
            plan = request.build(self.isa, THREADS * self.driver.facts.n_units)
        finally:
            if self._progress:
                self._progress("upload", self._n_weights, self._n_weights)
        swap(plan, self.isa)
        return plan

    def _check_room(self, gguf: GGUF) -> None:
        """Raise NoMemoryError if the model's weights do not fit into the GPU's free memory; called
        before the first one is uploaded.
        """
        if self._n_weights:
            return
        n_bytes = sum(tensor.n_bytes for tensor in gguf.tensors.values())
        free, total = self.driver.memory_info()
        if n_bytes > free:
            raise NoMemoryError(
                f"{gguf.path.name}: out of GPU memory: its weights take {in_words(n_bytes)}, and "
                f"{self.name} has {in_words(free)} free of {in_words(total)}; use a smaller format "
                "or model, or close other programs on the GPU"
            )
        self._n_weights = n_bytes

    def load(self, plan: Plan) -> dict[str, Any]:
        """Load the plan's kernels that are missing; return the handles of all loaded kernels by
        name.
        """
        specs = {spec.name: spec for spec in plan.specs()}
        for done, (name, spec) in enumerate(specs.items()):
            if name not in self._loaded:
                if self._progress:
                    self._progress("compile", done, len(specs))
                self._loaded[name] = self.driver.load(spec, self.driver.code(spec, self.kernels))
        if self._progress:
            self._progress("compile", len(specs), len(specs))
        return self._loaded

    def size(self, plan: Plan, step: Step) -> int:
        """Return the number of blocks that a step is launched with: enough for its largest number
        of items, within the GPU's limits.
        """
        grid = step.grid
        spec = step.spec
        given = plan.inputs.get(input_of_count(grid.count))
        most = 1 if grid.count == "one" else given.shape[0] if given else UNKNOWN
        items = grid.base * -(-most // grid.per)
        threads = threads_of(spec)
        own = scratch_bytes(spec, self.isa)
        blocks = items if isinstance(spec, PerBlock) else -(-items // threads)
        if own:
            blocks = min(blocks, SCRATCH // (own * threads))
        return max(1, min(blocks, BLOCKS * self.driver.facts.n_units))

    def ready(self, plan: Plan, arena: Any, inputs: Any) -> CudaProgram:
        return CudaProgram(self, plan, arena, inputs)

    def _run(self, program: Any, steps: range, times: list[float] | None, stoppable: bool) -> bool:
        """Implement ``Device.run``. A run that was started cannot be stopped: the result is always
        True.
        """
        if times is None:
            self.driver.start(program.graph(steps))
        else:
            times += self.driver.timed(program.upload, program.launches[steps.start : steps.stop])
        return True

    def peak_rates(self) -> dict[str, float]:
        """Measure the GPU's peak rate of memory accesses, ``bytes_s``; operations are not
        measured.
        """
        return {"bytes_s": copy_rate(self.driver)}

    def close(self) -> None:
        self._loaded.clear()
        self._scratch = None
        self.driver.close()
