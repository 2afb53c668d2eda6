"""Cost of one more stage: a decoding step of one model in 1, 2 and 4 processes, in turns.

    python bench/stages.py [MODEL] --stages 1 2 4 --rounds 5

Prints the median ms of a step and what a hop takes beside the computing, which docs/cluster.md's
cost model needs. One processor each; with fewer processors than stages they take turns, as they
would anyway.
"""

from __future__ import annotations

import argparse
import statistics
import time
from typing import Any

import ray

import treadle
from treadle.api.session import Session
from treadle.distributed import cluster


def step_s(model: Any, n: int) -> float:
    """Median seconds of a step."""
    session = Session(model.engine)
    session.feed([5, 6, 7])
    times = []
    for _ in range(n):
        began = time.perf_counter()
        session.feed([8])
        times.append(time.perf_counter() - began)
    session.close()
    return statistics.median(times)


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("model", nargs="?")
    parser.add_argument("--stages", type=int, nargs="*", default=[1, 2, 4])
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--steps", type=int, default=60)
    given = parser.parse_args()
    ray.init(num_cpus=max(4, 2 * sum(given.stages)), include_dashboard=False, log_to_driver=False)
    load = {"threads": 1, "context": 256}
    models: dict[str, Any] = {"one process": treadle.load(given.model, **load)}
    for n in given.stages:
        models[f"{n} stages"] = cluster.load(given.model, stages=n, **load)
    found: dict[str, list[float]] = {name: [] for name in models}
    for _ in range(given.rounds):
        for name, model in models.items():
            found[name].append(step_s(model, given.steps))
    alone = min(found["one process"])
    for name, times in found.items():
        hops = int(name.split()[0]) + 1 if "stages" in name else 0
        best = 1e3 * min(times)
        median = 1e3 * statistics.median(times)
        a_call = f", {(best - 1e3 * alone) / hops:.3f} ms a call" if hops else ""
        print(f"{name}: {best:.3f} ms a step (median {median:.3f}){a_call}")
    for model in models.values():
        model.close()
    ray.shutdown()


if __name__ == "__main__":
    main()
