"""Parts of a step: some of its items, run by themselves."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, ClassVar

import numpy as np
import pytest

from tests.kernels import rows
from treadle.devices.cpu.device import Cpu, CpuProgram
from treadle.jit.types import i64
from treadle.kernels.run_state import RUN_STATE
from treadle.kernels.spec import Args, Frame, Grid, Spec
from treadle.plan.plan import Buffer, Const, Plan, Step

if TYPE_CHECKING:
    from treadle.isa.isa import Isa
    from treadle.jit.builder import Builder

N = 60
PER = 7


@dataclass(frozen=True)
class AddOne(Spec):
    """Adds 1 to an item's place in ``marks``, and to its thread's scratch."""

    op: ClassVar[str] = "add_one"
    args = Args("marks:const list:in?")

    def scratch(self, lanes: int) -> int:
        return 8

    def build(self, k: Builder, isa: Isa, frame: Frame) -> None:
        with k.loop(frame.end, start=frame.begin) as item:
            for at in (frame.marks + item * 8, frame.scratch):
                k.store(at, k.load(at, i64, align=8) + 1)


@dataclass(frozen=True)
class Count(Spec):
    """Writes a number of items."""

    op: ClassVar[str] = "count"
    args = Args("list:out")

    def build(self, k: Builder, isa: Isa, frame: Frame) -> None:
        k.store(frame.list, k.i64(5))


def prepared(cpu: Cpu, n_tokens: int) -> tuple[CpuProgram, Const, Any]:
    """A plan: 60 items in groups of 4, an item for 7 tokens, and 5 items that a step counts; the
    marks; the run's state.
    """
    marks = cpu.weights("marks", np.zeros(N, np.int64))
    listed = Buffer("list", 1, 64, "i8")
    plan = Plan(N, 1)
    plan.emit(Step("fixed", AddOne(), {"marks": marks}, Grid(N, whole=4)))
    plan.emit(Step("tokens", AddOne(), {"marks": marks}, Grid(2, "n_tokens", PER)))
    plan.emit(Step("count", Count(), {"list": listed}, Grid(1)))
    plan.emit(Step("counted", AddOne(), {"marks": marks, "list": listed}, Grid(1, "list")))
    plan.place()
    inputs = cpu.memory(RUN_STATE.itemsize, host=True)
    assert inputs.bytes is not None
    state = inputs.bytes.view(RUN_STATE)
    state["n_tokens"] = n_tokens
    return cpu.ready(plan, cpu.memory(plan.arena_bytes), inputs), marks, state


@pytest.mark.parametrize("n_threads", [1, 3])
def test_every_item_is_run_once(n_threads: int) -> None:
    cpu = Cpu(rows.ALL[-1], n_threads)
    ready, marks, _ = prepared(cpu, 20)
    rng = np.random.default_rng(5)
    for turn in range(1, 100):
        item = 0
        while item < N:
            stop = min(N, item + int(rng.integers(1, 20)))
            after = cpu.run_items(ready, 0, range(item, stop))
            assert after == min(N, -(-stop // 4) * 4)  # whole groups
            item = after
            assert (marks.array[:item] == turn).all()
            assert (marks.array[item:] == turn - 1).all()
    cpu.close()


def test_items_by_the_run_s_tokens() -> None:
    """Their number is the next run's."""
    cpu = Cpu(rows.ALL[-1], 2)
    ready, marks, state = prepared(cpu, 20)
    assert [cpu.n_items(ready, step) for step in range(4)] == [N, 6, 1, 1]
    assert cpu.run_items(ready, 1, range(1, 3)) == 3
    assert marks.array[:6].tolist() == [0, 1, 1, 0, 0, 0]
    state["n_tokens"] = 8
    assert cpu.n_items(ready, 1) == 4
    with pytest.raises(AssertionError):
        cpu.run_items(ready, 1, range(3, 6))
    cpu.close()


def test_items_that_a_step_counts_are_not_divided() -> None:
    cpu = Cpu(rows.ALL[-1], 2)
    ready, marks, _ = prepared(cpu, 20)
    cpu.run(ready, range(2, 3))
    assert cpu.run_items(ready, 3, range(1)) == 1
    assert marks.array[:6].tolist() == [1, 1, 1, 1, 1, 0]
    cpu.run(ready)  # whole steps after parts
    assert marks.array[:8].tolist() == [4, 4, 4, 4, 4, 2, 1, 1]
    cpu.close()
