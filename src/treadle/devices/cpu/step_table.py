"""A plan's steps as arrays, before addresses are known: the input of the compiled loop.

Each argument word is an offset from a base: 0 (the word is an integer), the arena, the run's
inputs, or one of the plan's constants. The table can be stored, and bound to other memory later.
"""

from __future__ import annotations

from dataclasses import field
from typing import TYPE_CHECKING, Any

import numpy as np

from treadle.base.fast_dataclass import dataclass

if TYPE_CHECKING:
    from treadle.plan.plan import Plan

INTEGER, ARENA, INPUTS, CONSTANTS = range(4)  # bases; CONSTANTS + i: the i-th constant
# Of each step: the index of its kernel and of its first word, then the fields of ``Grid``, the
# count as a base and an offset.
COLUMNS = ("kernel", "word", "base", "count_base", "count_offset", "per", "whole")


@dataclass(eq=False)
class StepTable:
    """The steps of a plan: ``steps`` i64 ``[n_steps, len(COLUMNS)]``, and their arguments, in
    words: ``offsets`` i64 ``[n_words]``, each relative to the base with the number in ``bases`` i32
    ``[n_words]``. ``kernels``: names of the kernels; ``constants``: the memory that outlives the
    plan, such as weights and KV pools; ``scratch``: bytes for each thread.
    """

    kernels: list[str]
    steps: np.ndarray
    offsets: np.ndarray
    bases: np.ndarray
    scratch: int
    constants: list[Any] = field(default_factory=list)


def step_table(plan: Plan, lanes: int) -> StepTable:
    """Return the step table of a plan for an instruction set with vectors of ``lanes`` f32
    values.
    """
    from treadle.kernels.run_state import run_offset
    from treadle.plan.plan import Buffer, Const

    kernels = {spec: i for i, spec in enumerate(plan.specs())}
    constants: list[Any] = []
    index_of: dict[int, int] = {}  # of a constant's memory, by its address

    def place(arg: Any) -> tuple[int, int]:
        if type(arg) is Buffer:
            return ARENA, plan.offsets[arg]
        if type(arg) is not Const:
            return INTEGER, arg or 0
        memory: Any = arg.memory
        if memory.address not in index_of:
            index_of[memory.address] = len(constants)
            constants.append(memory)
        return CONSTANTS + index_of[memory.address], 0

    words: list[tuple[int, int]] = []
    steps = []
    for step in plan.steps:
        grid = step.grid
        count = INTEGER, 0
        if isinstance(counted := step.args.get(grid.count), Buffer):
            count = place(counted)
        elif grid.count != "one":
            count = INPUTS, run_offset(grid.count)
        steps.append((kernels[step.spec], len(words), grid.base, *count, grid.per, grid.whole))
        words += map(place, step.spec.args.in_order(step.args))
    table = np.array(words or [(INTEGER, 0)], np.int64)
    return StepTable(
        [spec.name for spec in kernels],
        np.array(steps, np.int64).reshape(-1, len(COLUMNS)),
        table[:, 1].copy(),
        table[:, 0].astype(np.int32),
        plan.scratch(lanes),
        constants,
    )
