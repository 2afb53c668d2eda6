"""``treadle list``: the models on this machine."""

from __future__ import annotations

import time
from collections.abc import Sequence
from typing import Any

import click

from treadle.base.humanize import n_bytes, n_weights
from treadle.catalog.names import fitting, name_models, resume_name
from treadle.catalog.stored import StoredModel, find_stored
from treadle.cli.model_report import ago, fits, progress_of, rate, reads, report_of
from treadle.cli.ui.progress import ProgressBar
from treadle.cli.ui.table import print_json, print_table, printable, remark, say


@click.command()
@click.argument("pattern", required=False)
@click.option("--json", "as_json", is_flag=True, help="Print a list of objects.")
def command(pattern: str | None, as_json: bool) -> None:
    """List the models on this machine, those whose names PATTERN fits: in the cache of the Hugging
    Face hub, and in the folder that the variable TREADLE_MODELS names.

    The names are those that every command takes as MODEL. "fits" says whether the model, with the
    default context, fits into the memory of this machine; tokens/s are of the last `treadle bench`.
    """
    models = find_stored()
    named = name_models(models)
    if pattern is not None:
        wanted = fitting(pattern, models)
        named = [each for each in named if each.model in wanted or pattern.lower() in each.name]
    with ProgressBar() as progress:
        reports = []
        for i, each in enumerate(named):
            progress("reading headers", i, len(named))
            reports.append(report_of(each))
        progress("reading headers", len(named), len(named))
    if as_json:
        print_json(reports)
    elif not reports:
        remark(nothing(pattern, models))
    else:
        print_models(reports, [each.model for each in named])


def nothing(pattern: str | None, models: Sequence[StoredModel]) -> str:
    """Return a message for an empty list: no name of ``models`` fits ``pattern``, or there are no
    models.
    """
    from treadle.hub.cache import cache_folder

    if pattern is not None and models:
        return f"no model's name fits '{pattern}'; `treadle list` shows all {len(models)}"
    return f"no models in {cache_folder()}: download one with `treadle pull hf:OWNER/REPO`"


def print_models(reports: Sequence[dict[str, Any]], models: Sequence[StoredModel]) -> None:
    """Print the list for people, the size of all, and a line for each unfinished or unsupported
    model.
    """
    now = time.time()
    headers = ["name", "type", "params ", "size ", "context ", "reads", "used", "fits", "tokens/s "]
    rows = [
        (
            report["name"],
            report["type"] or "",
            n_weights(report["n_parameters"]) if report["n_parameters"] else "",
            n_bytes(report["n_bytes"]) if report["state"] == "whole" else progress_of(model),
            report["n_context"] or "",
            reads(report),
            "never" if report["last_used"] is None else ago(now - report["last_used"]),
            fits(report),
            rate(report["text_tok_s"]),
        )
        for report, model in zip(reports, models, strict=True)
    ]
    print_table(headers, rows, optional=("context ", "used", "type", "params ", "reads"))
    total = sum(report["n_bytes"] for report in reports)
    if len(reports) > 1:
        say(f"{len(reports)} models, {n_bytes(total)}")
    for report, model in zip(reports, models, strict=True):
        if report["state"] == "partial":
            say(printable(f"{report['name']}: go on with treadle pull {resume_name(model)}"))
        elif report["problem"]:
            say(printable(f"{report['name']}: {report['problem']}"), indent="  ")
