"""The team: every item once, every step after the last, for any number of threads; idle for free.

The kernels here are toys, so that what is tested is the loop that runs them.
"""

from __future__ import annotations

import gc
import signal
import threading
import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import ClassVar

import numpy as np
import pytest

from treadle.devices.cpu.memory_layouts import STEP
from treadle.devices.cpu.thread_team import Team, step_times
from treadle.errors import TreadleError
from treadle.isa import choose
from treadle.isa.isa import Isa
from treadle.jit.builder import Builder
from treadle.jit.host import host_features
from treadle.jit.kernel import load_kernels
from treadle.jit.types import i64
from treadle.kernels.run_state import RUN_STATE
from treadle.kernels.spec import Args, Frame, Spec

N = 64  # values of a row
PATIENCE_S = 60  # a machine may be busy; nothing here waits so long that is not broken


@dataclass(frozen=True)
class Relay(Spec):
    """``out[i] += x[n - 1 - i] + 1`` for its items: right only if each runs once, after all of x.

    Each item takes ``work`` turns of a loop, and is counted in its thread's scratch.
    """

    op: ClassVar[str] = "test_relay"
    args = Args("x:in out:inout n")
    work: int

    def build(self, k: Builder, isa: Isa, frame: Frame) -> None:
        x = frame.x
        out = frame.out
        n = frame.n
        with k.loop(frame.end, start=frame.begin) as i:
            with k.loop(self.work):
                isa.pause(k)
            k.store(frame.scratch, k.load(frame.scratch, i64) + 1)
            value = k.load(x, i64, offset=(n - 1 - i) * 8) + k.load(out, i64, offset=i * 8) + 1
            k.store(out, value, offset=i * 8)


@dataclass(frozen=True)
class Held(Spec):
    """Each of its items is done once ``word`` is not 0, and is counted in its thread's scratch."""

    op: ClassVar[str] = "test_held"
    args = Args("word:in")

    def build(self, k: Builder, isa: Isa, frame: Frame) -> None:
        with k.loop(frame.end, start=frame.begin):
            k.store(frame.scratch, k.load(frame.scratch, i64) + 1)
            again = k.label("again")
            done = k.label("done")
            k.goto(again)
            k.at(again)
            isa.pause(k)
            k.branch(k.atomic_load(frame.word, i64).eq(0), again, done)
            k.at(done)


class Chain:
    """Steps that hand a row on: after one run, row s holds s everywhere."""

    def __init__(self, isa: Isa, sizes: list[int], work: int = 0) -> None:
        """``sizes``: items of each step; one without any (0) leaves its row alone."""
        address = load_kernels([Relay(work)], isa)[Relay(work).name]
        self.rows = np.zeros((len(sizes) + 1, N), np.int64)
        self.args = np.zeros((len(sizes), 3), np.int64)
        self.steps = np.zeros(len(sizes), STEP)
        self.state = np.zeros(1, RUN_STATE)
        self.state["n_tokens"] = 0
        none = int(self.state["n_tokens"].ctypes.data)
        self.expected = [0]
        source = 0
        for s, n_items in enumerate(sizes):
            out = s + 1
            x, y = (self.rows[r].ctypes.data for r in (source, out))
            self.args[s] = Relay.args.in_order({"x": x, "out": y, "n": N})
            # No items: n_tokens is 0, so 5 * ceil(0 / 3) of them.
            count = (n_items, 0, 1) if n_items else (5, none, 3)
            self.steps[s] = (address, self.args[s].ctypes.data, *count, 1)
            self.expected.append(self.expected[source] + 1 if n_items else 0)
            source = out if n_items else source

    def run(self, team: Team, times: int = 0) -> None:
        self.rows[:] = 0
        team.run(self.steps.ctypes.data, len(self.steps), self.state.ctypes.data, times)

    def check(self) -> None:
        assert (self.rows == np.array(self.expected)[:, None]).all()


@pytest.fixture(scope="module")
def isa() -> Isa:
    return choose(host_features())


SIZES = [N, N, N, N, N, 0, N, 0, 0, N]


@pytest.mark.parametrize("work", [0, 40])
@pytest.mark.parametrize("n_threads", [1, 2, 3, 5, 8])
def test_every_item_runs_once_and_every_step_in_its_turn(
    n_threads: int, work: int, isa: Isa
) -> None:
    team, chain = Team(n_threads, isa, 64), Chain(isa, SIZES * 3, work)
    n_runs = 0
    end = time.monotonic() + PATIENCE_S

    def counts() -> list[int]:
        return [int(scratch.bytes[:8].view(np.int64)[0]) for scratch in team._scratch]

    def shared() -> bool:
        """A busy machine may not let a worker begin for a while."""
        return not work or n_threads == 1 or sum(count > 0 for count in counts()) > 1

    while n_runs < 40 or not shared():
        assert time.monotonic() < end, "the caller did it all alone"
        chain.run(team)
        chain.check()
        n_runs += 1
    assert sum(counts()) == n_runs * 3 * sum(SIZES)
    team.close()


@dataclass(frozen=True)
class Begins(Spec):
    """Marks where a claim begins."""

    op: ClassVar[str] = "test_begins"
    args = Args("out:inout")

    def build(self, k: Builder, isa: Isa, frame: Frame) -> None:
        k.store(frame.out, k.i64(1), offset=frame.begin * 8)


@pytest.mark.parametrize("whole", [1, 3, 8, 100])
def test_items_that_share_cache_lines_are_not_parted(whole: int, isa: Isa) -> None:
    team = Team(3, isa, 64)
    marks = np.zeros(N, np.int64)
    state = np.zeros(1, RUN_STATE)
    kernel = load_kernels([Begins()], isa)[Begins().name]
    args = np.array(Begins.args.in_order({"out": marks.ctypes.data}), np.int64)
    steps = np.zeros(40, STEP)
    steps[:] = (kernel, args.ctypes.data, N, 0, 1, whole)
    team.run(steps.ctypes.data, len(steps), state.ctypes.data)
    begins = np.flatnonzero(marks)
    assert not (begins % whole).any()
    assert len(begins) > 3 or whole > 8
    team.close()


def test_runs_that_change_in_length(isa: Isa) -> None:
    """A worker must never take a new run's table for the old one's, nor the other way round."""
    team = Team(3, isa, 64)
    chains = [Chain(isa, SIZES[:n], 5) for n in (1, 9, 2, 5, 10)]
    for i in range(200):
        chain = chains[i % 5]
        chain.run(team)
        chain.check()
    team.close()


def test_nothing_to_do_at_all(isa: Isa) -> None:
    team = Team(3, isa, 64)
    chain = Chain(isa, [0] * 4)
    for _ in range(20):
        chain.run(team)
        team.run(0, 0, 0)
    chain.check()
    team.close()


def test_times_of_each_step(isa: Isa) -> None:
    team = Team(2, isa, 64)
    chain = Chain(isa, SIZES)
    for _ in range(20):
        times = np.zeros((len(SIZES) + 1, 2), np.int64)
        before = time.clock_gettime(time.CLOCK_MONOTONIC)
        chain.run(team, times.ctypes.data)
        after = time.clock_gettime(time.CLOCK_MONOTONIC)
        steps = step_times(times)
        assert steps.shape == (len(SIZES),)
        assert (steps >= 0).all()
        assert before <= times[0] @ [1, 1e-9] <= times[-1] @ [1, 1e-9] <= after
    team.close()


@pytest.mark.parametrize("n_threads", [1, 3])
def test_an_alarm_ends_a_run_at_once(n_threads: int, isa: Isa) -> None:
    """Rung from another thread when a kernel is at work, and waits for it: what was claimed by then
    is done, of the first of 30 steps, and no more; and the team is as it was.
    """
    team, alarm, state = Team(n_threads, isa, 64), np.zeros(1, np.int64), np.zeros(1, RUN_STATE)
    kernel = load_kernels([Held()], isa)[Held().name]
    args = np.array(Held.args.in_order({"word": alarm.ctypes.data}), np.int64)
    steps = np.zeros(30, STEP)
    steps[:] = (kernel, args.ctypes.data, N, 0, 1, 1)
    counts = [scratch.bytes[:8].view(np.int64) for scratch in team._scratch]

    def ring() -> None:
        while not any(count[0] for count in counts):
            time.sleep(0.001)
        alarm[0] = signal.SIGINT

    ringer = threading.Thread(target=ring)
    ringer.start()
    team.run(steps.ctypes.data, len(steps), state.ctypes.data, 0, alarm.ctypes.data)
    ringer.join()
    assert 0 < sum(int(count[0]) for count in counts) <= N
    again = Chain(isa, SIZES)
    again.run(team)
    again.check()
    team.close()


@pytest.mark.parametrize("left", [-1, -(2**62), 2**24, 2**40 + 7, 2**63 - 1])
def test_an_alarm_ends_a_run_whose_items_were_not_counted(left: int, isa: Isa) -> None:
    """What counts them is an earlier step, which is not done: something else is left there."""
    team = Team(3, isa, 64)
    alarm = np.ones(1, np.int64)
    state = np.zeros(1, RUN_STATE)
    kernel = load_kernels([Held()], isa)[Held().name]
    args = np.array(Held.args.in_order({"word": alarm.ctypes.data}), np.int64)
    count = np.array([left])
    steps = np.zeros(4, STEP)
    steps[:] = [
        (kernel, args.ctypes.data, base, count.ctypes.data, per, whole)
        for base, per, whole in ((1, 1, 1), (1, 1, 8), (5, 3, 1), (1, 4, 1))
    ]
    given = (steps.ctypes.data, len(steps), state.ctypes.data, 0, alarm.ctypes.data)
    run = threading.Thread(target=team.run, args=given, daemon=True)
    run.start()
    run.join(PATIENCE_S)
    assert not run.is_alive()
    again = Chain(isa, SIZES)
    again.run(team)
    again.check()
    team.close()


@pytest.fixture
def workers() -> Callable[[], int]:
    """How many there are that were not there before: teams of other tests may come to their end
    meanwhile.
    """
    before = set(threading.enumerate())

    def count() -> int:
        new = set(threading.enumerate()) - before
        return sum(thread.name.startswith("treadle-") for thread in new)

    return count


def test_an_idle_team_uses_no_processor(isa: Isa) -> None:
    team = Team(4, isa, 64)
    chain = Chain(isa, SIZES)
    chain.run(team)
    end = time.monotonic() + PATIENCE_S
    spent = 1.0
    while spent > 0.1:  # one spinning thread would use 0.5 s, each time
        assert time.monotonic() < end
        before = time.process_time()
        time.sleep(0.5)
        spent = time.process_time() - before
    chain.run(team)  # and it wakes up
    chain.check()
    team.close()


def test_close_sends_the_workers_home_and_a_run_brings_new_ones(
    isa: Isa, workers: Callable[[], int]
) -> None:
    team = Team(4, isa, 64)
    chain = Chain(isa, SIZES)
    assert workers() == 0  # none before the first run
    chain.run(team)
    assert workers() == 3
    team.close()
    assert workers() == 0
    team.close()
    chain.run(team)
    chain.check()
    assert workers() == 3
    team.close()


def test_a_system_that_starts_no_more_threads(isa: Isa, monkeypatch: pytest.MonkeyPatch) -> None:
    """As in a container with few processes: an error, and none of the workers stays."""
    team = Team(4, isa, 64)
    chain = Chain(isa, SIZES)
    start = threading.Thread.start

    def refused(thread: threading.Thread) -> None:
        if thread.name == "treadle-3":
            raise RuntimeError("can't start new thread")
        start(thread)

    with monkeypatch.context() as patch:
        patch.setattr(threading.Thread, "start", refused)
        with pytest.raises(TreadleError, match="threads=4: only 3 threads could be started"):
            chain.run(team)
    assert not team._shared.workers
    chain.run(team)
    team.close()


@pytest.mark.slow
def test_a_team_that_is_forgotten_sends_its_workers_home(
    isa: Isa, workers: Callable[[], int]
) -> None:
    team = Team(3, isa, 64)
    chain = Chain(isa, SIZES)
    chain.run(team)
    assert workers() == 2
    del team
    gc.collect()
    assert workers() == 0


def test_callers_take_turns(isa: Isa) -> None:
    team = Team(3, isa, 64)
    chains = [Chain(isa, SIZES, 5) for _ in range(4)]
    wrong: list[BaseException] = []

    def call(chain: Chain) -> None:
        try:
            for _ in range(25):
                chain.run(team)
                chain.check()
        except BaseException as error:
            wrong.append(error)

    callers = [threading.Thread(target=call, args=(chain,)) for chain in chains]
    for caller in callers:
        caller.start()
    for caller in callers:
        caller.join()
    assert not wrong
    team.close()
