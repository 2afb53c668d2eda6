"""Time of a bundle's start beside an environment's: whole processes that write one token, warm,
in turns.

    treadle bundle MODEL OUT --offline
    python bench/bundle.py OUT MODEL [--repeats 15]

Both have their modules compiled and their kernels in the cache. ``first_s`` is a bundle's first
start, which unpacks and compiles, in a cache of its own.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import subprocess
import sys
import tempfile
import time


def seconds(command: list[str], env: dict[str, str]) -> float:
    """Wall time of a process that must end well."""
    began = time.perf_counter()
    subprocess.run(
        command, env=env, check=True, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL
    )
    return time.perf_counter() - began


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("bundle")
    parser.add_argument("model")
    parser.add_argument("--repeats", type=int, default=15)
    given = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        env = dict(os.environ, TREADLE_CACHE=folder, PYTHONPYCACHEPREFIX=f"{folder}/code")
        env.pop("PYTHONDONTWRITEBYTECODE", None)
        asked = ["Once upon a time", "-n", "1"]
        bundle = [os.path.abspath(given.bundle), "run", *asked]
        plain = [sys.executable, "-m", "treadle", "run", given.model, *asked]
        first = seconds(bundle, env)
        seconds(bundle, env)  # by the note of the first
        seconds(plain, env)
        pairs = [(seconds(bundle, env), seconds(plain, env)) for _ in range(given.repeats)]
    ours, usual = zip(*pairs, strict=True)
    more = [b - p for b, p in pairs]
    told = {
        "first_s": first,
        "bundle_s": {"median": statistics.median(ours), "min": min(ours)},
        "environment_s": {"median": statistics.median(usual), "min": min(usual)},
        "bundle_more_s": {"median": statistics.median(more), "min": min(more), "max": max(more)},
    }
    print(json.dumps(told, indent=2))


if __name__ == "__main__":
    main()
