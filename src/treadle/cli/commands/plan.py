"""``treadle plan``: the steps of a model's forward pass, in order."""

from __future__ import annotations

from fnmatch import fnmatchcase
from math import fsum
from pathlib import Path
from typing import Any

import click

from treadle.base.humanize import counted, n_bytes, scaled
from treadle.cli.load import find_model, load_model
from treadle.cli.options import IMAGE_MAX_TOKENS, ModelType, load_options
from treadle.cli.profile import Profile, facts_of, kinds_of, profile_of
from treadle.cli.projector import (
    ImageSize,
    ImageSizeType,
    is_projector,
    open_on_device,
    prepare,
    steps_of,
)
from treadle.cli.speed import Peaks, explain_caches, measured_peaks, peaks_of
from treadle.cli.ui.progress import ProgressBar
from treadle.cli.ui.table import heading, print_json, print_table, say
from treadle.errors import TreadleError

ROOM = 4096  # least context of a profile in tokens: smaller ones have other plans
AGREES = 0.03  # of the whole: a larger difference of the steps' sum is explained
SPEEDS = ["µs ", "of time ", "bytes/s ", "op/s ", "of peak"]


@click.command()
@click.argument("model", type=ModelType())
@click.option("--match", default="*", metavar="GLOB", help="Only steps whose label matches: L5.*")
@click.option(
    "-p",
    "--tokens",
    type=click.IntRange(1),
    default=1,
    metavar="N",
    help="Plan for N tokens at once: 1, the default, is decoding.",
)
@click.option(
    "-d",
    "--depth",
    type=click.IntRange(0),
    default=0,
    metavar="N",
    help="Tokens already in the KV cache, which attention reads.",
)
@click.option("--profile", is_flag=True, help="Run it, and show the time of each step.")
@click.option(
    "--json", "as_json", is_flag=True, help="Print JSON: a list; with --profile, an object."
)
@click.option(
    "--image",
    "size",
    metavar="WxH",
    type=ImageSizeType(),
    help="Of a projector file: the size of the picture, in pixels; 512x512 by default.",
)
@IMAGE_MAX_TOKENS
@load_options
def command(
    model: str,
    match: str,
    tokens: int,
    depth: int,
    profile: bool,
    as_json: bool,
    size: ImageSize | None,
    image_max_tokens: int | None,
    load: dict[str, Any],
) -> None:
    """Print the steps of MODEL's forward pass: label, kernel, shape, bytes, operations.

    MODEL may be a projector file (mmproj): the steps are those of encoding a picture.
    """
    with ProgressBar() as progress:
        path = find_model(model, progress)
        if is_projector(path):
            if tokens != 1 or depth:
                raise click.UsageError("-p and -d are for text: --image WxH is a picture's size")
            size = size or ImageSize(512, 512)
            show_projector(path, match, size, image_max_tokens, load, profile, as_json, progress)
            return
    if size or image_max_tokens:
        raise click.UsageError("--image and --image-max-tokens are for a projector file (mmproj)")
    room = max(ROOM, depth + tokens) if profile else 0
    peaks: Peaks = {}
    profiled: Profile | None = None
    with ProgressBar() as progress:
        loaded = load_model(model, progress, room=room, **load)
        if tokens > (most := loaded.engine.max_tokens):
            raise click.UsageError(f"-p {tokens}: at most {most} tokens fit one run of this model")
        if depth and loaded.config.main_output != "logits":
            raise click.UsageError(
                "-d: this model processes a text in one run, with no tokens before it"
            )
        steps = list(loaded.plan(tokens))
        shown = [step for step in steps if fnmatchcase(step.label, match)]
        if not shown:
            raise TreadleError(f"no step's label matches '{match}'")
        if profile:
            profiled = profile_of(loaded, tokens, depth, progress)
            peaks = measured_peaks(loaded, progress)
    parts = [(depth, tokens)]
    rows = [row_of(step, parts, profiled, peaks) for step in shown]
    if profiled is None:
        print_json(rows) if as_json else print_plan(rows, False)
        return
    kinds = kinds_of(steps, profiled, parts, peaks)
    if as_json:
        totals = {"sum_s": profiled.sum_s, "whole_s": profiled.whole_s, "ratio": profiled.ratio}
        print_json({"steps": rows, "kinds": kinds, **totals, "peaks": dict(peaks)})
        return
    print_plan(rows, True)
    print_kinds(kinds, profiled)
    note = explain_caches(peaks)
    if note:
        say(note)


def show_projector(
    path: Path,
    match: str,
    size: ImageSize,
    max_rows: int | None,
    load: dict[str, Any],
    profile: bool,
    as_json: bool,
    progress: ProgressBar,
) -> None:
    """Print the steps of encoding a picture of ``size``, of at most ``max_rows`` rows, and of a
    sound if the projector reads sounds. ``match``: pattern of the labels to print; ``load``: values
    of the loading options, of which threads and device are used.
    """
    from treadle.devices import open_device
    from treadle.machine.topology import usable_threads

    n_threads = load["threads"] or usable_threads()[0]
    device = open_device(load["device"] or "cpu", None, n_threads, progress)
    projector = open_on_device(path, device)
    try:
        peaks: Peaks = {}
        rows = []
        for prepared in prepare(projector, size, max_rows):
            if profile:
                projector.encode(prepared)
                peaks = peaks_of(device, n_threads, progress)
            for each in steps_of(projector, prepared):
                timed = each.profile(progress) if profile else None
                rows += [each.row_of(step, timed, peaks) for step in each.steps]
    finally:
        projector.close()
        device.close()
    shown = [row for row in rows if fnmatchcase(row["label"], match)]
    if not shown:
        raise TreadleError(f"no step's label matches '{match}'")
    if profile:
        total_s = fsum(row["seconds"] for row in rows)
        for row in rows:  # shares of all plans, not each of its own
            row["share_of_time"] = row["seconds"] / total_s
    progress.close()
    print_json(shown) if as_json else print_plan(shown, profile)


def row_of(
    step: Any, parts: list[tuple[int, int]], profile: Profile | None, peaks: Peaks
) -> dict[str, Any]:
    """Return a step's label, kernel, shape, bytes and operations, and its speed if it was timed
    (``profile``). ``parts``: (cached tokens, new tokens) of each sequence.
    """
    row = {"label": step.label, "kernel": step.kernel, "shape": list(step.shape)}
    return row | facts_of([step], parts, profile, peaks)


def print_plan(rows: list[dict[str, Any]], profile: bool) -> None:
    """Print a table of the steps, with times and speeds if ``profile``, and their sum."""
    headers = ["label", "kernel", "shape", "bytes ", "operations "]
    total = [counted(len(rows), "step"), "", ""]
    total += [n_bytes(sum(row["n_bytes"] for row in rows))]
    total += [scaled(sum(row["n_flops"] for row in rows))]
    if profile:
        headers += SPEEDS
        total += [f"{1e6 * sum(row['seconds'] for row in rows):.1f}"]
        total += [f"{sum(row['share_of_time'] for row in rows):.1%}", "", "", ""]
    optional = ("shape", "operations ", "bytes ", "kernel") if profile else ("shape", "operations ")
    lines = [*(cells_of(row, profile) for row in rows), total]
    print_table(headers, lines, optional=optional, folding="kernel")


def cells_of(row: dict[str, Any], profile: bool) -> list[str]:
    """Return the table cells of one step: label, kernel, shape, and those of ``work_cells``."""
    cells = [row["label"], row["kernel"], "×".join(map(str, row["shape"]))]
    return cells + work_cells(row, profile)


def work_cells(row: dict[str, Any], profile: bool) -> list[str]:
    """Return the cells of bytes, operations and, with ``profile``, time, speeds and share of a
    peak. Speeds of a step without bytes or operations are empty.
    """
    cells = [n_bytes(row["n_bytes"]), scaled(row["n_flops"])]
    if not profile:
        return cells
    return [
        *cells,
        f"{1e6 * row['seconds']:.1f}",
        f"{row['share_of_time']:.1%}",
        scaled(row["bytes_s"], "B/s") if row["n_bytes"] else "",
        scaled(row["ops_s"], "op/s") if row["n_flops"] else "",
        f"{row['share_of_peak']:.0%} {row['peak']}" if row["peak"] else "",
    ]


def print_kinds(kinds: list[dict[str, Any]], profile: Profile) -> None:
    """Print totals by kind of step (``kinds``: as ``kinds_of`` returns them), and their sum beside
    the time of one whole run.
    """
    print()
    heading("by kind, of all steps")
    headers = ["kind", "steps ", "bytes ", "operations ", *SPEEDS]
    print_table(
        headers,
        [[row["kind"], row["n_steps"], *work_cells(row, True)] for row in kinds],
        optional=("operations ", "bytes "),
    )
    print()
    say(
        f"sum of the steps {1e6 * profile.sum_s:.1f} µs, "
        f"one whole run {1e6 * profile.whole_s:.1f} µs, ratio {profile.ratio:.3f}"
    )
    outside_s = profile.whole_s - profile.sum_s
    if outside_s > AGREES * profile.whole_s:
        say(
            f"the other {1e6 * outside_s:.1f} µs are spent in Python, around the steps: laying "
            "out the "
            "batch, waking the threads, copying the logits"
        )
    elif outside_s < -AGREES * profile.whole_s:
        say("the steps took longer when timed one by one: other programs interfered; run again")
