"""``treadle plan``: the steps that a model's forward pass consists of, in order."""

from __future__ import annotations

from fnmatch import fnmatchcase
from statistics import median
from typing import Any

import click

from treadle.cli.load import load_model
from treadle.cli.options import load_options
from treadle.cli.progress import ProgressBar
from treadle.cli.speed import Peaks, Work, measured_peaks, operations
from treadle.cli.table import n_bytes, print_json, print_table, scaled
from treadle.errors import TreadleError

RUNS = 5  # of a profile


@click.command()
@click.argument("model", type=click.Path())
@click.option("--match", default="*", metavar="GLOB", help="Only steps whose label matches: L5.*")
@click.option(
    "-p", "--tokens", type=click.IntRange(1), default=1, metavar="N",
    help="Plan for N tokens at once: 1, the default, is decoding.",
)  # fmt: skip
@click.option("--profile", is_flag=True, help="Run it, and show what each step took.")
@click.option("--json", "as_json", is_flag=True, help="Print a list of objects.")
@load_options
def command(
    model: str, match: str, tokens: int, profile: bool, as_json: bool, load: dict[str, Any]
) -> None:
    """Print the steps of MODEL's forward pass: label, kernel, shape, bytes, operations."""
    with ProgressBar() as progress:
        loaded = load_model(model, progress, **load)
        seconds = profile_of(loaded, tokens, progress) if profile else {}
        peaks: Peaks = measured_peaks(loaded, progress) if profile else {}
    steps = [step for step in loaded.plan(tokens) if fnmatchcase(step.label, match)]
    if not steps:
        raise TreadleError(f"no step's label matches '{match}'")
    rows = [row_of(step, tokens, seconds.get(step.label), peaks) for step in steps]
    if as_json:
        print_json(rows)
    else:
        print_plan(rows, profile)


def profile_of(model: Any, n_tokens: int, progress: ProgressBar) -> dict[str, float]:
    """Return the median seconds of each step, by label, over RUNS runs behind one to warm up."""
    runs = []
    for i in range(RUNS + 1):
        progress("timing the steps", i, RUNS + 1)
        runs.append(dict(model.profile(n_tokens)))
    return {step: median(run[step] for run in runs[1:]) for step in runs[0]}


def row_of(step: Any, n_tokens: int, seconds: float | None, peaks: Peaks) -> dict[str, Any]:
    """Tell one step's facts, and its speed if it was run."""
    n_flops = operations(step, n_tokens)
    row = {
        "label": step.label,
        "kernel": step.kernel,
        "shape": list(step.shape),
        "n_bytes": step.n_bytes,
        "n_flops": n_flops,
    }
    if seconds:
        row["seconds"] = seconds
        row["bytes_s"] = step.n_bytes / seconds
        row["ops_s"] = n_flops / seconds
        row["share_of_peak"] = Work.of([step], n_tokens, 1, peaks).least_s / seconds
    return row


def print_plan(rows: list[dict[str, Any]], profile: bool) -> None:
    """Print the rows, and their sum."""
    headers = ["label", "kernel", "shape", "bytes ", "operations "]
    total = [f"{len(rows)} steps", "", ""]
    total += [n_bytes(sum(row["n_bytes"] for row in rows))]
    total += [scaled(sum(row["n_flops"] for row in rows))]
    if profile:
        headers += ["µs ", "bytes/s ", "op/s ", "of peak "]
        total += [f"{1e6 * sum(row.get('seconds', 0.0) for row in rows):.1f}", "", "", ""]
    print_table(headers, [*(cells_of(row, profile) for row in rows), total])


def cells_of(row: dict[str, Any], profile: bool) -> list[str]:
    """Write one row for people."""
    cells = [
        row["label"],
        row["kernel"],
        "×".join(map(str, row["shape"])),
        n_bytes(row["n_bytes"]),
        scaled(row["n_flops"]),
    ]
    if not profile:
        return cells
    if "seconds" not in row:
        return [*cells, "-", "-", "-", "-"]
    return [
        *cells,
        f"{1e6 * row['seconds']:.1f}",
        scaled(row["bytes_s"], "B/s"),
        scaled(row["ops_s"], "op/s"),
        f"{row['share_of_peak']:.0%}",
    ]
