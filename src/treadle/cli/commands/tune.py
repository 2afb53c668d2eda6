"""``treadle tune``: the fastest tile of each kernel on this machine, measured and saved."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import click

from treadle.base.humanize import counted
from treadle.cli.options import Picture, refuse_options
from treadle.cli.tune_results import (
    Peaks,
    ProductShape,
    TuneResult,
    print_results,
    rows_of,
    sweep_of,
)
from treadle.cli.ui.progress import ProgressBar
from treadle.cli.ui.table import print_json, remark, say
from treadle.formats import FORMATS, Format, by_name
from treadle.formats.mlx import named
from treadle.machine.topology import busy_warning
from treadle.profiling.tune import CROSSOVER, KERNELS

MEASURING = ("kernel", "formats", "k", "m", "n", "threads", "repeat", "plot", "force")
TUNABLE = [fmt for fmt in FORMATS.values() if fmt.codes or fmt.load]  # kernels can read them


class FormatName(click.Choice[str]):
    """Parameter type of a weight format: one of the listed names or of MLX's, which are too many to
    list.
    """

    def convert(self, value: Any, param: click.Parameter | None, ctx: click.Context | None) -> Any:
        """Return the format's name in its own spelling; fail for an unknown one."""
        made = named(str(value).upper())
        return made.name if made else super().convert(value, param, ctx)


@click.command()
@click.argument("kernel", type=click.Choice(KERNELS), required=False)
@click.option(
    "--format",
    "formats",
    multiple=True,
    type=FormatName([fmt.name for fmt in TUNABLE], case_sensitive=False),
    help="Weight format; may be repeated. By default all except MLX's, such as MLX4_G64.",
)
@click.option("--k", type=click.IntRange(1), default=2048, help="Weights per row.")
@click.option("--m", type=click.IntRange(1), default=2048, help="Rows of weights.")
@click.option("--n", type=click.IntRange(1), default=512, help="Tokens of a prompt, for gemm.")
@click.option(
    "-t",
    "--threads",
    type=click.IntRange(1, 1024),
    help="Number of threads; `treadle doctor` shows the default.",
)
@click.option(
    "-r",
    "--repeat",
    type=click.IntRange(1),
    default=12,
    metavar="N",
    help="Runs of each configuration, hot and cold; the shortest time counts.",
)
@click.option("--plot", type=Picture(), help="Draw a chart (SVG).")
@click.option("--dry-run", is_flag=True, help="Do not write a file.")
@click.option("--force", is_flag=True, help="Save results even if the machine was busy.")
@click.option("--reset", is_flag=True, help="Remove this machine's saved results; measure nothing.")
@click.option("--json", "as_json", is_flag=True, help="Print one JSON object.")
@click.pass_context
def command(
    ctx: click.Context,
    kernel: str | None,
    formats: tuple[str, ...],
    k: int,
    m: int,
    n: int,
    threads: int | None,
    repeat: int,
    plot: Path | None,
    dry_run: bool,
    force: bool,
    reset: bool,
    as_json: bool,
) -> None:
    """Find the fastest tile sizes of KERNEL, or of all kernels, and save them for later runs.

    Each configuration's results are checked, then timed with caches hot (the same weights again)
    and cold (the next of many copies); the fastest cold one wins. KERNEL matrix is gemm on matrix
    registers, if the CPU has any; crossover compares gemv with gemm for a few tokens.

    Results are not saved, and the exit code is 1, if the threads got less than 80 % of their
    processor time.
    """
    from treadle.devices.cpu import tuned_rows
    from treadle.machine.topology import cpu_name, usable_threads
    from treadle.profiling.report import row_in_use

    isa = row_in_use()
    if reset:
        refuse_options(ctx, MEASURING, "cannot be used with --reset, which measures nothing")
        path = tuned_rows.tuned_row(isa).path
        say_reset(None if dry_run else tuned_rows.reset(isa), path, as_json)
        return
    if kernel == "matrix" and isa.matrix is None:
        raise click.UsageError(f"{isa.name} has no matrix registers to tune for")
    if plot is not None:
        from treadle.cli.ui.svg import check_place

        check_place(plot)
    if not dry_run:
        tuned_rows.check_place(isa)  # before minutes of measuring
    n_threads = threads or usable_threads()[0]
    wanted = [by_name(name) for name in dict.fromkeys(formats)] or TUNABLE
    shape = ProductShape(k, m, n)
    kernels = [kernel] if kernel else list(KERNELS)
    with ProgressBar() as progress:
        peaks, results = measure(wanted, isa, shape, n_threads, kernels, repeat, progress)
    doubtful = [] if force else [result for result in results if result.doubt]
    warn(results, [] if dry_run else doubtful)
    sure = [result.table for result in results if result not in doubtful]
    saved = tuned_rows.save(isa, *sure) if sure and not dry_run else None
    about = {"isa": isa.name, "cpu": cpu_name(), "threads": n_threads}
    if as_json:
        kept = {"saved": saved and str(saved), "not_kept": {r.format: r.doubt for r in doubtful}}
        print_json({**about, **as_object(results, shape, peaks), **kept})
    else:
        print_results(results, shape, about, peaks)
        if saved is not None:
            say(f"saved in {saved}: later runs use it")
    if plot is not None:  # after the results: a full disk loses only the chart
        from treadle.cli.tune_plot import draw
        from treadle.cli.ui.svg import origin
        from treadle.files.target import write_text

        rows = [list(rows_of(s, result, peaks)) for result in results for s in result.sweeps]
        subtitle = f"K {k}, M {m}, {counted(n_threads, 'thread')}"
        write_text(plot, draw(rows, subtitle, origin([isa.name])))
    if doubtful and not dry_run:
        refuse(doubtful)


def as_object(results: Sequence[TuneResult], shape: ProductShape, peaks: Peaks) -> dict[str, Any]:
    """Return the results of all formats as one JSON object: shape, peaks, sweeps, crossovers."""
    return {
        "k": shape.k,
        "m": shape.m,
        "peaks": dict(peaks),
        "sweeps": [sweep_of(s, result, peaks) for result in results for s in result.sweeps],
        "crossovers": [vars(r.crossover) for r in results if r.crossover],
        "processor_time_share": {r.format: r.cpu_share for r in results},
    }


def refuse(doubtful: Sequence[TuneResult]) -> None:
    """Report the results that were not saved, and why (``TuneResult.doubt``); exit with code 1."""
    by_reason: dict[str, list[str]] = {}
    for result in doubtful:
        by_reason.setdefault(str(result.doubt), []).append(result.format)
    for reason, formats in by_reason.items():
        remark(
            f"error: {', '.join(formats)}: not saved: {reason} and measure again, or save it "
            "with --force"
        )
    raise click.exceptions.Exit(1)


def measure(
    formats: Sequence[Format],
    isa: Any,
    shape: ProductShape,
    n_threads: int,
    kernels: Sequence[str],
    repeat: int,
    progress: ProgressBar,
) -> tuple[Peaks, list[TuneResult]]:
    """Time the configurations of ``kernels`` for each format, on products of ``shape`` with
    ``n_threads``; return this machine's peaks and a result for each format. ``isa``: row of the
    instruction set; ``repeat``: runs of each configuration.
    """
    from treadle.devices.cpu.tuned_rows import tuned_row
    from treadle.profiling.peaks import measure_peaks
    from treadle.profiling.trial import KernelTrial
    from treadle.profiling.tune import tune

    for fmt in formats:
        fmt.row_bytes(shape.k)  # raises for a wrong K before minutes of measuring
    peaks = measure_peaks(isa, n_threads, progress=progress).as_dict()
    old = tuned_row(isa).table
    results = []
    for fmt in formats:
        n_most = max(shape.n, *CROSSOVER)
        trial = KernelTrial(fmt, isa, shape.k, shape.m, n_most, n_threads)
        try:
            sweeps, crossed, found = tune(
                trial,
                fmt,
                isa,
                shape.k,
                shape.n,
                kernels,
                table=old,
                runs=repeat,
                progress=progress,
            )
        finally:
            trial.close()
        results.append(
            TuneResult(
                fmt.name,
                sweeps,
                crossed,
                trial.n_bytes,
                trial.n_ops(1),
                found,
                trial.cpu_share,
                trial.from_memory,
            )
        )
    return peaks, results


def warn(results: Sequence[TuneResult], refused: Sequence[TuneResult]) -> None:
    """Warn on standard error of configurations with wrong results, and of a busy machine.
    ``refused``: results whose busy machine ``refuse`` reports instead.
    """
    share = min((result.cpu_share for result in results if result not in refused), default=1.0)
    if warning := busy_warning([share], ", so the best may be chance; stop them and measure again"):
        remark(warning)
    for sweep in (s for result in results for s in result.sweeps):
        for variant in sweep.variants:
            if variant.problem is not None:
                remark(f"{variant.spec.name} is skipped: {variant.problem}")


def say_reset(removed: Path | None, path: str, as_json: bool) -> None:
    """Print which file of saved results --reset removed or, for a dry run (``removed`` None), would
    remove: ``path``, if it exists.
    """
    there = removed is None and Path(path).is_file()
    if as_json:
        print_json({"removed": removed and str(removed), "would_remove": path if there else None})
    elif removed is not None:
        print(f"removed {removed}: later runs use the shipped tiles")
    else:
        print(f"would remove {path}" if there else "nothing was tuned here: nothing to remove")
