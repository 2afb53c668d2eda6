"""``treadle tune``: the fastest shape of each kernel on this machine, measured and kept."""

from __future__ import annotations

import sys
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from treadle.cli.progress import ProgressBar
from treadle.cli.table import heading, print_json, print_table, scaled
from treadle.formats import FORMATS, by_name
from treadle.formats.mlx import named

if TYPE_CHECKING:
    from treadle.formats import Format
    from treadle.runtime.tune import Crossover, Sweep, Variant

Peaks = Mapping[str, float]  # operations a second of each kind, and "bytes_s"

KERNELS = ("gemm", "matrix", "gemv", "crossover")
TUNABLE = [fmt for fmt in FORMATS.values() if fmt.codes or fmt.load]  # that kernels read
ENOUGH = 0.9  # of the processor time asked for: with less, the least times are luck


class FormatName(click.Choice[str]):
    """A format of the table, or one of MLX's, which are too many to list."""

    def convert(self, value: Any, param: click.Parameter | None, ctx: click.Context | None) -> Any:
        """Read it."""
        made = named(str(value).upper())
        return made.name if made else super().convert(value, param, ctx)


@dataclass(frozen=True)
class Shape:
    """Of the product: rows of K weights, M of them, N tokens for gemm."""

    k: int
    m: int
    n: int


@dataclass(frozen=True)
class Result:
    """What was found out about one format."""

    sweeps: list[Sweep]
    crossover: Crossover | None
    n_bytes: int  # of the weights
    ops_a_token: int
    cpu_share: float = 1.0  # of the processor time that the threads asked for, what they got


@click.command()
@click.argument("kernel", type=click.Choice(KERNELS), required=False)
@click.option(
    "--format", "formats", multiple=True,
    type=FormatName([fmt.name for fmt in TUNABLE], case_sensitive=False),
    help="Weight format, or MLX4_G64 and its kin; may be repeated. By default all but those.",
)  # fmt: skip
@click.option("--k", type=click.IntRange(1), default=2048, help="Weights in a row.")
@click.option("--m", type=click.IntRange(1), default=2048, help="Rows of weights.")
@click.option("--n", type=click.IntRange(1), default=512, help="Tokens of a prompt, for gemm.")
@click.option("-t", "--threads", type=click.IntRange(1, 1024), help="By default as `doctor` says.")
@click.option(
    "-r", "--repeat", type=click.IntRange(1), default=12, metavar="N",
    help="Runs of each configuration, hot and cold alike; the least time counts.",
)  # fmt: skip
@click.option("--plot", type=click.Path(dir_okay=False, path_type=Path), help="Draw it: an SVG.")
@click.option("--dry-run", is_flag=True, help="Keep nothing.")
@click.option("--reset", is_flag=True, help="Forget what was measured here; measure nothing.")
@click.option("--json", "as_json", is_flag=True, help="Print one JSON object.")
def command(
    kernel: str | None,
    formats: tuple[str, ...],
    k: int,
    m: int,
    n: int,
    threads: int | None,
    repeat: int,
    plot: Path | None,
    dry_run: bool,
    reset: bool,
    as_json: bool,
) -> None:
    """Measure the fastest shape of KERNEL, or of all, and keep it for every later run.

    Each configuration's results are checked, then timed with caches hot (the same weights again)
    and cold (the next of many copies); the quickest cold one wins. KERNEL matrix is gemm on matrix
    registers, where there are any; crossover compares gemv with gemm at a few tokens.
    """
    from treadle.runtime import tuned
    from treadle.runtime.describe import row_in_use
    from treadle.runtime.machine import cpu_name, usable_threads

    isa = row_in_use()
    if reset:
        path = tuned.tuned_row(isa).path
        say_reset(None if dry_run else tuned.reset(isa), path, as_json)
        return
    if kernel == "matrix" and isa.matrix is None:
        raise click.UsageError(f"{isa.name} has no matrix registers to tune for")
    n_threads = threads or usable_threads()[0]
    wanted = [by_name(name) for name in dict.fromkeys(formats)] or TUNABLE
    shape, kernels = Shape(k, m, n), [kernel] if kernel else list(KERNELS)
    with ProgressBar() as progress:
        peaks, results, table = measure(wanted, isa, shape, n_threads, kernels, repeat, progress)
    warn(results)
    saved = None if dry_run else tuned.save(isa, table)
    about = {"isa": isa.name, "cpu": cpu_name(), "threads": n_threads}
    if plot is not None:
        from treadle.cli.tune_plot import draw

        rows = [list(rows_of(s, result, peaks)) for result in results for s in result.sweeps]
        plot.write_text(draw(rows, f"{about['cpu']}, {isa.name}, {n_threads} threads"), "utf-8")
    if as_json:
        print_json(
            {
                **about,
                "k": k,
                "m": m,
                "peaks": dict(peaks),
                "sweeps": [sweep_of(s, result, peaks) for result in results for s in result.sweeps],
                "crossovers": [vars(r.crossover) for r in results if r.crossover],
                "saved": saved and str(saved),
            }
        )
        return
    print_results(results, shape, about, peaks)
    if saved is not None:
        print(f"kept in {saved}: later runs use it")


def measure(
    formats: Sequence[Format],
    isa: Any,
    shape: Shape,
    n_threads: int,
    kernels: Sequence[str],
    repeat: int,
    progress: ProgressBar,
) -> tuple[Peaks, list[Result], Any]:
    """Sweep every format; give this machine's peaks, the results, and the table to keep."""
    from treadle.runtime.peaks import measure_peaks
    from treadle.runtime.trial import Trial
    from treadle.runtime.tune import CROSSOVER, tune
    from treadle.runtime.tuned import tuned_row

    for fmt in formats:
        fmt.row_bytes(shape.k)  # an error of use is told before minutes have passed
    peaks = measure_peaks(isa, n_threads, progress=progress).as_dict()
    old, table, results = tuned_row(isa).table, None, []
    for fmt in formats:
        n_most = max(shape.n, *CROSSOVER)
        trial = Trial(fmt, isa, shape.k, shape.m, n_most, n_threads)
        try:
            sweeps, crossed, found = tune(
                trial, fmt, isa, shape.k, shape.n, kernels,
                table=old, runs=repeat, progress=progress,
            )  # fmt: skip
        finally:
            trial.close()
        results.append(Result(sweeps, crossed, trial.n_bytes, trial.n_ops(1), trial.cpu_share))
        table = table.updated(found) if table is not None else found
    return peaks, results, table


def rows_of(sweep: Sweep, result: Result, peaks: Peaks) -> Iterator[dict[str, Any]]:
    """Each configuration as numbers: times of one product, speeds, shares of this machine's limit.

    ``share_of_peak`` is hot, of the arithmetic peak; ``share_of_limit`` is cold, of the speed that
    arithmetic or reading memory allows, whichever is less.
    """
    n_ops = result.ops_a_token * sweep.tokens
    for variant in sweep.variants:
        row: dict[str, Any] = {
            "kernel": sweep.kernel,
            "format": sweep.format,
            "tokens": sweep.tokens,
            "fields": dict(variant.fields),
            "best": variant.best,
            "shipped": variant.shipped,
            "problem": variant.problem,
        }
        if variant.problem is None:
            op_s = peaks.get(variant.spec.act, peaks["f32"])
            least_s = max(n_ops / op_s, result.n_bytes / peaks["bytes_s"])
            row |= {
                "hot_s": variant.hot_s,
                "hot_ops_s": n_ops / variant.hot_s,
                "share_of_peak": n_ops / op_s / variant.hot_s,
                "cold_s": variant.cold_s,
                "cold_ops_s": n_ops / variant.cold_s,
                "cold_bytes_s": result.n_bytes / variant.cold_s,
                "share_of_limit": least_s / variant.cold_s,
            }
        yield row


def sweep_of(sweep: Sweep, result: Result, peaks: Peaks) -> dict[str, Any]:
    """One sweep as JSON has it."""
    return {
        "kernel": sweep.kernel,
        "format": sweep.format,
        "tokens": sweep.tokens,
        "left_out": sweep.left_out,
        "gain": sweep.gain,
        "configurations": list(rows_of(sweep, result, peaks)),
    }


HEADERS = (
    "configuration", "hot us ", "hot GOP/s ", "of peak ", "cold us ", "cold GOP/s ", "cold GB/s ",
    "of limit ", "",
)  # fmt: skip


def print_results(
    results: Sequence[Result], shape: Shape, about: dict[str, Any], peaks: Peaks
) -> None:
    """Print a table for each sweep, and where gemv, gemm and matrix registers cross."""
    rates = ", ".join(
        f"{name} {scaled(rate, 'op/s')}" for name, rate in peaks.items() if name != "bytes_s"
    )
    print(f"{about['cpu']}, {about['isa']}, {about['threads']} threads")
    print(f"peaks: {rates}, memory {scaled(peaks['bytes_s'], 'B/s')}")
    for result in results:
        for sweep in result.sweeps:
            tokens = "1 token" if sweep.tokens == 1 else f"{sweep.tokens} tokens"
            print()
            heading(f"{sweep.kernel} {sweep.format}, K {shape.k}, M {shape.m}, {tokens}")
            print_table(HEADERS, map(cells, rows_of(sweep, result, peaks), sweep.variants))
            print(summary(sweep))
    crossed = [result.crossover for result in results if result.crossover]
    if crossed:
        print()
        heading(f"gemv against gemm, cold, K {shape.k}, M {shape.m}: us for so many tokens")
        print_crossovers(crossed)


def print_crossovers(crossed: Sequence[Crossover]) -> None:
    """A line for each format; with columns for matrix registers where any has times of them."""
    numbers, on_matrix = list(crossed[0].gemv_s), any(c.matrix_s for c in crossed)
    kernels = ("gemv", "gemm", "matrix")[: 3 if on_matrix else 2]
    lines = []
    for c in crossed:
        times = (c.gemv_s, c.gemm_s, c.matrix_s)[: len(kernels)]
        cells = [f"{1e6 * s[n]:.1f}" if n in s else "" for n in numbers for s in times]
        vectors = "" if c.vector_tokens is None else str(c.vector_tokens)
        lines.append((c.format, *cells, str(c.tokens), *([vectors] if on_matrix else [])))
    columns = [f"{kernel} {n} " for n in numbers for kernel in kernels]
    last = ["gemv up to ", *(["vectors up to "] if on_matrix else [])]
    print_table(["format", *columns, *last], lines)


def cells(row: dict[str, Any], variant: Variant) -> list[str]:
    """One line of a table."""
    if row["problem"] is not None:
        return [variant.name, *[""] * 7, "WRONG, see above"]
    marks = [word for word in ("best", "shipped") if row[word]]
    return [
        variant.name,
        f"{1e6 * row['hot_s']:.1f}",
        f"{row['hot_ops_s'] / 1e9:.1f}",
        f"{row['share_of_peak']:.0%}",
        f"{1e6 * row['cold_s']:.1f}",
        f"{row['cold_ops_s'] / 1e9:.1f}",
        f"{row['cold_bytes_s'] / 1e9:.1f}",
        f"{row['share_of_limit']:.0%}",
        ", ".join(marks),
    ]


def summary(sweep: Sweep) -> str:
    """What a sweep comes to, in a line."""
    parts = []
    if not sweep.sound:
        parts.append("no configuration gives the right results")
    elif sweep.best.shipped:
        parts.append(f"best: {sweep.best.name}, as shipped")
    else:
        gain = sweep.gain
        than = "" if gain is None else f", {gain - 1:.0%} faster than shipped"
        parts.append(f"best: {sweep.best.name}{than}")
    if sweep.left_out:
        parts.append(f"{sweep.left_out} left out: too large for the registers, or no whole panels")
    return "; ".join(parts)


def warn(results: Sequence[Result]) -> None:
    """Say on standard error what may never be used, and what may be chance."""
    share = min(result.cpu_share for result in results)
    if share < ENOUGH:
        print(
            f"treadle: the threads got {share:.0%} of the processor time they asked for: other "
            "programs run, so the best may be so by chance; stop them and measure again",
            file=sys.stderr,
        )
    for sweep in (s for result in results for s in result.sweeps):
        for variant in sweep.variants:
            if variant.problem is not None:
                print(
                    f"treadle: {variant.spec.name} is left alone: {variant.problem}",
                    file=sys.stderr,
                )


def say_reset(removed: Path | None, path: str, as_json: bool) -> None:
    """Tell what --reset did, or would have done."""
    if as_json:
        there = removed is None and Path(path).is_file()
        print_json({"removed": removed and str(removed), "would_remove": path if there else None})
    elif removed is not None:
        print(f"removed {removed}: later runs use what is shipped")
    else:
        there = Path(path).is_file()
        print(f"would remove {path}" if there else "nothing was tuned here: nothing to remove")
