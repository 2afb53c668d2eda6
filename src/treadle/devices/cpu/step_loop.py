"""The compiled step loop that every thread of the team runs, from a plan's first step to its last.

One word, ``claim``, holds the number of the current step (its *epoch*, which only grows) and that
step's next item. A thread takes items by advancing the word with a compare-and-swap, which fails if
the step is no longer current. The thread that finishes a step's last item moves the word to the
next step. So a step ends when its items are done, not when all threads have arrived: a thread that
is suspended or still waking up delays no other, as long as it holds no item. Steps of one
item are run by the thread that finished the step before them, so no other thread needs to see them.

To stop a run (``AbortFlag``), threads still take items but call no kernel, so the run ends at
once.

Between runs a worker spins for a while, then sleeps on a futex; an idle team uses no CPU time.

All data that two threads share is read and written here, by atomic operations: on CPUs other than
x86, Python's own stores have no order. ``docs/flow.md`` explains why these operations suffice ("The
claim word").
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, ClassVar

from treadle.base.fast_classes import dataclass
from treadle.devices.cpu.memory_layouts import (
    CALLER,
    CLAIM,
    CLOSED,
    DONE,
    EVERYONE,
    GENERATION,
    ITEM_BITS,
    JOB,
    JOB_FIELDS,
    LOOP,
    MOST_ITEMS,
    NEXT,
    NEXT_FIELDS,
    OFFER_EVERY,
    SLEEPERS,
    STEP,
    STEP_FIELDS,
    TIMESPEC,
    WORKER,
)
from treadle.jit.types import i32, i64, ptr
from treadle.kernels.spec import Frame, Spec

if TYPE_CHECKING:
    from treadle.jit.language import Builder, Isa, Val


@dataclass(frozen=True)
class StepLoop(Spec):
    """The step loop as a kernel: ``args`` is the team's memory, ``begin`` the role in which a
    thread calls it.

    A WORKER runs steps until STOP. A CALLER publishes a run (the *job*), works on it and returns at
    its end. STOP tells the workers to return.
    """

    op: ClassVar[str] = LOOP

    def build(self, k: Builder, isa: Isa, frame: Frame) -> None:
        _Loop(k, isa, frame).emit()


class _Loop:
    def __init__(self, k: Builder, isa: Isa, frame: Frame) -> None:
        self.k = k
        self.isa = isa
        self.team = frame.args
        self.scratch = frame.scratch
        self.is_worker, self.is_caller = frame.begin.eq(WORKER), frame.begin.eq(CALLER)
        names = ("poll", "look", "enter", "empty", "idle", "claim", "full", "finish", "leave")
        self.at = {name: k.label(name) for name in names}
        zero = k.i64(0)
        self.epoch, self.polls = k.var(k.i64(-1)), k.var(zero)
        self.step = k.var(self.team)
        self.run = k.var(self.team)
        self.first = k.var(zero)
        self.n_steps = k.var(zero)
        self.total, self.seen = k.var(zero), k.var(k.const(0, i32))
        self.round = k.var(zero)  # the first item of a round of claims, one for each thread
        self.part = k.var(zero)  # the items of each of its claims

    def emit(self) -> None:
        k = self.k
        at = self.at
        news = k.label("news")
        k.branch(self.is_worker, at["poll"], news)
        k.at(news)
        with k.if_else(self.is_caller) as (run, stop):
            with run:
                self._publish()
            with stop:
                k.atomic_set(self._job_address("stop"), k.i64(1))
        self._wake()
        k.branch(self.is_caller, at["poll"], at["leave"])

        k.at(at["poll"])
        # Read before the claim: if a run starts in between, the generation has changed, and the
        # futex does not sleep.
        self.seen.v = k.atomic_load(self.team + GENERATION, i32)
        word = k.atomic_load(self.team + CLAIM, i64)
        epoch = word >> ITEM_BITS
        k.branch(epoch.eq(self.epoch.v), at["look"], at["enter"])

        k.at(at["enter"])
        self._enter(epoch)

        k.at(at["look"])
        item = word & ((1 << ITEM_BITS) - 1)
        k.branch(item < self.total.v, at["claim"], at["full"])

        k.at(at["claim"])
        take = k.label("take")
        later = k.label("later")
        end = self.round.v + self.part.v * self._job("threads")
        k.branch(item < end, take, later)
        k.at(later)
        self._start_round(end)
        k.goto(at["claim"])
        k.at(take)
        rest = self.part.v - (item - self.round.v) % self.part.v
        n = k.min(rest, self.total.v - item)
        took = k.compare_swap(self.team + CLAIM, word, word + n)
        execute = k.label("execute")
        k.branch(took, execute, at["poll"])
        k.at(execute)
        self._execute(item, n)

        k.at(at["full"])
        self.isa.pause(k)
        self.polls.v = self.polls.v + 1
        with k.if_((self.polls.v % OFFER_EVERY).eq(0)):
            self._call("offer", [])
        k.goto(at["poll"])

        k.at(at["idle"])
        self._idle()
        k.at(at["leave"])

    def _job_address(self, field: str) -> Val:
        return self.team + (JOB + 8 * JOB_FIELDS.index(field))

    def _job(self, field: str, ty: Any = i64) -> Val:
        # Atomic, so that no processor moves these loads past the second read of the claim.
        return self.k.atomic_load(self._job_address(field), ty)

    def _step(self, field: str, ty: Any = i64) -> Val:
        return self.k.load(self.step.v, ty, offset=8 * STEP_FIELDS.index(field), align=8)

    def _publish(self) -> None:
        """Emit: copy the fields of the run that Python wrote at NEXT to the job, and close the
        claim (CLOSED) during the copy.

        A thread that sees one of the new fields also sees the claim closed. One that sees the claim
        open again sees all of them, and everything that the caller wrote before.
        """
        k = self.k
        given = {
            name: k.load(self.team + (NEXT + 8 * i), i64, align=8)
            for i, name in enumerate(NEXT_FIELDS)
        }
        given["epoch"] = (k.atomic_load(self.team + CLAIM, i64) >> ITEM_BITS) + 1
        k.atomic_set(self.team + CLAIM, k.i64(CLOSED << ITEM_BITS))
        for name, value in given.items():
            k.atomic_set(self._job_address(name), value)
        with k.if_(given["times"] > 0):
            self._call("clock", [self._job("clock_number", i32), self._job("times", ptr)])
        k.atomic_set(self.team + CLAIM, given["epoch"] << ITEM_BITS)

    def _wake(self) -> None:
        """Emit: wake sleeping workers.

        A worker that checked too early either sees the generation change, or is counted as a
        sleeper here. The claim, or ``stop``, has been written before this code.
        """
        k = self.k
        k.atomic_add(self.team + GENERATION, k.const(1, i32))
        sleepers = k.atomic_load(self.team + SLEEPERS, i64)
        with k.if_((sleepers > 0) & (self._job("wake") > 0)):
            futex = self._job("futex")
            generation = self.team + GENERATION
            with k.if_else(futex > 0) as (by_number, by_address):
                with by_number:
                    self._call("wake", [futex, generation, self._job("how"), k.i64(EVERYONE)])
                with by_address:
                    self._call("wake", [generation, k.i64(i32.n_bytes), k.i64(0)])

    def _enter(self, epoch: Val) -> None:
        """Emit: read the record of the step of ``epoch``, the current one, or go to ``idle`` if the
        run has no step left.
        """
        k = self.k
        at = self.at
        first = self._job("epoch")
        n_steps = self._job("n_steps")
        steps = self._job("steps", ptr)
        run = self._job("run", ptr)
        # The fields read are consistent only if their step is still the current one.
        again = k.atomic_load(self.team + CLAIM, i64) >> ITEM_BITS
        index = epoch - first
        whole = k.label("whole")
        ready = k.label("ready")
        k.branch(again.eq(epoch), whole, at["poll"])
        k.at(whole)
        k.branch((index >= 0) & (index < n_steps), ready, at["idle"])
        k.at(ready)
        self.epoch.v = epoch
        self.first.v = first
        self.n_steps.v = n_steps
        self.run.v = run
        self.polls.v = k.i64(0)
        self.step.v = steps + index * STEP.itemsize
        self._count()
        self._start_round(k.i64(0))
        k.branch(self.total.v.eq(0), at["empty"], at["poll"])
        k.at(at["empty"])
        # Only one thread claims the item past an empty step's end, and goes on. A second one could
        # be so late that the run, and the memory of its time stamps, are gone.
        here = epoch << ITEM_BITS
        k.branch(k.compare_swap(self.team + CLAIM, here, here + 1), at["finish"], at["poll"])

    def _count(self) -> None:
        """Emit: read from the current record how many items its step has, at most MOST_ITEMS."""
        k = self.k
        self.total.v = self._step("base")
        with k.if_(self._step("count") > 0):
            count = k.load(self._step("count", ptr), i64, align=8)
            per = self._step("per")
            total = self.total.v * ((count + (per - 1)) // per)
            # If an abort skipped the step that writes the count, it is arbitrary: a huge one would
            # never be finished, and bits above ITEM_BITS would change the epoch.
            self.total.v = k.min(k.max(total, 0), MOST_ITEMS)

    def _start_round(self, first: Val) -> None:
        """Emit: begin a round of claims, one for each thread, from the item ``first`` on.

        All claims of a round are equal, so threads of equal speed end it together. Rounds get
        smaller: large claims first, so that a thread reads contiguously and its prefetches are
        used; small ones last, so that all threads end together.
        """
        k = self.k
        whole = self._step("whole")
        part = k.var(k.max((self.total.v - first) // self._job("share"), 1))
        with k.if_(whole > 1):  # most steps skip this division
            part.v = (part.v + (whole - 1)) // whole * whole
        self.round.v = first
        self.part.v = part.v

    def _execute(self, item: Val, n: Val) -> None:
        """Emit: run the ``n`` claimed items from ``item`` on; if they complete the step, run the
        following steps of one item, and open the next step of several items to all threads.
        """
        k = self.k
        at = self.at
        more = k.label("more")
        one = k.label("one")
        several = k.label("several")
        over = k.label("over")
        self._call_kernel(item, item + n)
        before = k.atomic_add(self.team + DONE, n)
        k.branch((before + n).eq(self.total.v), at["finish"], at["poll"])
        # Nobody else can finish this step, so the job and its records stay as they are.
        k.at(at["finish"])
        self._stamp()
        self.epoch.v = self.epoch.v + 1
        self.step.v = self.step.v + STEP.itemsize
        k.branch(self.epoch.v - self.first.v < self.n_steps.v, more, over)
        k.at(more)
        self._count()
        k.branch(self.total.v < 2, one, several)
        k.at(one)
        self._call_kernel(k.i64(0), self.total.v)
        k.goto(at["finish"])
        k.at(several)
        self._start_round(k.i64(0))
        self._open()
        k.goto(at["poll"])
        k.at(over)
        self._open()
        self.epoch.v = k.i64(-1)  # there is no such step
        k.goto(at["poll"])

    def _open(self) -> None:
        """Emit: let all threads claim items of the step ``epoch``, or see that the run is over."""
        k = self.k
        k.atomic_set(self.team + DONE, k.i64(0))
        k.atomic_set(self.team + CLAIM, self.epoch.v << ITEM_BITS)

    def _call_kernel(self, begin: Val, end: Val) -> None:
        """Emit: run the step's kernel on the items from ``begin`` to ``end``, if there are any and
        no abort.
        """
        k = self.k
        args = [self._step("args", ptr), self.run.v, begin, end, self.scratch]
        with k.if_((begin < end) & k.atomic_load(self._job("alarm", ptr), i64).eq(0)):
            k.call_pointer(self._step("kernel", ptr), None, args)

    def _idle(self) -> None:
        """Emit the end of a run: the caller returns; a worker spins, then sleeps until the next
        run.
        """
        k = self.k
        at = self.at
        wait = k.label("wait")
        stay = k.label("stay")
        k.branch(self.is_caller, at["leave"], wait)
        k.at(wait)
        k.branch(self._job("stop").eq(0), stay, at["leave"])
        k.at(stay)
        self.isa.pause(k)
        self.polls.v = self.polls.v + 1
        with k.if_(self.polls.v > self._job("spins")):
            k.atomic_add(self.team + SLEEPERS, k.i64(1))
            self._call("wait", [self.team + GENERATION, self.seen.v])
            k.atomic_add(self.team + SLEEPERS, k.i64(-1))
            self.polls.v = k.i64(0)
        k.goto(at["poll"])

    def _stamp(self) -> None:
        """Emit: when profiling, store the time at which the step ended and the next one starts."""
        k = self.k
        with k.if_(self._job("times") > 0):
            at = self._job("times", ptr) + (self.epoch.v + 1 - self.first.v) * TIMESPEC
            self._call("clock", [self._job("clock_number", i32), at])

    def _call(self, field: str, args: list[Val]) -> None:
        self.k.call_pointer(self._job(field, ptr), None, args)
