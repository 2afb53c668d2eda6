"""Seconds from the start of a warm process to its first token, beside llama-cpp-python's.

    python bench/first_token.py MODEL [MODEL ...] [--rival PYTHON] [--rounds 9] [--threads 2]

In turns: ``treadle run``, the library (``treadle.load`` and ``generate``), and, with ``--rival``,
the ``create_completion`` of a Python that has llama-cpp-python. The same file, prompt and number of
threads; the time runs from the start of the process until its first token arrives in a pipe. One
turn of each comes before those that count: kernels, plans, bytecode
and the file's pages are in their caches. Medians, least and most; ratios are of one round's times.
"""

from __future__ import annotations

import argparse
import os
import statistics
import subprocess
import sys
import time
from collections.abc import Sequence
from pathlib import Path

LIBRARY = """
import sys, treadle
model = treadle.load(sys.argv[1], threads=int(sys.argv[3]), context=2048)
for piece in model.generate(sys.argv[2], max_tokens=1, temperature=0):
    print(piece, flush=True)
"""
RIVAL = """
import sys
from llama_cpp import Llama
model = Llama(sys.argv[1], n_threads=int(sys.argv[3]), n_threads_batch=int(sys.argv[3]),
              n_ctx=2048, verbose=False)
for piece in model.create_completion(sys.argv[2], max_tokens=1, temperature=0, stream=True):
    print(piece["choices"][0]["text"], flush=True)
    break
"""


def first_line_s(command: Sequence[str]) -> float:
    """Return the seconds from the start of a process to the first bytes that it writes. Raises
    RuntimeError if it fails.
    """
    began = time.perf_counter()
    env = {key: value for key, value in os.environ.items() if key != "PYTHONDONTWRITEBYTECODE"}
    with subprocess.Popen(
        command, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, env=env
    ) as process:
        assert process.stdout is not None
        first = process.stdout.read(1)
        seconds = time.perf_counter() - began
        process.stdout.read()
    if not first or process.returncode:
        raise RuntimeError(f"no token: {' '.join(map(str, command[:4]))}")
    return seconds


def commands(model: str, prompt: str, threads: int, rival: str | None) -> dict[str, list[str]]:
    """Return the command of each arm by its name."""
    given = [model, prompt, str(threads)]
    run = ["-m", "treadle", "run", model, prompt, "-n", "1", "--temp", "0", "-c", "2048"]
    arms = {
        "treadle run": [sys.executable, *run, "-t", str(threads)],
        "treadle, library": [sys.executable, "-c", LIBRARY, *given],
    }
    if rival:
        arms["llama-cpp-python"] = [rival, "-c", RIVAL, *given]
    return arms


def main() -> None:
    """Print the times of each model."""
    assert __doc__ is not None
    parser = argparse.ArgumentParser(description=__doc__.split("\n\n")[0])
    parser.add_argument("models", nargs="+", type=Path)
    parser.add_argument("--rival", metavar="PYTHON", help="a Python that has llama-cpp-python")
    parser.add_argument("--rounds", type=int, default=9)
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--prompt", default="Once upon a time")
    given = parser.parse_args()
    for model in given.models:
        arms = commands(str(model), given.prompt, given.threads, given.rival)
        for command in arms.values():
            first_line_s(command)
        times: dict[str, list[float]] = {name: [] for name in arms}
        for i in range(given.rounds):
            for name in list(arms) if i % 2 else reversed(list(arms)):
                times[name].append(first_line_s(arms[name]))
        print(model.name)
        last = list(arms)[-1]
        for name, found in times.items():
            pairs = [a / b for a, b in zip(found, times[last], strict=True)]
            print(
                f"  {name:18} {statistics.median(found):.3f} s "
                f"({min(found):.3f} to {max(found):.3f}), "
                f"{statistics.median(pairs):.2f} of {last}'s ({min(pairs):.2f} to {max(pairs):.2f})"
            )


if __name__ == "__main__":
    main()
