"""``treadle warm``: compile what a model needs before its first use."""

from __future__ import annotations

import os
import time
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from treadle.cli.load import load_model
from treadle.cli.options import ModelType, plan_load_options
from treadle.cli.ui.progress import ProgressBar
from treadle.cli.ui.table import say, show
from treadle.errors import CacheError
from treadle.files.splits import shown_name

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    from treadle.engine.engine import Engine


@click.command()
@click.argument("model", type=ModelType())
@click.option(
    "--sequences",
    type=click.IntRange(1, 4096),
    metavar="N",
    help="Size of the KV cache in full contexts, as for `treadle serve`.",
)
@click.option("--deterministic", is_flag=True, help="As for `treadle serve`.")
@click.option("--json", "as_json", is_flag=True, help="Print one JSON object.")
@plan_load_options
def command(
    model: str, sequences: int | None, deterministic: bool, as_json: bool, load: dict[str, Any]
) -> None:
    """Compile all kernels that run, chat and serve need for MODEL, so that its first use does not
    wait: when a container's image is built, say.

    Give the same options as later: --kv, --threads, --device, --lora, --draft and --mmproj change
    which kernels are needed. Kernels are for this machine's kind of CPU.
    """
    from treadle.api.engine_plans import compile_plans
    from treadle.cli.speech import load_recognizer, speech_model_path

    folder = writable_cache()
    began = time.perf_counter()
    with ProgressBar() as progress:
        if (speech := speech_model_path(model, progress)) is not None:
            from treadle.speech.warm import warm_model

            with load_recognizer(speech, progress, load) as recognizer:
                warm_model(recognizer.model)
                report = report_of([recognizer.model.engine], speech, began, folder)
            return show(report, as_json, print_report)
    with (
        ProgressBar() as progress,
        load_model(
            model, progress, n_sequences=sequences, deterministic=deterministic, **load
        ) as loaded,
    ):
        compile_plans(loaded)
        drafter = loaded.stepper.scheduler.drafting.drafter
        engines = [loaded.engine, *([drafter.engine] if drafter else [])]
        report = report_of(engines, loaded.path, began, folder)
    show(report, as_json, print_report)


def writable_cache() -> Path:
    """Return the folder of compiled kernels. Raises CacheError if nothing can be stored there."""
    from treadle.jit.cache import checked_folder

    folder = checked_folder()
    if not os.access(folder, os.W_OK | os.X_OK):
        raise CacheError(
            f"kernel cache {folder} is not writable; set TREADLE_CACHE to a writable folder"
        )
    return folder


def report_of(engines: Sequence[Engine], path: Path, began: float, folder: Path) -> dict[str, Any]:
    """Return what was compiled and found in the cache, and the seconds since ``began``, a
    ``perf_counter`` time from before loading.
    """
    tallies = {id(engine.kernels): engine.kernels for engine in engines}.values()
    return {
        "model": str(path),
        "isa": engines[0].device.isa.name,
        "n_compiled": sum(tally.n_compiled for tally in tallies),
        "n_cached": sum(tally.n_cached for tally in tallies),
        "seconds": time.perf_counter() - began,
        "folder": str(folder),
    }


def print_report(report: Mapping[str, Any]) -> None:
    """Print the report of ``report_of`` as text."""
    n = report["n_compiled"]
    there = f", {report['n_cached']} were there" if report["n_cached"] else ""
    say(
        f"{shown_name(Path(report['model']))}: {n} kernel{'' if n == 1 else 's'} compiled for "
        f"{report['isa']} in {report['seconds']:.1f} s{there}; they are in {report['folder']}"
    )
