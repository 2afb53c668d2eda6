"""Behaviour of a cluster of up to 64 machines, by formulas and by a simulation of events.

    python tools/simulate_cluster.py --step-ms 300 --n-embd 8192 --latency-ms 0.5 --gbit 10

Stages: the layers of one model on several machines, of which each batch passes through all.
Replicas: a model on each machine, and conversations whose turns come to one of them. The formulas
are those of docs/cluster.md; ``tests/tools/test_simulate_cluster.py`` holds them to the simulation.
"""

from __future__ import annotations

import argparse
import heapq
import random
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from treadle.distributed.cluster.affinity import Affinity

SIZES = (1, 2, 4, 8, 16, 32, 64)  # machines
Choose = Callable[[Sequence[str], dict[str, int]], str]


@dataclass(frozen=True)
class Stages:
    """One model in stages. ``compute_s``: of a run in each stage; ``latency_s`` of a call from one
    process to the next; ``n_bytes`` of the states of a run; ``bandwidth`` in bytes a second.
    """

    compute_s: tuple[float, ...]
    latency_s: float
    n_bytes: int
    bandwidth: float

    @property
    def hop_s(self) -> float:
        """From one stage to the next."""
        return self.latency_s + self.n_bytes / self.bandwidth

    @property
    def run_s(self) -> float:
        """From the front through all stages and back: the two outer calls carry few bytes."""
        hops = (len(self.compute_s) - 1) * self.hop_s + 2 * self.latency_s
        return sum(self.compute_s) + hops

    def runs_per_s(self, in_flight: int = 1) -> float:
        """With so many batches on their way at once. treadle has one."""
        return min(in_flight / self.run_s, 1 / max(self.compute_s))

    def simulated(self, in_flight: int = 1, n_runs: int = 2000, jitter: float = 0.0) -> float:
        """Runs a second of a simulation; ``jitter``: each time is longer or shorter by up to this
        share of it.
        """
        dice = random.Random(1)

        def took(seconds: float) -> float:
            return seconds * (1 + jitter * (2 * dice.random() - 1))

        free = [0.0] * len(self.compute_s)  # when each stage has ended its last run
        arrivals = [(took(self.latency_s), i, 0) for i in range(in_flight)]
        heapq.heapify(arrivals)
        begun = in_flight
        ended = 0
        now = 0.0
        while ended < n_runs:
            now, run, stage = heapq.heappop(arrivals)
            if stage == len(free):  # back at the front, which sends the next one
                ended += 1
                heapq.heappush(arrivals, (now + took(self.latency_s), begun, 0))
                begun += 1
                continue
            free[stage] = max(now, free[stage]) + took(self.compute_s[stage])
            last = stage == len(free) - 1
            hop = took(self.latency_s if last else self.hop_s)
            heapq.heappush(arrivals, (free[stage] + hop, run, stage + 1))
        return n_runs / now


@dataclass(frozen=True)
class Talks:
    """Conversations of ``n_turns``, whose prompts grow by equal parts; calls of ``n_talks`` come
    mixed to ``replicas``.
    """

    replicas: int
    n_turns: int = 10
    n_talks: int = 400

    def cached(self) -> float:
        """The share of the prompts' tokens that a cache has, where beginnings stay at a replica."""
        return 1 - 2 / (self.n_turns + 1)

    def cached_at_random(self) -> float:
        """The same where each call goes to any replica: that has read the last turn which came to
        it.
        """
        known = 0.0
        for turn in range(1, self.n_turns + 1):
            for earlier in range(1, turn):
                missed = (1 - 1 / self.replicas) ** (turn - 1 - earlier)
                known += earlier * missed / self.replicas
        return known / (self.n_turns * (self.n_turns + 1) / 2)

    def simulated(self, choose: Choose) -> tuple[float, float]:
        """The share of tokens that were known, and how many calls the busiest replica has had, as a
        multiple of the mean.
        """
        dice = random.Random(2)
        read: list[set[str]] = [set() for _ in range(self.replicas)]
        n_calls = [0] * self.replicas
        left = [(talk, self.n_turns) for talk in range(self.n_talks)]
        turns = dict(left)
        in_hand: list[int] = []  # replicas, one for each call that is being answered
        known = total = 0
        while turns:
            talk = dice.choice(list(turns))
            turn = self.n_turns - turns[talk] + 1
            names = [f"{talk}.{i}" for i in range(turn)]
            loads = {str(i): in_hand.count(i) for i in range(self.replicas)}
            chosen = int(choose(names, loads))
            known += sum(name in read[chosen] for name in names)
            total += len(names)
            read[chosen].update(names)
            n_calls[chosen] += 1
            in_hand = [*in_hand, chosen][-self.replicas :]  # about one call a replica
            turns[talk] -= 1
            if not turns[talk]:
                del turns[talk]
        return known / total, max(n_calls) * self.replicas / sum(n_calls)


def at_random(seed: int = 3) -> Choose:
    """Any replica."""
    dice = random.Random(seed)
    return lambda names, loads: dice.choice(list(loads))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument("--step-ms", type=float, default=300.0, help="a run of the whole model")
    parser.add_argument("--n-embd", type=int, default=8192)
    parser.add_argument("--tokens", type=int, default=1, help="of a run")
    parser.add_argument("--latency-ms", type=float, default=0.5, help="of a call")
    parser.add_argument("--gbit", type=float, default=10.0, help="of the network, a second")
    given = parser.parse_args()
    print("| machines | ms a run | simulated | runs/s, one in flight | as many as stages |")
    print("|---|---|---|---|---|")
    for n in SIZES:
        stages = Stages(
            (given.step_ms / 1e3 / n,) * n,
            given.latency_ms / 1e3,
            4 * given.n_embd * given.tokens,
            given.gbit * 1e9 / 8,
        )
        told = 1e3 * stages.run_s, 1e3 / stages.simulated(), stages.runs_per_s()
        print(
            f"| {n} | {told[0]:.1f} | {told[1]:.1f} | {told[2]:.2f} | {stages.runs_per_s(n):.2f} |"
        )
    print("\n| replicas | known, by beginnings | simulated | busiest | at random | simulated |")
    print("|---|---|---|---|---|---|")
    for n in SIZES:
        talks = Talks(n)
        share, busiest = talks.simulated(Affinity().choose)
        other, _ = talks.simulated(at_random())
        formula = f"{talks.cached():.0%} | {share:.0%} | {busiest:.2f}"
        print(f"| {n} | {formula} | {talks.cached_at_random():.0%} | {other:.0%} |")


if __name__ == "__main__":
    main()
