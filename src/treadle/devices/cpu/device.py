"""The CPU device: a team of threads runs a table of steps in this process's memory."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, ClassVar

import numpy as np

from treadle.devices.cpu.abort_flag import AbortFlag
from treadle.devices.cpu.step_loop import STEP, StepLoop
from treadle.devices.cpu.thread_team import HostMemory, Team, step_times
from treadle.devices.cpu.tuned_rows import tuned_row
from treadle.devices.protocol import Device, PlanRequest
from treadle.jit.cache import source_hash
from treadle.jit.kernel import CompileStats, Progress, compile_ahead, isa_key, load_kernels
from treadle.kernels.spec import run_offset
from treadle.plan.plan import Buffer, Const, Plan

if TYPE_CHECKING:
    from treadle.devices.cpu.item_range import ItemRangeStep
    from treadle.devices.protocol import DeviceProgram
    from treadle.files.gguf import GGUF
    from treadle.isa.isa import Isa


class CpuProgram:
    """A plan prepared for the compiled loop: a STEP record for each step, and their arguments."""

    def __init__(
        self, plan: Plan, kernels: dict[str, int], arena: HostMemory, inputs: HostMemory
    ) -> None:
        def place(arg: Any) -> int:
            if type(arg) is Buffer:
                return arena.address + plan.offsets[arg]
            memory: Any = arg.memory if type(arg) is Const else None
            return memory.address if memory else arg or 0

        rows = [[place(arg) for arg in step.spec.args.in_order(step.args)] for step in plan.steps]
        self._args = np.array([arg for row in rows for arg in row] or [0], np.int64)
        self.n_steps = len(rows)
        self.records = np.zeros(self.n_steps, STEP)
        self._memory = arena, inputs
        self.job = int(self.records.ctypes.data), len(rows), inputs.address
        at = int(self._args.ctypes.data)
        address_of = {spec: kernels[spec.name] for spec in plan.specs()}
        for i, (step, row) in enumerate(zip(plan.steps, rows, strict=True)):
            grid = step.grid
            count = 0
            if isinstance(counted := step.args.get(grid.count), Buffer):
                count = place(counted)
            elif grid.count != "one":
                count = inputs.address + run_offset(grid.count)
            self.records[i] = (
                address_of[step.spec],
                at,
                grid.base,
                count,
                grid.per,
                grid.whole,
            )
            at += 8 * len(row)
        self.part: ItemRangeStep | None = None

    def n_items(self, step: int) -> int:
        """Return the items of a step in the next run; 1 if another step counts them."""
        _, _, base, count, per, _ = self.records[step].tolist()
        if not count:
            return int(base)
        inputs = self._memory[1]
        offset = count - inputs.address
        if not 0 <= offset < inputs.n_bytes:
            return 1
        n = int(inputs.bytes[offset : offset + 8].view(np.int64)[0])
        return int(base) * -(-n // int(per))


class Cpu(Device):
    """A team of ``n_threads`` threads, including the caller's.

    ``progress``: see ``load_kernels``.
    """

    takes_media: ClassVar[bool] = True

    def __init__(self, isa: Isa, n_threads: int, progress: Progress | None = None) -> None:
        self.isa = isa
        self.n_threads = n_threads
        self._progress = progress
        self.table, self.kernels = tuned_row(isa).table, CompileStats()
        self._team: Team | None = None
        self._scarce: bool | None = None
        # Kept until the team is gone: a late thread may read the step table of a finished run, and
        # the counts that it points to, before it discards them.
        self._programs: list[CpuProgram] = []

    @property
    def variant(self) -> str:
        return f"{isa_key(self.isa)}\0{source_hash()}\0{self.table}"

    def memory(self, n_bytes: int, *, host: bool = False) -> HostMemory:
        return HostMemory(n_bytes)

    def weights(self, name: str, array: np.ndarray) -> Const:
        return Const(name, HostMemory.of(array), array)

    def _copy(self, memory: Any, to: int, start: int, n_bytes: int) -> None:
        memory.write(to, memory.read(start, n_bytes))

    def _plan(self, request: PlanRequest) -> Plan:
        has_experts = any(at.experts for at in request.config.layers)
        scarce = has_experts and self._is_scarce(request.weights.gguf)
        return request.build(self.isa, self.n_threads, self.table, scarce=scarce)

    def _is_scarce(self, gguf: GGUF) -> bool:
        """Return whether memory is too small for the whole file; computed once."""
        if self._scarce is None:
            from treadle.devices.cpu.residence import shortage

            self._scarce = shortage(gguf.paths) is not None
        return self._scarce

    def compile_ahead(self, plan: Plan, *, later: bool = False) -> bool:
        return compile_ahead([*plan.specs(), StepLoop()], self.isa, later=later)

    def ready(self, plan: Plan, arena: Any, inputs: Any) -> CpuProgram:
        specs = [*plan.specs(), StepLoop()]  # the team's own
        kernels = load_kernels(specs, self.isa, self._progress, self.kernels)
        scratch = plan.scratch(self.isa.lanes)
        if self._team is None or self._team.scratch < scratch:
            self.close()
            self._team = Team(self.n_threads, self.isa, scratch)
        program = CpuProgram(plan, kernels, arena, inputs)
        self._programs.append(program)
        return program

    def _run(self, program: Any, steps: range, times: list[float] | None, stoppable: bool) -> bool:
        assert self._team is not None
        at, n, inputs = program.job
        if steps.start or len(steps) < n:
            at = at + steps.start * STEP.itemsize
            n = len(steps)
        stamps = None
        stamped = 0
        rung = False
        if times is not None:
            stamps = np.zeros((n + 1, 2), np.int64)
            stamped = int(stamps.ctypes.data)
        if stoppable:
            with AbortFlag() as alarm:
                self._team.run(at, n, inputs, stamped, alarm.address)
                rung = alarm.rung
        else:
            self._team.run(at, n, inputs, stamped)
        if times is not None and stamps is not None and not rung:
            times += step_times(stamps).tolist()
        return not rung

    def n_items(self, program: DeviceProgram, step: int) -> int:
        assert isinstance(program, CpuProgram)
        return program.n_items(step)

    def _run_items(self, program: CpuProgram, step: int, items: range) -> int:
        assert self._team is not None
        record = program.records[step]
        n_items = program.n_items(step)
        if n_items == 1:  # or as many as another step counts
            return super()._run_items(program, step, items)
        whole = max(1, int(record["whole"]))
        assert items.start % whole == 0, (items, whole)
        stop = min(-(-items.stop // whole) * whole, n_items)
        if program.part is None:
            from treadle.devices.cpu.item_range import ItemRangeStep
            from treadle.kernels.item_range import ItemRange

            spec = ItemRange()
            kernel = load_kernels([spec], self.isa, tally=self.kernels)[spec.name]
            program.part = ItemRangeStep(kernel)
        program.part.set(record, range(items.start, stop))
        self._team.run(program.part.address, 1, program.job[2])
        return stop

    def close(self) -> None:
        if self._team is not None:
            self._team.close()
            self._team = None
        self._programs.clear()
