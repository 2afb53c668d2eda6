"""Steps whose number of items an earlier step of the same run has written."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, ClassVar

import numpy as np
import pytest

from tests.kernels import rows
from treadle.devices.cpu.device import Cpu
from treadle.jit.types import i32, i64, ptr
from treadle.kernels.run_state import RUN_STATE
from treadle.kernels.spec import Args, Frame, Grid, Spec
from treadle.plan.plan import Buffer, Plan, Step

if TYPE_CHECKING:
    from treadle.isa.isa import Isa
    from treadle.jit.builder import Builder

MOST = 600


@dataclass(frozen=True)
class Odd(Spec):
    """``list``: how many of the run's tokens are odd (one value of the line), then which."""

    op: ClassVar[str] = "odd"
    args = Args("list:out")

    def build(self, k: Builder, isa: Isa, frame: Frame) -> None:
        tokens = frame.run("tokens", ptr)
        found = k.var(k.i64(0))
        with (
            k.loop(frame.run("n_tokens")) as n,
            k.if_((k.load(tokens, i32, offset=n * 4) & 1).eq(1)),
        ):
            k.store(frame.list + (found.v + 1) * 8, n)
            found.v = found.v + 1
        k.store(frame.list, found.v)

    def run_ref(self, args: Any, run: Any) -> None:
        found = np.flatnonzero(run["tokens"] & 1)
        args.list[: 1 + len(found)] = [len(found), *found]


@dataclass(frozen=True)
class Mark(Spec):
    """Adds 1 to what is at each place of ``list``; an item is two of them."""

    op: ClassVar[str] = "mark"
    args = Args("list:in marks:const")

    def build(self, k: Builder, isa: Isa, frame: Frame) -> None:
        count = k.load(frame.list, i64, align=8)
        with k.loop(k.min(frame.end * 2, count), start=frame.begin * 2) as n:
            at = frame.marks + k.load(frame.list, i64, offset=(n + 1) * 8, align=8) * 8
            k.store(at, k.load(at, i64, align=8) + 1)

    def run_ref(self, args: Any, run: Any) -> None:
        args.marks[args.list[1 : 1 + args.list[0]]] += 1


@pytest.mark.parametrize("n_threads", [1, 2, 5])
def test_a_step_counts_what_another_step_found(n_threads: int) -> None:
    """Of each run anew: many items, one, and none, where the step is passed over."""
    cpu = Cpu(rows.ALL[-1], n_threads)
    marks = cpu.weights("marks", np.zeros(MOST, np.int64))
    listed = Buffer("list", 1, 8 * (1 + MOST), "i8")
    plan = Plan(MOST, 1)
    plan.emit(Step("odd", Odd(), {"list": listed}, Grid(1)))
    plan.emit(Step("mark", Mark(), {"list": listed, "marks": marks}, Grid(1, "list", 2)))
    plan.place()
    plan.check()
    inputs = cpu.memory(RUN_STATE.itemsize + 4 * MOST, host=True)
    assert inputs.bytes is not None
    state = inputs.bytes[: RUN_STATE.itemsize].view(RUN_STATE)
    tokens = inputs.bytes[RUN_STATE.itemsize :].view(np.int32)
    state["n_tokens"] = MOST
    state["tokens"] = RUN_STATE.itemsize
    ready = cpu.ready(plan, cpu.memory(plan.arena_bytes), inputs)
    rng = np.random.default_rng(7)
    expected = np.zeros(MOST, np.int64)
    for round_ in range(200):
        tokens[:] = rng.integers(0, 9, MOST) * 2
        tokens[rng.permutation(MOST)[: (MOST, 1, 0, 77)[round_ % 4]]] += 1
        cpu.run(ready)
        expected += tokens & 1
        assert np.array_equal(marks.array, expected), round_
        twins = marks.array.copy()
        arena = np.zeros(plan.arena_bytes, np.uint8)
        marks.array[:] -= tokens & 1
        plan.run_reference(arena, {"tokens": tokens})
        assert np.array_equal(marks.array, twins)
    cpu.close()


def test_a_count_that_the_step_does_not_read_is_noticed() -> None:
    listed = Buffer("list", 1, 64, "i8")
    plan = Plan(1, 1, [Step("odd", Odd(), {"list": listed}, Grid(1, "list"))])
    plan.place()
    with pytest.raises(AssertionError, match="odd: list not read"):
        plan.check()
