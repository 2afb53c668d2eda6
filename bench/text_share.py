"""Speed of one text beside the memory's: tokens per second, the share of one long stream that its
bytes make, and the microseconds between two runs. Two worktrees in turns.

    python bench/text_share.py MODEL... [--against FOLDER] [--threads 2] [--rounds 7] [--tokens 128]

FOLDER is another worktree of treadle (``git worktree add``); without it this one is measured alone.
Each worktree has a process of its own, with a kernel cache in the folder ``treadle-share`` of the
temporary folder, that loads the model once; then they take turns. In each round the model's file is
also read in long streams, one a thread, by the kernels of ``bench/stream.py``, and the fastest of
these is the round's. Medians of the rounds, the least and the most in parentheses. The machine must
be quiet.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from itertools import pairwise
from pathlib import Path
from statistics import median
from typing import Any

import numpy as np

ROOT = Path(__file__).resolve().parent.parent
PROMPT = "Once upon a time there was a machine that wrote"
CACHES = Path(tempfile.gettempdir()) / "treadle-share"

Figures = dict[str, float]  # of one round


def child(path: str, threads: int, tokens: int) -> None:
    """Write a text for each line of standard input, and print its figures as JSON."""
    import treadle  # of the worktree in PYTHONPATH

    with treadle.load(path, threads=threads, context=tokens + 64) as model:
        n_bytes = sum(step.n_bytes * step.read_share for step in model.plan(1))
        device: Any = model.engine.device
        run = device.run
        runs: list[tuple[float, float]] = []

        def timed(*args: Any, **given: Any) -> bool:
            began = time.perf_counter()
            done: bool = run(*args, **given)
            runs.append((began, time.perf_counter()))
            return done

        device.run = timed
        while sys.stdin.readline():
            runs.clear()
            for _ in model.generate(PROMPT, max_tokens=tokens, temperature=0, ignore_eos=True):
                pass
            texts = runs[1:]  # the first run reads the prompt
            each = median(b[0] - a[0] for a, b in pairwise(texts))
            between = median(b[0] - a[1] for a, b in pairwise(texts))
            print(json.dumps({"token": each, "between": between, "bytes": n_bytes}), flush=True)


class Side:
    """A worktree's process."""

    def __init__(self, folder: Path, path: Path, threads: int, tokens: int) -> None:
        cache = CACHES / folder.resolve().name
        cache.mkdir(mode=0o700, parents=True, exist_ok=True)
        env = os.environ | {"PYTHONPATH": str(folder / "src"), "TREADLE_CACHE": str(cache)}
        command = [sys.executable, __file__, str(path), "--child"]
        command += ["--threads", str(threads), "--tokens", str(tokens)]
        pipe = subprocess.PIPE
        self._process = subprocess.Popen(command, env=env, stdin=pipe, stdout=pipe, text=True)
        self.figures()  # compiles kernels, reads pages of the file

    def figures(self) -> Figures:
        """Figures of one text."""
        stdin = self._process.stdin
        stdout = self._process.stdout
        assert stdin is not None
        assert stdout is not None
        stdin.write("\n")
        stdin.flush()
        line = stdout.readline()
        if not line:
            sys.exit("a worktree's process ended")
        figures: Figures = json.loads(line)
        return figures

    def close(self) -> None:
        assert self._process.stdin is not None
        self._process.stdin.close()
        self._process.wait()


@contextmanager
def long_streams(path: Path, threads: int) -> Iterator[Callable[[], float]]:
    """Yield a function that returns the bytes per second of the fastest long stream of the file."""
    from stream import streams  # type: ignore[import-not-found]

    team, samples = streams(np.memmap(path, np.uint8, "r"), threads)
    long = [sample for name, sample in samples.items() if name.startswith("stream")]
    yield lambda: max(sample() for sample in long)
    team.close()


def spread(values: list[float], digits: int = 0) -> str:
    """The median, the least and the most."""
    shown = [f"{value:.{digits}f}" for value in (median(values), min(values), max(values))]
    return "{} ({} to {})".format(*shown)


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("models", nargs="+", type=Path)
    parser.add_argument("--against", type=Path)
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--rounds", type=int, default=7)
    parser.add_argument("--tokens", type=int, default=128)
    parser.add_argument("--child", action="store_true", help=argparse.SUPPRESS)
    given = parser.parse_args()
    if given.child:
        child(str(given.models[0]), given.threads, given.tokens)
        return
    folders = [ROOT] + ([given.against] if given.against else [])
    print("| model | worktree | tokens per second | % of the long stream | us between runs |")
    print("|---|---|---|---|---|")
    for path in given.models:
        sides = [Side(folder, path, given.threads, given.tokens) for folder in folders]
        rounds: list[list[Figures]] = []
        rates = []
        with long_streams(path, given.threads) as rate:
            for i in range(given.rounds):
                turn = list(range(len(sides)))[:: 1 if i % 2 else -1]
                found = {at: sides[at].figures() for at in turn}
                rounds.append([found[at] for at in range(len(sides))])
                rates.append(rate())
        for at, folder in enumerate(folders):
            mine = [each[at] for each in rounds]
            speeds = [1 / f["token"] for f in mine]
            shares = [100 * f["bytes"] / f["token"] / r for f, r in zip(mine, rates, strict=True)]
            between = [1e6 * f["between"] for f in mine]
            cells = [path.name, folder.resolve().name, spread(speeds), spread(shares)]
            print("|", " | ".join([*cells, spread(between)]), "|", flush=True)
        if len(sides) > 1:
            ratios = [b["token"] / a["token"] for a, b in rounds]
            print(f"| {path.name} | ratio | {spread(ratios, 3)} | | |", flush=True)
        print(f"| {path.name} | long stream | {spread([r / 1e9 for r in rates], 1)} GB/s | | |")
        for side in sides:
            side.close()


if __name__ == "__main__":
    main()
