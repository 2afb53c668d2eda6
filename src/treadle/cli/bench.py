"""``treadle bench``: prompt and generation speed, beside what this machine reaches at best."""

from __future__ import annotations

import random
import time
from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from statistics import median
from typing import Any, Protocol

import click

from treadle.cli.load import find_model, load_model
from treadle.cli.progress import ProgressBar
from treadle.cli.speed import Peaks, Work, measured_peaks
from treadle.cli.table import print_json, print_table, scaled
from treadle.errors import TreadleError

BATCH = 512  # tokens that llama.cpp takes at once, its own bench's default


class Numbers(click.ParamType[tuple[int, ...]]):
    """Whole numbers, separated by commas."""

    name = "numbers"

    def __init__(self, least: int) -> None:
        self.least = least

    def convert(
        self, value: Any, param: click.Parameter | None, ctx: click.Context | None
    ) -> tuple[int, ...]:
        """Split at the commas, and check each."""
        if isinstance(value, tuple):
            return value
        try:
            numbers = tuple(int(part) for part in value.split(","))
        except ValueError:
            self.fail(f"'{value}' is not a list of whole numbers, as in 1,2", param, ctx)
        if min(numbers) < self.least:
            self.fail(f"{min(numbers)} is less than {self.least}", param, ctx)
        return numbers


@dataclass(frozen=True)
class Test:
    """What is timed: ``n`` tokens read at once or written one by one, after ``depth`` others."""

    kind: str  # "pp" or "tg"
    n: int
    depth: int

    @property
    def name(self) -> str:
        """``pp512``, ``tg128``: the names that llama.cpp's bench uses."""
        return f"{self.kind}{self.n}"


@dataclass(frozen=True)
class Result:
    """One line of the report; the speeds are of the median repetition."""

    test: str
    depth: int
    threads: int
    sequences: int
    tok_s: float
    tok_s_min: float
    tok_s_max: float
    bytes_s: float | None  # what the plan's steps read and write, by the second
    ops_s: float | None
    share_of_peak: float | None  # the least time these steps could take here, over the time taken
    engine: str


class Engine(Protocol):
    """What can be timed: tokens go in after those it holds."""

    name: str

    def reset(self) -> None:
        """Forget everything."""

    def feed(self, ids: list[int]) -> object:
        """Run ``ids`` through the model after what it holds."""


class Treadle:
    """This program."""

    name = "treadle"

    def __init__(self, model: Any) -> None:
        self.model = model
        self.session = model.session()

    def reset(self) -> None:
        """Forget everything."""
        self.session.reset()

    def feed(self, ids: list[int]) -> object:
        """Run ``ids`` through the model after what it holds."""
        return self.session.feed(ids)


class LlamaCpp:
    """llama.cpp, through llama-cpp-python."""

    name = "llama-cpp-python"

    def __init__(self, path: Path, threads: int, context: int) -> None:
        try:
            import llama_cpp
        except ImportError as error:
            hint = "pip install 'treadle[bench]'"
            raise TreadleError(f"llama-cpp-python is not installed: {hint}") from error
        self._synchronize = llama_cpp.llama_synchronize
        self.model = llama_cpp.Llama(
            str(path),
            n_ctx=context,
            n_batch=BATCH,
            n_ubatch=BATCH,
            n_threads=threads,
            n_threads_batch=threads,
            verbose=False,
        )

    def reset(self) -> None:
        """Forget everything."""
        self.model.reset()

    def feed(self, ids: list[int]) -> object:
        """Run ``ids`` through the model after what it holds."""
        self.model.eval(ids)
        self._synchronize(self.model.ctx)  # logits are read here, so nothing is left running
        return None


@click.command()
@click.argument("model", type=click.Path())
@click.option("-p", "--prompt", "n_prompt", type=Numbers(0), default=(512,), help="Tokens to read.")
@click.option("-n", "--gen", "n_gen", type=Numbers(0), default=(128,), help="Tokens to write.")
@click.option("-d", "--depth", type=Numbers(0), default=(0,), help="Tokens in the cache before.")
@click.option("-t", "--threads", type=Numbers(1), help="Threads; by default as `doctor` says.")
@click.option("-r", "--repeat", type=click.IntRange(1), default=5, metavar="N", help="Repetitions.")
@click.option("--kv", metavar="TYPE", help="Type of the cached keys and values, such as f16.")
@click.option(
    "--against", type=click.Choice([LlamaCpp.name]), help="Time another program too, in turns."
)
@click.option("--json", "as_json", is_flag=True, help="Print a list of objects.")
def command(
    model: str,
    n_prompt: tuple[int, ...],
    n_gen: tuple[int, ...],
    depth: tuple[int, ...],
    threads: tuple[int, ...] | None,
    repeat: int,
    kv: str | None,
    against: str | None,
    as_json: bool,
) -> None:
    """Time MODEL: tokens per second, median and spread, and the share of this machine's peak.

    -p, -n, -d and -t take several numbers, as in -t 1,2; 0 leaves out the test. ppN reads N tokens
    at once, tgN writes N, one by one; sampling is no part of it.
    """
    tests = [Test(kind, n, d) for d in depth for kind, ns in (("pp", n_prompt), ("tg", n_gen))
             for n in ns if n]  # fmt: skip
    if not tests:
        raise click.UsageError("nothing to time: -p and -n are both 0")
    context = max(test.n + test.depth for test in tests)
    results: list[Result] = []
    with ProgressBar() as progress:
        path = find_model(model, progress)
        for n_threads in threads or (None,):
            loaded = load_model(str(path), progress, threads=n_threads, context=context, kv=kv)
            try:
                engines: list[Engine] = [Treadle(loaded)]
                if against:
                    engines.append(LlamaCpp(path, loaded.n_threads, context))
                for test in tests:
                    progress(f"timing {test.name}", 0, 0)
                    seconds = time_in_turns(engines, test, repeat, loaded.config.n_vocab, progress)
                    peaks = measured_peaks(loaded, progress)  # bandwidth moves by the minute
                    results += evaluate(loaded, engines, test, seconds, peaks)
            finally:
                loaded.close()
    if as_json:
        print_json([asdict(result) for result in results])
    else:
        print_results(results)


def time_in_turns(
    engines: Sequence[Engine], test: Test, repeat: int, n_vocab: int, progress: ProgressBar
) -> list[list[float]]:
    """Return the seconds of every repetition of every engine [n_engines][repeat].

    The engines take turns, so that a slow minute of a shared machine falls on all of them. One
    repetition before the first warms caches and compiles what is missing; it is not counted.
    """
    random_ids = random.Random(0)
    ids = [random_ids.randrange(n_vocab) for _ in range(test.depth + test.n)]
    seconds: list[list[float]] = [[] for _ in engines]
    for i in range(repeat + 1):
        for engine, times in zip(engines, seconds, strict=True):
            elapsed = time_once(engine, test, ids)
            if i:
                times.append(elapsed)
        progress(f"timing {test.name} at depth {test.depth}", i, repeat)
    return seconds


def time_once(engine: Engine, test: Test, ids: list[int]) -> float:
    """Return the seconds that ``test`` takes once, the tokens before it not counted."""
    engine.reset()
    for start in range(0, test.depth, BATCH):
        engine.feed(ids[start : min(start + BATCH, test.depth)])
    wanted = ids[test.depth :]
    start_s = time.perf_counter()
    if test.kind == "pp":
        engine.feed(wanted)
    else:
        for id in wanted:
            engine.feed([id])
    return time.perf_counter() - start_s


def evaluate(
    model: Any, engines: Sequence[Engine], test: Test, seconds: list[list[float]], peaks: Peaks
) -> Iterator[Result]:
    """Turn seconds into results; bytes and operations are those of treadle's plan."""
    plan = model.plan(test.n if test.kind == "pp" else 1)
    n_passes = -(-test.n // plan.n_tokens) if test.kind == "pp" else test.n
    work = Work.of(plan, test.n, n_passes, peaks)
    for engine, times in zip(engines, seconds, strict=True):
        middle = median(times)
        ours = engine.name == Treadle.name
        yield Result(
            test=test.name,
            depth=test.depth,
            threads=model.n_threads,
            sequences=1,
            tok_s=test.n / middle,
            tok_s_min=test.n / max(times),
            tok_s_max=test.n / min(times),
            bytes_s=work.n_bytes / middle if ours else None,
            ops_s=work.n_ops / middle if ours else None,
            share_of_peak=work.least_s / middle if ours else None,
            engine=engine.name,
        )


def print_results(results: list[Result]) -> None:
    """Print the results for people."""
    headers = ["engine", "test", "depth ", "threads ", "tokens/s ", "spread", "bytes/s ", "op/s "]
    print_table(
        [*headers, "of peak "],
        [
            (
                r.engine,
                r.test,
                r.depth,
                r.threads,
                f"{r.tok_s:.1f}",
                f"{r.tok_s_min:.1f} to {r.tok_s_max:.1f}",
                "" if r.bytes_s is None else scaled(r.bytes_s, "B/s"),
                "" if r.ops_s is None else scaled(r.ops_s, "op/s"),
                "" if r.share_of_peak is None else f"{r.share_of_peak:.0%}",
            )
            for r in results
        ],
    )
