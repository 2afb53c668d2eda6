"""``treadle check``: proof that this machine computes what it should."""

from __future__ import annotations

import json
import os
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from treadle.base.humanize import scaled
from treadle.cli.load import load_model
from treadle.cli.options import ModelType, plan_load_options
from treadle.cli.ui.progress import ProgressBar
from treadle.cli.ui.table import print_json, print_table, printable, remark, say
from treadle.errors import FileError
from treadle.files.target import write_text

if TYPE_CHECKING:
    from treadle.selftest.kernel_check import KernelCheck
    from treadle.selftest.model_check import CheckReport
    from treadle.selftest.speeds import Speed

ROOM = 1100  # tokens of context: for the largest batches, and a history that is split
TEXTS = 4  # that a batch may have
STDOUT = "-"
ISSUES = "docs/check.md"
OPTIONAL = ("step", "batches ", "values ", "off by ", "allowed ", "ms ")


@click.command()
@click.argument("model", type=ModelType(), required=False)
@click.option("--quick", is_flag=True, help="Fewer batch sizes and values, and no speeds.")
@click.option(
    "--json",
    "json_to",
    metavar="[FILE.json]",
    is_flag=False,
    flag_value=STDOUT,
    help="Print one JSON object, or write it to FILE.json beside the table.",
)
@click.option(
    "-v",
    "--verbose",
    is_flag=True,
    help="Name each kernel on standard error before it runs: if the process dies, the last did it.",
)
@plan_load_options
@click.pass_context
def command(
    ctx: click.Context,
    model: str | None,
    quick: bool,
    json_to: str | None,
    verbose: bool,
    load: dict[str, Any],
) -> None:
    """Prove that this machine computes what it should: every kernel that MODEL's plans use against
    its twin in numpy, the same bits on any number of threads, a text, and speeds beside this
    machine's peaks.

    Without MODEL, the one inside the package. The exit code is 1 if anything is wrong.
    """
    if json_to not in (None, STDOUT) and not json_to.endswith(".json"):
        if model is not None:
            raise click.UsageError(f"--json {json_to}: the name of the report must end in .json")
        model = json_to  # `treadle check --json MODEL`
        json_to = STDOUT
    if json_to not in (None, STDOUT):
        check_place(json_to)
    report = examine(model, load, quick=quick, verbose=verbose)
    if json_to == STDOUT:
        print_json(report.as_dict())
    else:
        print_report(report)
        if json_to is not None:
            text = json.dumps(report.as_dict(), indent=1, ensure_ascii=False) + "\n"
            write_text(Path(json_to), text)
            say(f"report: {json_to}")
    if not report.passed:
        ctx.exit(1)


def check_place(name: str) -> None:
    """Raise FileError if the report cannot be written to the file ``name``; called before the
    checks, which take minutes.
    """
    folder = os.path.dirname(name) or "."
    if not os.path.isdir(folder):
        raise FileError(f"the folder {folder} does not exist", path=name)
    if os.path.isdir(name) or not os.access(name if os.path.exists(name) else folder, os.W_OK):
        raise FileError("cannot be written", path=name)


def examine(
    model: str | None, load: dict[str, Any], *, quick: bool, verbose: bool = False
) -> CheckReport:
    """Load MODEL and check it. ``quick``: check fewer batch sizes and values, and no speeds;
    ``verbose``: name each kernel on standard error before it runs. Raises TreadleError if the model
    cannot be loaded.
    """
    from treadle.selftest.model_check import check_model

    with (
        ProgressBar() as progress,
        load_model(model, progress, room=ROOM, n_sequences=TEXTS, **load) as loaded,
    ):
        return check_model(loaded, quick=quick, progress=progress, note=remark if verbose else None)


def print_report(report: CheckReport) -> None:
    """Print the report as text: machine, a table of kernels, and the lines of ``summary``."""
    from treadle.selftest.model_check import results_by_kernel

    here = report.machine
    about = (
        f"{here['cpu'] or here['architecture']}, {here['isa']}, {here['threads']} threads, "
        f"{here['system']} {here['system_release']}, {here['python']}, treadle {here['treadle']}"
    )
    say(printable(about), indent="  ")
    rows = [row_of(results) for results in results_by_kernel(report.kernels)]
    if rows:
        headers = ["kernel", *OPTIONAL, "of allowed ", "result"]
        print_table(headers, rows, optional=OPTIONAL, folding="kernel")
        print()
    for line in summary(report):
        say(line, indent="  ")


def row_of(results: list[KernelCheck]) -> list[str]:
    """Return the table row of one kernel: the worst of its ``results``, of which there is one for
    each step and batch.
    """
    worst = max(results, key=lambda each: (not each.passed, each.error))
    return [
        worst.kernel,
        worst.label,
        str(len(results)),
        f"{sum(each.n_values for each in results):,}",
        f"{worst.off:.2g}",
        f"{worst.allowed:.2g}",
        f"{1000 * min(each.seconds for each in results):.3f}",
        f"{worst.error:.3f}" if worst.error < 1000 else f"{worst.error:.3g}",
        "ok" if worst.passed else "WRONG",
    ]


def summary(report: CheckReport) -> list[str]:
    """Return the lines below the table: the results for kernels, threads, text and speed, what was
    left out, and the verdict.
    """
    lines = []
    n_kernels = len({each.kernel for each in report.kernels})
    n_wrong = len({each.kernel for each in report.kernels if not each.passed})
    text = f"{n_kernels} kernels in {len(report.kernels)} steps of batches"
    same = "all as their twins" if not n_wrong else f"{n_wrong} unlike their twins"
    lines.append(f"kernels: {text}: {same}")
    if (threads := report.threads) is not None:
        counts = ", ".join(map(str, threads.counts))
        found = "different bits" if threads.problem else "the same bits"
        lines.append(f"threads: {threads.skipped or f'{found} on {counts}'}")
    if (said := report.text) is not None:
        what = "the known text" if said.known else "as the twins"
        if said.problem:
            what = "wrong"
        elif said.skipped and not said.known:
            what = f"not compared: {said.skipped}"
        shown = "" if said.text is None else f": {printable(said.text)!r}"
        far = f", logits {said.apart:.2%} apart" if said.apart else ""
        lines.append(f"text: {len(said.ids)} tokens, {what}{far}{shown}")
    if report.speeds is not None:
        lines += [f"speed: {speed_text(run)}" for run in report.speeds.runs]
        share = report.speeds.cpu_share
        if share is not None and share < 0.9:
            lines.append(
                f"speed: threads got {share:.0%} of the processor time they asked for: other "
                "programs run, and speeds say little"
            )
    lines += [f"left out: {each}" for each in report.cut]
    lines += [f"wrong: {each}" for each in report.failures]
    if report.passed:
        return [*lines, f"passed in {report.seconds:.0f} s"]
    return [*lines, *advice(report), f"failed, in {report.seconds:.0f} s"]


def speed_text(run: Speed) -> str:
    """Format the speed of one run, a prompt or a text, and its share of a peak if that is known."""
    of = []
    if run.of_read is not None and run.kind == "text":
        of.append(f"{scaled(run.bytes_s, 'B/s')}, {run.of_read:.0%} of the reading peak")
    if run.of_ops is not None and run.kind != "text":
        of.append(f"{scaled(run.ops_s, 'op/s')}, {run.of_ops:.0%} of the largest peak")
    what = f"a prompt of {run.n_tokens} tokens" if run.kind == "prompt" else "a text"
    return ", ".join([f"{what}: {run.tokens_s:.1f} tokens/s", *of])


def advice(report: CheckReport) -> list[str]:
    """Return lines that say what to do after a failed check."""
    from treadle.isa import runnable
    from treadle.jit.host import host_features

    others = [row.name for row in runnable(host_features()) if row.name != report.machine["isa"]]
    lines = [
        "to do: report it, with the file that `treadle check --json report.json` writes; it names "
        f"no user, file or host ({ISSUES})"
    ]
    if others and report.machine["device"] == "cpu":
        lines.append(
            f"to do: meanwhile use other kernels, if `TREADLE_ISA={others[-1]} treadle check` "
            f"passes: set TREADLE_ISA={others[-1]}"
        )
    return lines
