"""The claim word's protocol (``devices/cpu/step_loop.py``) on a machine that orders little: all
that a caller and two workers can do, over two runs; and how a worker falls asleep.

The programs are ``_Loop``'s, one operation on shared memory at a time. The code has every one of
these in sequential consistency. Here it is shown that less will do (release and acquire, but for
who falls asleep), and what will not.
"""

from __future__ import annotations

import re
from typing import Any, NamedTuple

import pytest

from tests.devices.cpu.weak_memory import (
    ORDERED,
    PLAIN,
    TOTAL,
    Add,
    Code,
    End,
    Explorer,
    Load,
    Op,
    Store,
    Swap,
    Use,
    WrongError,
)
from treadle.devices.cpu.memory_layouts import NEXT
from treadle.devices.cpu.step_loop import StepLoop
from treadle.isa import ROWS
from treadle.jit.kernel import trace

Next = tuple[Op, Any]

# -- runs -------------------------------------------------------------------------------------

Items = tuple[tuple[int, ...], ...]  # of each run's steps
# The thread that finishes the second run's first step runs the only item of the next one itself,
# before anyone sees that step; several items are claimed by all.
RUNS: Items = ((1,), (2, 1))
SEVERAL: Items = ((1,), (1, 2))
CLOSED = (-2, 0)  # a claim is (epoch, item)
PLACES: dict[str, Any] = {
    "claim": (0, 0),
    "done": 0,
    "first": 1,  # the job's: the epoch of its first step,
    "n_steps": 0,
    "steps": -1,  # and whose they are
    "in": -1,  # what the caller wrote before the run
    **{f"out {step} {item}": -1 for step in range(2) for item in range(2)},
}


class Here(NamedTuple):
    """A thread's registers."""

    caller: bool
    run: int = 0  # the caller's
    trusts: bool = False  # the job, without a second look at the claim
    runs: Items = RUNS
    word: tuple[int, int] = (0, 0)  # the claim that it has seen
    first: int = 0
    n_steps: int = 0
    steps: int = -1
    epoch: int = -1  # of the step that it works on
    step: int = -1
    total: int = 0

    def idle(self) -> Here:
        return Here(self.caller, self.run, self.trusts, self.runs)


def begin(r: Here) -> Next:
    """The caller, with one more run or none."""
    if r.run == len(r.runs):
        return End(), None
    return Use((), (("in", r.run),)), lambda _: (caller, r)


def caller(r: Here) -> Next:
    return Load("caller", "claim"), lambda word: (close, r._replace(first=word[0] + 1))


def close(r: Here) -> Next:
    return Store("close", "claim", CLOSED), lambda _: (write_first, r)


def write_first(r: Here) -> Next:
    return Store("job", "first", r.first), lambda _: (write_n, r)


def write_n(r: Here) -> Next:
    return Store("job", "n_steps", len(r.runs[r.run])), lambda _: (write_steps, r)


def write_steps(r: Here) -> Next:
    return Store("job", "steps", r.run), lambda _: (open_, r)


def open_(r: Here) -> Next:
    return Store("open", "claim", (r.first, 0)), lambda _: (poll, r.idle())


def poll(r: Here) -> Next:
    def then(word: tuple[int, int]) -> tuple[Code, Here]:
        if word[0] != r.epoch:
            return read_first, r._replace(word=word)
        return (claim, r._replace(word=word)) if word[1] < r.total else (poll, r)

    return Load("poll", "claim"), then


def read_first(r: Here) -> Next:
    return Load("read", "first"), lambda v: (read_n, r._replace(first=v))


def read_n(r: Here) -> Next:
    return Load("read", "n_steps"), lambda v: (read_steps, r._replace(n_steps=v))


def read_steps(r: Here) -> Next:
    return Load("read", "steps"), lambda v: (enter if r.trusts else look, r._replace(steps=v))


def look(r: Here) -> Next:
    """Again: has the claim changed?"""
    same = r.word[0]
    return Load("look", "claim"), lambda word: (enter, r) if word[0] == same else (poll, r.idle())


def enter(r: Here) -> Next:
    step = r.word[0] - r.first
    if not 0 <= step < r.n_steps:
        return Use((), ()), lambda _: (leave if r.caller else poll, r.idle())
    if step >= len(r.runs[r.steps]):
        raise WrongError(f"the record of step {step} of run {r.steps} is read")
    here = r.idle()._replace(epoch=r.word[0], n_steps=r.n_steps, steps=r.steps, step=step)
    here = here._replace(total=r.runs[r.steps][step])
    return Use((), ()), lambda _: (poll, here)


def claim(r: Here) -> Next:
    taken = (r.word[0], r.word[1] + 1)
    return Swap("claim", "claim", r.word, taken), lambda took: (execute if took else poll, r)


def item_of(r: Here, item: int) -> Use:
    """The kernel: an item reads all of the step before, or what the caller wrote."""
    reads = [("in", r.steps)]
    if r.step:
        reads = [(f"out {r.step - 1} {i}", r.steps) for i in range(r.runs[r.steps][r.step - 1])]
    out = f"out {r.step} {item}"
    runs = (n for n in range(r.steps) if r.runs[n][r.step : r.step + 1] > (item,))
    reads.append((out, max(runs, default=-1)))  # nobody else has done it
    return Use(tuple(reads), ((out, r.steps),))


def execute(r: Here) -> Next:
    return item_of(r, r.word[1]), lambda _: (done, r)


def done(r: Here) -> Next:
    def then(before: int) -> tuple[Code, Here]:
        return finish(r) if before + 1 == r.total else (poll, r._replace(word=(0, 0)))

    return Add("done", "done", 1), then


def finish(r: Here) -> tuple[Code, Here]:
    """On to the next step, or past the last one."""
    step = r.step + 1
    items = r.runs[r.steps][step] if step < r.n_steps else 0
    here = r._replace(word=(0, 0), epoch=r.epoch + 1, step=step, total=items)
    return (alone if items == 1 else reset), here


def alone(r: Here) -> Next:
    """The only item of a step that no other thread sees."""
    return item_of(r, 0), lambda _: finish(r)


def reset(r: Here) -> Next:
    return Store("reset", "done", 0), lambda _: (advance, r)


def advance(r: Here) -> Next:
    here = r if r.total else r.idle()  # behind the last step there is no record
    return Store("advance", "claim", (r.epoch, 0)), lambda _: (poll, here)


def leave(r: Here) -> Next:
    """The caller reads what the last step made."""
    last = len(r.runs[r.run]) - 1
    reads = tuple((f"out {last} {i}", r.run) for i in range(r.runs[r.run][last]))
    return Use(reads, ()), lambda _: (begin, Here(True, r.run + 1, r.trusts, r.runs))


SITES = (
    "caller",
    "close",
    "job",
    "open",
    "poll",
    "read",
    "look",
    "claim",
    "done",
    "reset",
    "advance",
)


def explored(
    plain: set[str], n_workers: int = 2, *, trusts: bool = False, runs: Items = RUNS
) -> int:
    """The number of states, with the sites ``plain`` unordered."""
    orders = {site: PLAIN if site in plain else ORDERED for site in SITES}
    programs: list[tuple[Code, Here]] = [(begin, Here(True, trusts=trusts, runs=runs))] + [
        (poll, Here(False, trusts=trusts, runs=runs))
    ] * n_workers
    return Explorer(PLACES, orders).explore(programs, n_workers)


@pytest.mark.slow
@pytest.mark.parametrize("runs", [RUNS, SEVERAL], ids=["one", "several"])
def test_a_run_is_right_whatever_is_seen_when(runs: Items) -> None:
    """Every item once, each on what the step before or the caller wrote; no record of a step that
    is not there; and from wherever they are, the runs can end.
    """
    assert explored(set(), runs=runs) > 1000


@pytest.mark.parametrize(
    "plain",
    [{"close", "job", "open"}, {"open"}, {"job"}, {"poll"}, {"read"}, {"done"}, {"advance"}],
    ids=lambda plain: "-".join(sorted(plain)),
)
def test_what_is_plain_goes_wrong(plain: set[str]) -> None:
    """The first is how Python's stores would publish a job, on a CPU that is no x86."""
    with pytest.raises(WrongError):
        explored(plain)


def test_a_job_is_believed_after_a_second_look_only() -> None:
    with pytest.raises(WrongError, match="is read"):
        explored(set(), trusts=True)


# -- sleep ------------------------------------------------------------------------------------

# Of one worker. The futex is the kernel's: whoever is about to wait is counted (QUEUED) and holds a
# lock while it compares; then it sleeps or goes. Who wakes looks at the count, and takes the lock.
NEWS: dict[str, Any] = {"claim": 0, "generation": 0, "sleepers": 0, "futex": 0}
QUEUED = 1
ASLEEP = 2


def tell(order: tuple[str, ...]) -> Next:
    """The caller has news: ``order`` is what it writes, one after the other."""
    then = tell if order[1:] else count
    return Add(order[0], order[0], 1), lambda _: (then, order[1:])


def count(_: Any) -> Next:
    return Load("count", "sleepers"), lambda n: (wake if n else over, None)


def wake(_: Any) -> Next:
    return Load("futex", "futex"), lambda n: ((over, wake, end_sleep)[n], None)


def end_sleep(_: Any) -> Next:
    return Swap("futex", "futex", ASLEEP, 0), lambda _: (over, None)


def over(_: Any) -> Next:
    return End(), None


def watch(_: Any) -> Next:
    """The worker, tired of polling."""
    return Load("seen", "generation"), lambda seen: (watch_claim, seen)


def watch_claim(seen: int) -> Next:
    return Load("poll", "claim"), lambda claim: (over if claim else fall_asleep, seen)


def fall_asleep(seen: int) -> Next:
    return Add("sleepers", "sleepers", 1), lambda _: (queue, seen)


def queue(seen: int) -> Next:
    return Add("futex", "futex", QUEUED), lambda _: (compare, seen)


def compare(seen: int) -> Next:
    more = {True: ASLEEP - QUEUED, False: -QUEUED}
    return Load("compare", "generation"), lambda now: (decide, more[now == seen])


def decide(more: int) -> Next:
    return Add("futex", "futex", more), lambda _: (asleep if more > 0 else awake, None)


def asleep(_: Any) -> Next:
    return Load("futex", "futex"), lambda n: (asleep if n == ASLEEP else awake, None)


def awake(_: Any) -> Next:
    return Add("sleepers", "sleepers", -1), lambda _: (watch, None)


def sleep_and_wake(weak: dict[str, int], order: tuple[str, ...] = ("claim", "generation")) -> None:
    sites = ("generation", "count", "sleepers", "compare", "futex")
    orders = dict.fromkeys(("claim", "poll", "seen"), ORDERED) | dict.fromkeys(sites, TOTAL)
    # The worker comes first: wherever both are, it must be able to hear of the news.
    Explorer(NEWS, orders | weak).explore([(watch, None), (tell, order)])


def test_nobody_sleeps_through_a_run() -> None:
    sleep_and_wake({})


@pytest.mark.parametrize("site", ["generation", "count", "sleepers", "compare"])
def test_stores_that_later_loads_overtake_lose_a_sleeper(site: str) -> None:
    """As they may on x86 as well."""
    with pytest.raises(WrongError, match="no end"):
        sleep_and_wake({site: ORDERED})


def test_the_claim_comes_before_the_generation() -> None:
    with pytest.raises(WrongError, match="no end"):
        sleep_and_wake({}, ("generation", "claim"))


# -- the code ---------------------------------------------------------------------------------


def test_the_code_shares_nothing_by_plain_loads_and_stores() -> None:
    """But for what the caller alone reads: the next job."""
    text = trace(StepLoop(), ROWS["portable"])
    team = re.search(r'@"treadle_work"\(ptr noalias (%\w+)', text)
    assert team is not None
    found = re.findall(rf"(%\w+) = getelementptr i8, ptr {re.escape(team[1])}, i64 (\d+)", text)
    shared = {name: int(offset) for name, offset in found}
    assert len(shared) > 20
    n_shared = 0
    for line in text.splitlines():
        words = set(re.findall(r"ptr (%\w+)", line)) & set(shared)
        if words and re.search(r"\b(load|store|cmpxchg|atomicrmw)\b", line):
            n_shared += "seq_cst" in line
            assert "seq_cst" in line or min(shared[name] for name in words) >= NEXT, line
    assert n_shared > 20
