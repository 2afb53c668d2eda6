"""The time that sampling takes beside the model, by vocabulary size: `python bench/sampling.py`.

Prints one line for each case: median, fastest and 95th percentile in microseconds, of many calls,
each on other logits (the same again would be in the cache, and the branch predictors would know
them). The logits are normal with a spread of 3, as models' roughly are.
"""

from __future__ import annotations

import argparse
import json
import sys
import time
from collections.abc import Callable

import numpy as np

from treadle.sampling import Sampler, Sampling
from treadle.sampling.candidates import largest

SIZES = (32_000, 128_256, 262_144)
CASES: dict[str, Sampling] = {
    "default chain": Sampling(seed=1),
    "default chain, penalties": Sampling(seed=1, repeat_penalty=1.1, presence_penalty=0.1),
    "greedy": Sampling(temperature=0),
    "top_p alone": Sampling(seed=1, samplers="top_p;temperature"),
    "min_p alone": Sampling(seed=1, samplers="min_p;temperature"),
    "typical alone": Sampling(seed=1, samplers="typ_p;temperature", typical_p=0.9),
    "top_n_sigma alone": Sampling(seed=1, samplers="top_n_sigma;temperature", top_n_sigma=1),
    "mirostat 2": Sampling(seed=1, mirostat=2),
    "no truncation": Sampling(seed=1, samplers="temperature"),
}


def measure(call: Callable[[np.ndarray], object], rows: np.ndarray, n: int) -> list[float]:
    """Times in microseconds of ``n`` calls over the rows in turn, sorted."""
    times = []
    for i in range(n):
        row = rows[i % len(rows)]
        start = time.perf_counter_ns()
        call(row)
        times.append((time.perf_counter_ns() - start) / 1e3)
    return sorted(times)


def main() -> None:
    """Run every case at every size."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("-n", type=int, default=300, help="calls of each case")
    parser.add_argument("--json", action="store_true", help="a list of objects on stdout")
    options = parser.parse_args()
    results = []
    for n_vocab in SIZES:
        rows = np.random.default_rng(0).normal(0, 3, (32, n_vocab)).astype(np.float32)
        ids = list(range(0, 4096, 7))
        calls: dict[str, Callable[[np.ndarray], object]] = {
            "top_k 40 (selection)": lambda row: largest(row, 40),
            "np.argpartition 40": lambda row: np.argpartition(row, len(row) - 40)[-40:],
        }
        for name, settings in CASES.items():
            sampler = Sampler(settings, n_vocab)
            calls[name] = lambda row, sampler=sampler, ids=ids: sampler.sample(row, ids)
        for name, call in calls.items():
            t = measure(call, rows, options.n)
            median = t[len(t) // 2]
            low = t[0]
            high = t[int(len(t) * 0.95)]
            results.append(
                {"case": name, "n_vocab": n_vocab, "us": median, "us_min": low, "us_p95": high}
            )
            print(
                f"{n_vocab:>7} {name:<26}{median:9.1f} us  (min {low:.1f}, p95 {high:.1f})",
                file=sys.stderr if options.json else sys.stdout,
            )
    if options.json:
        print(json.dumps(results, indent=1))


if __name__ == "__main__":
    main()
