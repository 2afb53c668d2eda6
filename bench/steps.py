"""Cost of the compiled step loop: microseconds a step, for steps of almost no work, by number of
threads.

    python bench/steps.py [--threads 1,2] [--steps 300]

Also the processor time that an idle team uses in a second.
"""

from __future__ import annotations

import argparse
import statistics
import time
from dataclasses import dataclass
from typing import TYPE_CHECKING, ClassVar

import numpy as np

from treadle.devices.cpu.memory_layouts import STEP
from treadle.devices.cpu.thread_team import Team
from treadle.isa import choose
from treadle.jit.host import host_features
from treadle.jit.kernel import load_kernels
from treadle.jit.types import i64
from treadle.kernels.run_state import RUN_STATE
from treadle.kernels.spec import Args, Frame, Spec

if TYPE_CHECKING:
    from treadle.isa.isa import Isa
    from treadle.jit.builder import Builder


@dataclass(frozen=True)
class Count(Spec):
    """Adds one to its item's counter: ``counters i64 [n]``."""

    op: ClassVar[str] = "count"
    args = Args("counters:inout")

    def build(self, k: Builder, isa: Isa, frame: Frame) -> None:
        p = frame.counters
        with k.loop(frame.end, start=frame.begin) as i:
            k.store(p, k.load(p, i64, offset=i * 8) + 1, offset=i * 8)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--threads", default="1,2")
    parser.add_argument("--steps", type=int, default=300)
    given = parser.parse_args()
    isa = choose(host_features())
    kernel = load_kernels([Count()], isa)[Count().name]
    for n_threads in map(int, given.threads.split(",")):
        for n_items in (1, n_threads, 64):
            counters = np.zeros(n_items, np.int64)
            args = np.array([counters.ctypes.data], np.int64)
            steps = np.zeros(given.steps, STEP)
            steps[:] = (kernel, args.ctypes.data, n_items, 0, 1, 1)
            run = np.zeros(1, RUN_STATE)
            team = Team(n_threads, isa, 4096)
            times = []
            for _ in range(200):
                began = time.perf_counter()
                team.run(steps.ctypes.data, given.steps, run.ctypes.data)
                times.append((time.perf_counter() - began) / given.steps * 1e6)
            time.sleep(0.2)
            before = time.process_time()
            time.sleep(1)
            idle = time.process_time() - before
            team.close()
            assert (counters == 200 * given.steps).all()
            print(
                f"{n_threads} threads, {n_items:3} items: "
                f"median {statistics.median(times):.2f} us a step, "
                f"min {min(times):.2f}, max {max(times):.2f}; "
                f"idle {idle * 1e3:.2f} ms of processor a second"
            )


if __name__ == "__main__":
    main()
