"""A restart: the first long prompt from page files against reading it.

    python bench/restart.py MODEL [--prompt 1800] [--repeat 3] [--threads 2] [--dir DIR]

Each repetition loads the model twice, in turns with and without the folder of page files, and times
the first token of the same prompt; compiled kernels are there already. The page cache of the system
is warm, as after a restart of the process and not of the machine. The figure to watch is how many
times as fast the files are: 10 and above.
"""

from __future__ import annotations

import argparse
import statistics
import tempfile
import time

import numpy as np

import treadle


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("model", nargs="?")
    parser.add_argument("--prompt", type=int, default=1800)
    parser.add_argument("--repeat", type=int, default=3)
    parser.add_argument("--threads", type=int)
    parser.add_argument("--kv", default="f16")
    parser.add_argument("--dir")
    given = parser.parse_args()

    def first(folder: str | None) -> tuple[float, int]:
        """Seconds to the first token, and tokens that came from files."""
        with treadle.load(
            given.model,
            threads=given.threads,
            context=given.prompt + 8,
            kv=given.kv,
            cache_dir=folder,
        ) as model:
            model.generate([1, 2, 3], max_tokens=2, temperature=0).finish()  # plans and kernels
            model.plan(512)
            n_vocab = model.config.n_vocab
            ids = [int(i) for i in np.random.default_rng(1).integers(3, n_vocab, given.prompt)]
            began = time.perf_counter()
            made = model.generate(ids, max_tokens=1, temperature=0)
            made.finish()
            return time.perf_counter() - began, made.timings.cache.files

    with tempfile.TemporaryDirectory(dir=given.dir) as folder:
        first(folder)  # writes the files
        took: dict[str, list[float]] = {"read": [], "from files": []}
        for _ in range(given.repeat):
            took["read"].append(first(None)[0])
            seconds, n = first(folder)
            took["from files"].append(seconds)
            assert n >= given.prompt - 64, n
    read, files = (statistics.median(times) for times in took.values())
    for name, times in took.items():
        print(f"{name:12} {statistics.median(times):8.3f} s  {[round(t, 3) for t in times]}")
    print(f"{given.prompt} tokens: {read / files:.1f} times as fast from files")


if __name__ == "__main__":
    main()
