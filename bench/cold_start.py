"""How long a model's kernels take to compile with an empty cache, on 1, 2, 4 and 16 processes.

    python bench/cold_start.py MODEL [--repeats 3] [--processes 1 2 4 16] [--json]

Each kernel is compiled alone, some times, and the least processor time counts: other programs on
the machine change little in it. Then the schedule of ``jit/compile_pool.py`` is played in virtual
time, with its own queue, and with what lowering a plan, a fork, a hand-over, a write to the cache
and a link were measured to cost. Cores are taken to be as fast together as one alone.

Two uses: ``run``, a prompt and the text after it, where the first token waits for the prompt's
plan; and ``serve``, all plans that a server compiles before it is ready. ``ratio`` is the time
relative to one process. ``bound`` is the least that any schedule could reach: the slowest kernel,
or all kernels divided by the processes.
"""

from __future__ import annotations

import argparse
import json
import os
import time
from collections.abc import Callable, Iterator, Sequence
from statistics import median
from typing import Any, NamedTuple

import treadle
from treadle.api.engine_plans import probe_plans, text_plans
from treadle.devices.cpu.step_loop import StepLoop
from treadle.engine.engine import CHUNK
from treadle.engine.prepared_plan import PlanKey
from treadle.isa.isa import Isa
from treadle.jit import cache
from treadle.jit.compile import Linker, emit_object, prepare
from treadle.jit.compile_pool import FIRST, LATER, CompileQueue
from treadle.jit.kernel import about, isa_key, symbol, trace
from treadle.kernels.spec import Spec
from treadle.system.forked_workers import ForkedWorkers

ROUNDS = 20  # of forks and hand-overs


def least(work: Callable[[], object], repeats: int) -> float:
    """Least processor seconds of a call."""
    found = []
    for _ in range(repeats):
        began = time.process_time()
        work()
        found.append(time.process_time() - began)
    return min(found)


class Costs(NamedTuple):
    """Seconds that each process and each kernel cost besides compiling."""

    fork_s: float
    hand_over_s: float  # of a spec and its object, with waking up
    store_s: float
    link_s: float


class VirtualWorkers:
    """The interface of ``ForkedWorkers`` in virtual time. ``now`` is the parent's; ``seconds``:
    those that each kernel takes.
    """

    def __init__(self, n: int, seconds: dict[str, float], costs: Costs):
        self.now = 0.0
        self.alive = True
        self._n = n
        self._seconds = seconds
        self._fork_s = costs.fork_s
        self._extra_s = costs.hand_over_s + costs.store_s
        self._free: list[float] = []  # when each worker is free
        self._waiting: list[tuple[int, Spec, float]] = []  # in the queue, and since when
        self._running: list[tuple[float, int]] = []  # when each will be done

    def start(self) -> None:
        while len(self._free) < self._n:
            self.now += self._fork_s
            self._free.append(self.now)

    def wants(self) -> int:
        return max(0, 2 * self._n - len(self._waiting) - len(self._running))

    def send(self, number: int, message: Spec) -> bool:
        self._waiting.append((number, message, self.now))
        return True

    def _take(self) -> None:
        """Let workers that are free by now take what waits."""
        while self._waiting and self._free:
            i = min(range(self._n), key=lambda j: self._free[j])
            number, spec, since = self._waiting[0]
            begins = max(self._free[i], since)
            if begins > self.now and self._running:
                return
            del self._waiting[0]
            self._free[i] = begins + self._seconds[spec.name] + self._extra_s
            self._running.append((self._free[i], number))

    def wait(self) -> None:
        """Go on to the next answer."""
        self._take()
        self.now = max(self.now, min(self._running)[0])

    def receive(self) -> Iterator[tuple[int, bytes | None]]:
        self._take()
        for done in sorted(self._running):
            if done[0] <= self.now:
                self._running.remove(done)
                yield done[1], b"object"
        self._take()


class LoweredPlan(NamedTuple):
    """The kernels of a plan, their rank, and the seconds of lowering it."""

    specs: list[Spec]
    rank: int
    lower_s: float


def play(
    plans: Sequence[LoweredPlan], n: int, isa: Isa, seconds: dict[str, float], costs: Costs
) -> tuple[float, float]:
    """Seconds until the kernels of rank FIRST are linked, and until all are, with lowering."""
    if n == 1:
        first = {spec.name for plan in plans if plan.rank == FIRST for spec in plan.specs}
        every = {spec.name for plan in plans for spec in plan.specs}
        lower_s = sum(plan.lower_s for plan in plans if plan.rank == FIRST)
        extra_s = costs.store_s + costs.link_s
        first_s = lower_s + sum(seconds[name] + extra_s for name in first)
        later_s = sum(plan.lower_s for plan in plans if plan.rank != FIRST)
        return first_s, first_s + later_s + sum(seconds[name] + extra_s for name in every - first)
    workers = VirtualWorkers(n, seconds, costs)
    queue: Any = CompileQueue(isa, workers)  # type: ignore[arg-type]
    first_s = 0.0
    least_s = play(plans, 1, isa, seconds, costs)  # if n cores share all work, the parent's too
    for plan in plans:
        workers.now += plan.lower_s
        queue.submit(plan.specs, plan.rank)
        workers.start()
        workers.now += costs.link_s * len(queue.receive())
    while queue.ranks:
        is_waiting = FIRST in queue.ranks.values()
        workers.wait()
        workers.now += costs.link_s * len(queue.receive())
        if is_waiting:
            first_s = workers.now
    return max(first_s, least_s[0] / n), max(workers.now, least_s[1] / n)


def measure_costs(isa: Isa, spec: Spec, repeats: int) -> Costs:
    """Measure the costs, with the object of ``spec``."""
    code = emit_object(trace(spec, isa), isa)
    pools = []
    forks = []
    for _ in range(ROUNDS):
        workers = ForkedWorkers(lambda _: code, 1)
        began = time.process_time()
        workers.start()
        forks.append(time.process_time() - began)
        pools.append(workers)
    for workers in pools[1:]:
        workers.close()
    workers = pools[0]
    waits = []
    for number in range(ROUNDS):
        began = time.perf_counter()
        assert workers.send(number, spec)
        while not [*workers.receive()]:
            workers.wait(1)
        waits.append(time.perf_counter() - began)
    workers.close()
    linker = Linker()
    store_s = least(lambda: cache.write(spec.name, isa_key(isa), code, about(spec, isa)), repeats)
    link_s = least(lambda: linker.link(symbol(spec), code), repeats)
    return Costs(median(forks), median(waits), store_s, link_s)


def lower(model: treadle.Model, n_tokens: int, n_outputs: int, rank: int) -> LoweredPlan:
    """Lower a plan; its kernels are those that the device compiles."""
    output = model.stepper.scheduler.drafting.observer.output
    began = time.process_time()
    plan = model.engine.lower(PlanKey(n_tokens, n_outputs, output))
    return LoweredPlan([*plan.specs(), StepLoop()], rank, time.process_time() - began)


def uses_of(model: treadle.Model) -> dict[str, list[LoweredPlan]]:
    """The plans of each use, as they are submitted."""
    model.engine.lower(PlanKey(1, 1, "logits"))  # imports
    prompt = min(CHUNK, model.engine.max_tokens)
    served = dict.fromkeys([*probe_plans(model), *text_plans(model)])
    return {
        "run": [lower(model, prompt, 1, FIRST), lower(model, 1, 1, LATER)],
        "serve": [lower(model, plan.key.n_tokens, plan.key.n_outputs, FIRST) for plan in served],
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("model")
    parser.add_argument("--repeats", type=int, default=3)
    parser.add_argument("--processes", type=int, nargs="+", default=[1, 2, 4, 16])
    parser.add_argument("--json", action="store_true")
    given = parser.parse_args()
    os.environ["TREADLE_COMPILE_PROCESSES"] = "1"
    model = treadle.load(given.model)
    isa = model.isa
    prepare(isa)
    uses = uses_of(model)
    every = {spec.name: spec for plans in uses.values() for p in plans for spec in p.specs}
    seconds = {
        name: least(lambda spec=spec: emit_object(trace(spec, isa), isa), given.repeats)
        for name, spec in every.items()
    }
    slowest = max(every.values(), key=lambda spec: seconds[spec.name])
    costs = measure_costs(isa, slowest, given.repeats)
    rows = []
    for use, plans in uses.items():
        names = {spec.name for plan in plans for spec in plan.specs}
        total = sum(seconds[name] for name in names)
        alone = play(plans, 1, isa, seconds, costs)
        for n in given.processes:
            first_s, all_s = play(plans, n, isa, seconds, costs)
            rows.append(
                {
                    "use": use,
                    "processes": n,
                    "kernels": len(names),
                    "first_plan_s": first_s,
                    "first_plan_ratio": first_s / alone[0],
                    "all_s": all_s,
                    "all_ratio": all_s / alone[1],
                    "bound_s": max(total / n, max(seconds[name] for name in names)),
                }
            )
    estimates = sorted(
        ((seconds[name] * 1e3, spec.compile_ms, name) for name, spec in every.items()), reverse=True
    )
    if given.json:
        print(
            json.dumps({"costs": costs._asdict(), "rows": rows, "kernels_ms": estimates}, indent=2)
        )
        return
    print("  ".join(f"{name} {1e3 * value:.2f} ms" for name, value in costs._asdict().items()))
    print("use    processes  kernels  first plan   ratio    all     ratio   bound")
    for row in rows:
        print(
            f"{row['use']:<6} {row['processes']:>8} {row['kernels']:>8} "
            f"{row['first_plan_s']:>9.3f} s {row['first_plan_ratio']:>7.2f} "
            f"{row['all_s']:>7.3f} s {row['all_ratio']:>6.2f} {row['bound_s']:>7.3f} s"
        )
    print("slowest kernels: ms, estimated ms, name")
    for took, estimate, name in estimates[:8]:
        print(f"{took:7.0f} {estimate:7.0f}  {name}")


if __name__ == "__main__":
    main()
