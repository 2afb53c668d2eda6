"""The emulator's code: a kernel as one thread's coroutine, and the loop that resumes threads."""

from __future__ import annotations

from tests.devices.cuda.emulated_thread import Record, Thread
from tests.devices.cuda.records import (
    BARRIER,
    BLOCK_SPLIT,
    COPY,
    FAULT,
    LANE,
    LAUNCH,
    MOST_COPIES,
    OUTSIDE,
    PAD,
    POISON,
    READY,
    THREAD,
    WARP,
    WARP_SPLIT,
)
from treadle.devices.cuda.launch_args import emit_entry
from treadle.isa.isa import Isa
from treadle.jit.builder import Builder
from treadle.jit.coroutine import resume, trace_coroutine, trace_function
from treadle.jit.kernel import symbol
from treadle.jit.types import Ty, i64, ptr
from treadle.jit.values import Val, Var
from treadle.kernels.spec import Spec

SCHEDULER = "treadle_resume_threads"
# args, run, count, base, per, scratch; then where the thread's frame is, and its record.
ARGUMENTS: tuple[Ty, ...] = (ptr, ptr, ptr, i64, i64, ptr, ptr, ptr)


def trace_thread(spec: Spec, isa: Isa) -> tuple[str, list[str]]:
    """The IR of one thread, a coroutine; and the lines of the kernel where it waits."""
    places: list[str] = []

    def build(k: Thread, *given: Val) -> None:
        *kernel, frame, _ = given
        k.begin_thread(frame)
        emit_entry(k, isa, spec, *kernel)
        places.extend(k.places)

    return trace_coroutine(symbol(spec), ARGUMENTS, isa, build, Thread), places


def trace_scheduler(isa: Isa) -> str:
    """The IR of a launch: one block after the other."""

    def build(k: Builder, launch_at: Val) -> None:
        launch = Record(k, launch_at, LAUNCH)
        fault = Record(k, launch.get("fault"), FAULT)
        random = k.var(launch["seed"])
        backwards = launch["seed"] % 2 > 0
        begin = launch["begin"]
        end = launch["end"]
        with k.loop(end, start=begin) as i, k.if_(fault["kind"].eq(0)):
            cta = k.select(backwards, begin + end - 1 - i, i)
            _Block(k, launch, fault, cta, random).run()

    return trace_function(SCHEDULER, (ptr,), isa, build)


class _Block:
    """The code that runs one block's threads to their end, or to a fault."""

    def __init__(self, k: Builder, launch: Record, fault: Record, cta: Val, random: Var) -> None:
        self.k = k
        self.launch = launch
        self.fault = fault
        self.cta = cta
        self.random = random
        self.n, self.shared = launch["n_threads"], launch.get("shared")

    def run(self) -> None:
        k = self.k
        n_whole = self.launch["n_shared"] + 2 * PAD
        with k.loop(n_whole, step=8) as i:
            k.store(self.shared + (i - PAD), k.i64(POISON))
        with k.loop(self.n) as t:
            self._start(t)
        head, step, settle, over = (k.label(name) for name in ("head", "step", "settle", "over"))
        k.goto(head)
        k.at(head)
        warp = self._ready_warp()
        k.branch((warp >= 0) & self.fault["kind"].eq(0), step, settle)
        k.at(step)
        self._resume(warp)
        self._settle_warp(warp)
        k.goto(head)
        k.at(settle)
        going = k.var(k.i64(0))
        with k.if_(self.fault["kind"].eq(0)):
            self._settle_block(going)
        k.branch(going.v > 0, head, over)
        k.at(over)
        for start in (k.i64(-PAD), self.launch["n_shared"]):
            with k.loop(PAD, step=8) as i:
                word = k.load(self.shared + (start + i), i64)
                with k.if_((word < POISON) | (word > POISON)):
                    self._fault(OUTSIDE, k.i64(0))

    def _next(self) -> Val:
        """A random number of 31 bits."""
        self.random.v = self.random.v * 6364136223846793005 + 1442695040888963407
        return (self.random.v >> 33) & 0x7FFFFFFF

    def _thread(self, t: Val) -> Record:
        return Record(self.k, self.launch.get("threads") + t * THREAD.itemsize, THREAD)

    def _start(self, t: Val) -> None:
        k = self.k
        launch = self.launch
        mine = self._thread(t)
        for name in ("turn", "waits", "n_copies", "n_done", "n_groups"):
            mine[name] = 0
        mine["tid"], mine["cta"], mine["n_ctas"] = t, self.cta, launch["n_ctas"]
        mine["shared"], mine["fault"] = launch["shared"], launch["fault"]
        mine["exchange"] = launch["exchange"] + t // 32 * (2 * 32 * LANE)
        mine["copies"] = launch["copies"] + t * (MOST_COPIES * COPY.itemsize)
        mine["seed"], mine["room"] = self._next(), launch["n_frame"]
        given = [launch.get(name) for name in ("args", "run", "count")]
        given += [launch["base"], launch["per"], launch.get("scratch")]
        given += [launch.get("frames") + t * launch["n_frame"], mine.p]
        handle = k.call_pointer(launch.get("function"), ptr, given)
        k.store(launch.get("handles") + t * 8, handle)

    def _ready_warp(self) -> Val:
        """A warp, any, with a thread that waits for nothing; -1 where there is none."""
        k = self.k
        n_warps = self.n // 32
        found = k.var(k.i64(-1))
        first = self._next()
        with k.loop(n_warps) as i:
            warp = (first + i) % n_warps
            with k.loop(32) as lane, k.if_(self._thread(warp * 32 + lane)["waits"].eq(READY)):
                found.v = warp
        return found.v

    def _resume(self, warp: Val) -> None:
        """Each of its threads that waits for nothing, once, in any order."""
        k = self.k
        first = self._next()
        step = self._next() | 1
        with k.loop(32) as i:
            t = warp * 32 + ((first + i * step) & 31)
            with k.if_(self._thread(t)["waits"].eq(READY)):
                handle = k.load(self.launch.get("handles") + t * 8, ptr)
                resume(k, handle)

    def _settle_warp(self, warp: Val) -> None:
        """Where all its threads wait for each other, none does any more."""
        k = self.k
        first = warp * 32
        waits = self._thread(first)["waits"]
        other = k.var(waits)
        exchanging = k.var((waits & 3).eq(WARP))
        with k.loop(32) as lane:
            now = self._thread(first + lane)["waits"]
            exchanging.v = exchanging.v | (now & 3).eq(WARP)
            other.v = k.select(now.eq(waits), other.v, now)
        with k.if_(exchanging.v), k.if_else(other.v.eq(waits)) as (all_wait, split):
            with all_wait, k.loop(32) as lane:
                self._thread(first + lane)["waits"] = READY
            with split:
                self._fault(WARP_SPLIT, first, waits, other.v)

    def _settle_block(self, going: Var) -> None:
        """No thread can go on: at one barrier they all can, at their end none need."""
        k = self.k
        waits = self._thread(k.i64(0))["waits"]
        other = k.var(waits)
        with k.loop(self.n) as t:
            now = self._thread(t)["waits"]
            other.v = k.select(now.eq(waits), other.v, now)
        with k.if_else(other.v.eq(waits)) as (same, split):
            with same, k.if_((waits & 3).eq(BARRIER)):
                going.v = k.i64(1)
                with k.loop(self.n) as t:
                    self._thread(t)["waits"] = READY
            with split:
                self._fault(BLOCK_SPLIT, k.i64(0), waits, other.v)

    def _fault(
        self, kind: int, tid: Val, place: Val | None = None, other: Val | None = None
    ) -> None:
        none = self.k.i64(0)
        with self.k.if_(self.fault["kind"].eq(0)):
            self.fault["kind"], self.fault["cta"], self.fault["tid"] = kind, self.cta, tid
            self.fault["place"] = none if place is None else place
            self.fault["other"] = none if other is None else other
