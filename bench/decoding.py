"""Cost of Python between two tokens: microseconds of each part, medians and minima.

    python bench/decoding.py [MODEL] [--sequences 1,8] [--tokens 200] [--sweep 0,64]

Without MODEL, the small one inside the package. ``--sweep``: megabytes of other memory read before
each token, for the weights of a larger model leave nothing of Python in the caches: what is quick
again and again is several times slower then. One thread, so that the parts are all on one clock.

A part is a method, less the parts it calls: "compiled" is the plan's steps themselves.
"""

from __future__ import annotations

import argparse
import statistics
import time
from collections.abc import Callable
from typing import Any

import numpy as np

import treadle
from treadle.api.generation import Generation
from treadle.api.session import Session
from treadle.devices.cpu.thread_team import Team, _Shared
from treadle.engine.batch import BatchItem
from treadle.engine.engine import Engine
from treadle.sampling import Sampler
from treadle.scheduler.output import RequestOutput
from treadle.scheduler.scheduler import Scheduler

PARTS = (
    ("compiled", _Shared, "work"),
    ("start the team", Team, "run"),
    ("lay out the batch", Engine, "_prepare"),
    ("read the logits", Engine, "_read_rows"),
    ("check, lock, commit", Engine, "_run"),
    ("feed", Session, "feed"),
    ("sample", Sampler, "choose"),
    ("text", RequestOutput, "push"),
    ("what runs next", Scheduler, "step"),
    ("the loop", Generation, "__next__"),
)


class Clock:
    """Seconds of each part by itself, one list entry a token."""

    def __init__(self) -> None:
        self.spent: dict[str, float] = {}
        self.tokens: list[dict[str, float]] = []
        self._inner: list[float] = []
        for name, owner, method in PARTS:
            setattr(owner, method, self._timed(name, getattr(owner, method)))

    def _timed(self, name: str, method: Callable[..., Any]) -> Callable[..., Any]:
        def timed(*args: Any, **kwargs: Any) -> Any:
            self._inner.append(0.0)
            began = time.perf_counter()
            try:
                return method(*args, **kwargs)
            finally:
                took = time.perf_counter() - began
                self.spent[name] = self.spent.get(name, 0.0) + took - self._inner.pop()
                if self._inner:
                    self._inner[-1] += took

        return timed

    def token(self) -> None:
        """One token is done."""
        self.tokens.append(self.spent)
        self.spent = {}


def sweeper(megabytes: int) -> Callable[[], object]:
    """Return a function that fills the caches with something else."""
    other = np.ones(megabytes << 18, np.float32)
    return lambda: float(other.sum()) if megabytes else None


def report(title: str, clock: Clock) -> None:
    """Print the table of what was timed, and forget it."""
    tokens = clock.tokens[len(clock.tokens) // 10 :]  # the first ones fetch and compile
    clock.tokens = []
    clock.spent = {}
    print(f"\n{title}")
    python = [sum(token.values()) - token.get("compiled", 0.0) for token in tokens]
    for name, _, _ in PARTS:
        spent = [token[name] * 1e6 for token in tokens if name in token]
        if spent:
            print(f"  {name:24} {statistics.median(spent):8.1f}  min {min(spent):8.1f} us")
    print(
        f"  {'Python, all of it':24} {statistics.median(python) * 1e6:8.1f}  "
        f"min {min(python) * 1e6:8.1f} us"
    )


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("model", nargs="?")
    parser.add_argument("--sequences", default="1,8")
    parser.add_argument("--tokens", type=int, default=200)
    parser.add_argument("--sweep", default="0,64")
    given = parser.parse_args()
    counts = [int(n) for n in given.sequences.split(",")]
    clock = Clock()
    with treadle.load(given.model, threads=1, n_sequences=max(counts) + 1) as model:
        for megabytes in map(int, given.sweep.split(",")):
            sweep = sweeper(megabytes)
            swept = f"{megabytes} MB read between tokens"
            for temperature in (0.0, 0.8):
                sampling = treadle.Sampling(temperature=temperature, seed=1, ignore_eos=True)
                made = model.generate([5, 6, 7], max_tokens=given.tokens, sampling=sampling)
                for _ in made:
                    clock.token()
                    sweep()
                report(f"generate, temperature {temperature:g}, {swept}", clock)
            for n in counts:
                sessions = [model.session() for _ in range(n)]
                for i, session in enumerate(sessions):
                    session.feed([i + 5, 6, 7])
                clock.spent = {}
                for _ in range(given.tokens):
                    sweep()
                    model.engine.run([BatchItem(session.seq, [7]) for session in sessions])
                    clock.token()
                report(f"{n} sequences, logits alone, {swept}", clock)
                for session in sessions:
                    session.close()


if __name__ == "__main__":
    main()
