"""Bound of the speed of texts: memory read in one long stream a thread, beside a gemv of one token.

    python bench/stream.py [--file MODEL] [--threads 2] [--rounds 7] [--rows 1 2 4] [FORMAT ...]

Streams read the file's mapping (without a file a buffer beyond the caches): each thread its share,
from front to back, asking for lines so many bytes ahead; then as ``treadle doctor`` measures its
burst, in pieces of 512 KB. A gemv reads many copies of a matrix, more than the caches hold. All in
turns; the medians of the rounds are printed, and the share of the best long stream of each round.
On a busy machine all of it is luck: the last line says what the threads got.
"""

from __future__ import annotations

import argparse
import statistics
import time
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import numpy as np

from treadle.devices.cpu.thread_team import HostMemory, Team
from treadle.formats import by_name
from treadle.jit.kernel import load_kernels
from treadle.kernels.matmul.select import gemv
from treadle.kernels.run_state import LINE
from treadle.profiling.peaks import (
    PAGE,
    PIECE,
    STREAMS,
    StreamReadKernel,
    buffer_bytes,
    stream_rate,
)
from treadle.profiling.report import row_in_use
from treadle.profiling.trial import KernelTrial

FORMATS = ("Q8_0", "Q4_0", "Q4_K", "Q6_K", "BF16", "F16")
AHEAD = (0, 1024, 2048, 4096, 8192)  # bytes
SHAPE = 2048, 5632  # K and M: TinyLlama's gate
SAMPLE_S = 0.05

Sample = Callable[[], float]  # bytes a second


def streams(data: np.ndarray, n_threads: int) -> tuple[Team, dict[str, Sample]]:
    """Samples by name; the long ones' begin with ``stream``."""
    isa = row_in_use()
    shapes = [(1, ahead) for ahead in AHEAD]
    kernels = load_kernels(
        [StreamReadKernel(*shape) for shape in dict.fromkeys([*shapes, *STREAMS])], isa
    )
    team, whole = Team(n_threads, isa, LINE), len(data) // n_threads // PAGE * PAGE

    def sample(shape: tuple[int, int], piece: int) -> Sample:
        return lambda: stream_rate(team, kernels, shape, data, piece, SAMPLE_S)

    made = {f"stream, {ahead} ahead": sample((1, ahead), whole) for ahead in AHEAD}
    return team, made | {f"burst, {n} x {ahead}": sample((n, ahead), PIECE) for n, ahead in STREAMS}


def gemvs(name: str, rows: list[int], n_threads: int) -> tuple[KernelTrial, dict[str, Sample]]:
    """A format's, as shipped and with other numbers of rows together."""
    fmt = by_name(name)
    isa = row_in_use()
    (k, m) = SHAPE
    trial, shipped = KernelTrial(fmt, isa, k, m, 1, n_threads), gemv(fmt, isa, k, 1)
    made: dict[str, Sample] = {}
    for mr in dict.fromkeys([shipped.mr, *rows]):
        spec = replace(shipped, mr=mr)
        if (why := trial.compile(spec)) is not None:
            print(f"{name}, {mr} rows: {why}")
            continue
        if (why := trial.check(spec, 1)) is not None:
            raise SystemExit(why)
        label = f"{name}, {mr} rows" + (", shipped" if mr == shipped.mr else "")
        made[label] = lambda spec=spec: trial.n_bytes / trial.seconds(spec, 1, cold=True, runs=3)
    return trial, made


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n\n")[0])
    parser.add_argument("formats", nargs="*", default=FORMATS)
    parser.add_argument("--file", type=Path)
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--rounds", type=int, default=7)
    parser.add_argument("--rows", type=int, nargs="*", default=[])
    given = parser.parse_args()
    if given.file:
        data = np.memmap(given.file, np.uint8, "r")
        print(f"{given.file.name}: {len(data) >> 20} MiB, mapped")
    else:
        data = HostMemory(buffer_bytes()).bytes
        data[:] = 1  # pages never written to are all one page of zeros
    team, samples = streams(data, given.threads)
    trials = []
    for name in given.formats:
        trial, made = gemvs(name, given.rows, given.threads)
        trials.append(trial)
        samples |= made
    rates: dict[str, list[float]] = {name: [] for name in samples}
    wall = time.perf_counter()
    cpu = time.process_time()
    for _ in range(given.rounds):
        for name, sample in samples.items():
            rates[name].append(sample())
    got = (time.process_time() - cpu) / (time.perf_counter() - wall) / given.threads
    long = [rates[name] for name in rates if name.startswith("stream")]
    best = [max(each) for each in zip(*long, strict=True)]
    print("| | GB/s | of the best long stream |\n|---|---:|---:|")
    for name, found in rates.items():
        share = statistics.median(f / b for f, b in zip(found, best, strict=True))
        print(f"| {name} | {statistics.median(found) / 1e9:.1f} | {share:.0%} |")
    print(f"\nprocessor time got: {got:.0%} (a team also waits between samples)")
    for owner in (team, *trials):
        owner.close()


if __name__ == "__main__":
    main()
