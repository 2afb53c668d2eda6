"""A device whose kernels run in a guest: whole models on a row of another machine, in seconds.

Plans are those of the row. Python, the engine and the cache stay here; memory lies where both sides
see it. ``n_threads`` threads are played one after the other, the last items first: which thread
takes which item must change nothing.
"""

from __future__ import annotations

import time
from typing import Any, NamedTuple

import numpy as np

from tests.emulated.guest import PAGE
from tests.emulated.rows import Emulated
from treadle.devices.cpu.device import Cpu
from treadle.devices.cpu.thread_team import HostMemory
from treadle.kernels.run_state import run_offset
from treadle.plan.plan import Buffer, Const, Plan


class GuestProgram(NamedTuple):
    """A plan's steps as a guest's kernels, with the memory that they refer to."""

    n_steps: int
    steps: list[Any]
    inputs: HostMemory
    arena: HostMemory
    scratch: HostMemory


class GuestCpu(Cpu):
    """The CPU's device, whose steps are calls of a guest."""

    def __init__(self, row: Emulated, n_threads: int) -> None:
        super().__init__(row.isa, n_threads)
        self.guest = row.guest()

    def memory(self, n_bytes: int, *, host: bool = False) -> HostMemory:
        pages = self.guest.pages(-(-max(n_bytes, 1) // PAGE) * PAGE)
        pages[:] = 0  # an earlier test's
        return HostMemory.wrap(pages[:n_bytes])

    def weights(self, name: str, array: np.ndarray) -> Const:
        memory = self.memory(array.nbytes)
        memory.bytes[:] = array.reshape(-1).view(np.uint8)
        return Const(name, memory, array)

    def ready(self, plan: Plan, arena: Any, inputs: Any) -> Any:
        def place(arg: Any) -> int:
            if isinstance(arg, Buffer):
                return int(arena.address + plan.offsets[arg])
            memory: Any = arg.memory if isinstance(arg, Const) else None
            return memory.address if memory else arg or 0

        scratch = self.memory(plan.scratch(self.isa.lanes) + 64)
        made = []
        for step in plan.steps:
            slots = np.array([place(a) for a in step.spec.args.in_order(step.args)], np.int64)
            args = self.memory(slots.nbytes)
            args.bytes[:] = slots.view(np.uint8)
            counted = step.args.get(step.grid.count)
            count = place(counted) if isinstance(counted, Buffer) else 0
            made.append((step, self.guest.kernel(step.spec, self.isa), args.address, count))
        return GuestProgram(len(made), made, inputs, arena, scratch)

    def n_items(self, program: Any, step: int) -> int:
        of, _, _, count = program.steps[step]
        counted = of.grid.count
        if count:  # a number that an earlier step has written
            at = count - program.arena.address
            counts = {counted: int(program.arena.bytes[at : at + 8].view(np.int64)[0])}
        elif counted != "one":
            at = run_offset(counted)
            counts = {counted: int(program.inputs.bytes[at : at + 8].view(np.int64)[0])}
        else:
            counts = {}
        return int(of.grid.items(counts))

    def kernel_of(self, program: Any, step: int) -> int:
        return id(program.steps[step][1])

    def run_items(self, program: Any, step: int, items: range) -> int:
        _, kernel, args, _ = program.steps[step]
        n = len(items)
        bounds = [items.start + n * i // self.n_threads for i in range(self.n_threads + 1)]
        for i in reversed(range(self.n_threads)):
            if bounds[i] < bounds[i + 1]:
                run = program.inputs.address
                kernel(args, run, bounds[i], bounds[i + 1], program.scratch.address)
        return items.stop

    def _run(self, program: Any, steps: range, times: list[float] | None, stoppable: bool) -> bool:
        for step in range(program.n_steps)[steps.start : steps.stop]:
            began = time.perf_counter()
            self.run_items(program, step, range(self.n_items(program, step)))
            if times is not None:
                times.append(time.perf_counter() - began)
        return True

    def close(self) -> None:
        """Nothing of it runs."""
