"""What activations of two bytes cost a text: milliseconds a token, by the matrices that have them.

    python bench/two_bytes.py model.gguf [--threads 2] [--tokens 64] [--arms none,shipped]

Each round writes as many tokens in each arm, in turns; an arm is a model of its own, in the same
file. *none*: all products round their inputs to 8 bits where the format allows it; *output*: two
bytes before the output matrix alone; *shipped*: treadle's choice; *all formats*: the same matrices
in all formats that are multiplied as bytes, however much it costs; *all*: every matrix. Medians,
the least, and the median of each round's ratio to the first arm.
"""

from __future__ import annotations

import argparse
import statistics
import time
from collections.abc import Iterator
from contextlib import contextmanager

import treadle
from treadle.engine.batch import BatchItem
from treadle.kernels.matmul import select_activation
from treadle.plan.lowering import steps

OUTPUT = frozenset({"output", "token_embd"})
OTHERS = frozenset({"attn_output", "ffn_gate", "ffn_up", "ffn_down"})
ARMS = {
    "none": (frozenset[str](), False),
    "output": (OUTPUT, False),
    "shipped": (steps.FINE, False),
    "all formats": (steps.FINE, True),
    "all": (steps.FINE | OTHERS, True),
}
CONTEXT = 512


@contextmanager
def choice(fine: frozenset[str], every_format: bool) -> Iterator[None]:
    """Make plans with two bytes before the matrices ``fine``."""
    usual = steps.FINE, select_activation.prefers_q8x2
    steps.FINE = fine
    if every_format:
        select_activation.prefers_q8x2 = lambda codes, isa: True
    try:
        yield
    finally:
        steps.FINE, select_activation.prefers_q8x2 = usual


class Arm:
    """A model with a choice of activations, and the text that it writes."""

    def __init__(self, path: str, n_threads: int, fine: frozenset[str], every_format: bool) -> None:
        with choice(fine, every_format):
            self.model = treadle.load(path, threads=n_threads, context=CONTEXT)
            self.engine = self.model.engine
            self.write(2)  # makes the plan, compiles its kernels

    def write(self, n_tokens: int) -> tuple[float, float]:
        """Read tokens one by one; wall and processor time of one, in milliseconds."""
        sequence = self.engine.cache.sequence()
        wall = time.perf_counter()
        cpu = time.process_time()
        for token in range(n_tokens):
            self.engine.run([BatchItem(sequence, [token % 256 + 5], 1)])
        took = time.perf_counter() - wall, time.process_time() - cpu
        sequence.close()
        return 1e3 * took[0] / n_tokens, 1e3 * took[1] / n_tokens


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("model")
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--tokens", type=int, default=64)
    parser.add_argument("--rounds", type=int, default=15)
    parser.add_argument("--arms", default=",".join(ARMS))
    given = parser.parse_args()
    names = given.arms.split(",")
    arms = [Arm(given.model, given.threads, *ARMS[name]) for name in names]
    walls: list[list[float]] = [[] for _ in arms]
    cpus: list[list[float]] = [[] for _ in arms]
    for i in range(given.rounds):
        order = range(len(arms)) if i % 2 == 0 else reversed(range(len(arms)))
        for at in order:
            wall, cpu = arms[at].write(given.tokens)
            walls[at].append(wall)
            cpus[at].append(cpu)
    print(f"{'':12} {'ms a token':>11} {'least':>8} {'ratio':>7} {'processor ms':>13} {'ratio':>7}")
    for name, wall, cpu in zip(names, walls, cpus, strict=True):
        ratio, cpu_ratio = (
            statistics.median(a / b for a, b in zip(mine, first, strict=True))
            for mine, first in ((wall, walls[0]), (cpu, cpus[0]))
        )
        print(
            f"{name:12} {statistics.median(wall):11.3f} {min(wall):8.3f} {ratio:7.3f}"
            f" {statistics.median(cpu):13.3f} {cpu_ratio:7.3f}"
        )


if __name__ == "__main__":
    main()
