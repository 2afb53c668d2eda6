"""The CPU device: a team of threads runs a table of steps in this process's memory."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial
from typing import TYPE_CHECKING, Any, ClassVar

import numpy as np

from treadle.base.fast_classes import cached_property
from treadle.devices.cpu.chosen_isa import ChosenIsa, row_of
from treadle.devices.cpu.memory_layouts import STEP
from treadle.devices.cpu.stored_plan import (
    StepTable,
    StoredPlan,
    plan_key,
    read_plan,
    step_table,
    write_plan,
)
from treadle.devices.cpu.thread_team import AbortFlag, HostMemory, Team, step_loop, step_times
from treadle.devices.protocol import Device, PlanRequest
from treadle.jit.cache import has_tuned_rows, source_hash
from treadle.jit.kernel import (
    CompileStats,
    Progress,
    compile_ahead,
    isa_key,
    load_cached,
    load_kernels,
)
from treadle.plan.plan import Const, Plan
from treadle.system import SYSTEM

if TYPE_CHECKING:
    from treadle.devices.cpu.item_range import ItemRangeStep
    from treadle.devices.protocol import DeviceProgram
    from treadle.files.gguf import GGUF
    from treadle.isa.isa import Isa
    from treadle.kernels.matmul.select import TunedTable

# A table of which a text reads a few rows: those of its tokens, or of its n-grams. Read-ahead and
# pages of 2 MB around each row would make it resident as a whole.
ROW_TABLE = "per_layer_token_embd.weight"


class CpuProgram:
    """A plan prepared for the compiled loop: a STEP record for each step, and their arguments.

    ``kernels``: the addresses of the compiled kernels, in the order of ``table.kernels``.
    ``arena``, ``inputs``: the memory of the plan's buffers and of the run's inputs. ``job``: the
    address of the records, their number, and the address of the inputs.
    """

    def __init__(
        self, table: StepTable, kernels: Sequence[int], arena: HostMemory, inputs: HostMemory
    ) -> None:
        constants = [memory.address for memory in table.constants]
        address_of = np.array([0, arena.address, inputs.address, *constants], np.int64)
        self._args = table.offsets + address_of[table.bases]
        kernel, word, base, count_base, count_offset, per, whole = table.steps.T
        self.n_steps = len(table.steps)
        self.records = np.zeros(self.n_steps, STEP)
        self.records["kernel"] = np.array(kernels, np.int64)[kernel]
        self.records["args"] = int(self._args.ctypes.data) + 8 * word
        self.records["base"] = base
        self.records["count"] = count_offset + address_of[count_base]
        self.records["per"] = per
        self.records["whole"] = whole
        self._memory = arena, inputs
        self._constants = table.constants
        self.job = int(self.records.ctypes.data), self.n_steps, inputs.address
        self.part: ItemRangeStep | None = None

    def n_items(self, step: int) -> int:
        """Return the number of items of a step in the next run; 1 if the number is not known yet,
        because an earlier step of the run computes it.
        """
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
    """The CPU as a device: a team of ``n_threads`` threads, including the caller's.

    ``progress``: called while kernels are compiled; see ``load_kernels``.
    """

    takes_media: ClassVar[bool] = True

    def __init__(
        self, isa: Isa | ChosenIsa, n_threads: int, progress: Progress | None = None
    ) -> None:
        self._chosen = isa
        self.n_threads = n_threads
        self._progress = progress
        self.kernels = CompileStats()
        self._is_tuned = has_tuned_rows()
        self._team: Team | None = None
        self._scarce: bool | None = None
        # Kept until the team is gone: a late thread may read the step table of a finished run, and
        # the counts that it points to, before it discards them.
        self._programs: list[CpuProgram] = []
        self._to_store: dict[str, Callable[[Plan, StepTable], None]] = {}  # of new plans, by key

    @cached_property
    def isa(self) -> Isa:  # type: ignore[override]
        """The instruction set's row; a start with stored plans does not import it."""
        return row_of(self._chosen)

    def batch_sizes(self, *, floats: bool) -> tuple[int, ...]:
        chosen = self._chosen
        if not isinstance(chosen, ChosenIsa):
            return super().batch_sizes(floats=floats)
        return chosen.sizes_of_floats if floats else chosen.sizes

    @cached_property
    def table(self) -> TunedTable | None:
        """The kernel parameters tuned on this machine; None if nothing was tuned: plans then use
        the shipped parameters.
        """
        if not self._is_tuned:
            return None
        from treadle.devices.cpu.tuned_rows import tuned_row

        return tuned_row(self.isa).table

    @property
    def variant(self) -> str:
        return f"{isa_key(self._chosen)}\0{source_hash()}\0{self.table}"

    def memory(self, n_bytes: int, *, host: bool = False) -> HostMemory:
        return HostMemory(n_bytes)

    def weights(self, name: str, array: np.ndarray) -> Const:
        return Const(name, HostMemory.wrap(array), array)

    def _copy(self, memory: Any, to: int, start: int, n_bytes: int) -> None:
        memory.write(to, memory.read(start, n_bytes))

    def _plan(self, request: PlanRequest) -> Plan:
        if (table := request.weights.gguf.tensors.get(ROW_TABLE)) is not None:
            for array in table.arrays:
                SYSTEM.expect_random(array)
        has_experts = any([at.experts for at in request.config.layers])
        scarce = has_experts and self._is_scarce(request.weights.gguf)
        # A scarce plan is not stored: it has the address of a system call, which another process
        # has elsewhere, and its lowering advises the system about pages.
        key = None if scarce else plan_key(request, self.variant, self.n_threads)

        def lower() -> Plan:
            plan = request.build(self.isa, self.n_threads, self.table, scarce=scarce)
            plan.key = key or ""
            return plan

        if key is None:
            return lower()
        gguf = request.weights.gguf
        stored = read_plan(key, gguf, request.cache, lower)
        if stored is not None:
            return stored
        plan = lower()
        self._to_store[key] = partial(write_plan, gguf=gguf, cache=request.cache)
        return plan

    def _is_scarce(self, gguf: GGUF) -> bool:
        """Return whether available memory is too small for the files of the model; computed
        once.
        """
        if self._scarce is None:
            from treadle.devices.cpu.residence import shortage

            self._scarce = shortage(gguf.paths) is not None
        return self._scarce

    def compile_ahead(self, plan: Plan, *, later: bool = False) -> bool:
        if isinstance(plan, StoredPlan):  # its kernels were there when it was stored
            return False
        from treadle.devices.cpu.step_loop import StepLoop

        return compile_ahead([*plan.specs(), StepLoop()], self.isa, later=later)

    def ready(self, plan: Plan, arena: Any, inputs: Any) -> CpuProgram:
        kernels = None
        if isinstance(plan, StoredPlan):
            table = plan.table
            kernels = load_cached(table.kernels, self._chosen, self.kernels)
        else:
            table = step_table(plan, self.isa.lanes)
        if kernels is None:
            from treadle.devices.cpu.step_loop import StepLoop

            specs = [*plan.specs(), StepLoop()]  # the team's own
            kernels = load_kernels(specs, self.isa, self._progress, self.kernels)
        scratch = table.scratch
        if self._team is None or self._team.scratch < scratch:
            step_loop(self._chosen, self.kernels)  # used by the team, and counted here
            self.close()
            self._team = Team(self.n_threads, self._chosen, scratch)
        program = CpuProgram(table, [kernels[name] for name in table.kernels], arena, inputs)
        self._programs.append(program)
        if (store := self._to_store.pop(plan.key, None)) is not None:
            store(plan, table)
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
                rung = alarm.is_set
        else:
            self._team.run(at, n, inputs, stamped)
        if times is not None and stamps is not None and not rung:
            times += step_times(stamps).tolist()
        return not rung

    def n_items(self, program: DeviceProgram, step: int) -> int:
        assert isinstance(program, CpuProgram)
        return program.n_items(step)

    def kernel_of(self, program: DeviceProgram, step: int) -> int:
        assert isinstance(program, CpuProgram)
        return int(program.records["kernel"][step])

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
