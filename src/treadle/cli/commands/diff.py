"""``treadle diff``: the first step at which the values of two models differ."""

from __future__ import annotations

from collections.abc import Mapping
from contextlib import ExitStack
from dataclasses import asdict
from typing import TYPE_CHECKING, Any

import click

from treadle.cli.load import find_model, load_model, read_text
from treadle.cli.options import DEVICE, LORA, THREADS, ModelType, Number
from treadle.cli.ui.progress import ProgressBar
from treadle.cli.ui.table import heading, print_table, printable, say, show

if TYPE_CHECKING:
    from treadle.api.model import Model
    from treadle.api.step_diff import ModelDifference, StepDifference

TEXT = (
    "The river rose 3.5 metres in one night. By morning, Anna's boat lay in a field of wheat.\n"
    "def area(r):\n    return 3.14159 * r ** 2\n"
)
N_TOKENS = 48
REFERENCES = ("treadle", "transformers")


@click.command()
@click.argument("model", type=ModelType())
@click.argument("reference", type=ModelType())
@click.option(
    "--reference",
    "by",
    type=click.Choice(REFERENCES),
    default=REFERENCES[0],
    show_default=True,
    help="Who computes REFERENCE; transformers needs a Hugging Face folder.",
)
@click.option("-p", "--prompt", metavar="TEXT", help="Compare on this text.")
@click.option(
    "-f",
    "--file",
    metavar="FILE",
    type=click.Path(readable=False),
    help='Compare on a file\'s text ("-": standard input).',
)
@click.option(
    "-n",
    "--tokens",
    type=click.IntRange(2, 128),
    default=N_TOKENS,
    show_default=True,
    metavar="N",
    help="Use the first N tokens of the text.",
)
@click.option(
    "--tolerance",
    type=Number(0, min_open=True),
    metavar="X",
    help="Relative error that is allowed, for all steps; by default it follows from the formats.",
)
@click.option("--all", "every", is_flag=True, help="List every step, not only the layers.")
@LORA
@THREADS
@DEVICE
@click.option("--json", "as_json", is_flag=True, help="Print one JSON object.")
def command(
    model: str,
    reference: str,
    by: str,
    prompt: str | None,
    file: str | None,
    tokens: int,
    tolerance: float | None,
    every: bool,
    lora: tuple[tuple[str, float], ...],
    threads: int | None,
    device: str | None,
    as_json: bool,
) -> None:
    """Say at which step MODEL departs from REFERENCE: both read one text, and what their steps
    wrote is compared, label by label.

    For a quantised model and its original, two conversions, a folder and its conversion, a model
    with an adapter (--lora applies to MODEL) and without.
    """
    if prompt is not None and file is not None:
        raise click.UsageError("-p and -f exclude each other")
    text = prompt if file is None else read_text(file)
    with ExitStack() as stack:
        meter = stack.enter_context(ProgressBar())
        settings: dict[str, Any] = {
            "threads": threads,
            "kv": "f32",
            "device": device,
            "room": tokens,
        }
        loaded = stack.enter_context(load_model(model, meter, lora=lora, **settings))
        text = TEXT if text is None else text
        if by == "transformers":
            found = against_transformers(loaded, reference, text, tokens, tolerance, meter)
        else:
            other = stack.enter_context(load_model(reference, meter, **settings))
            found = against_model(loaded, other, text, tokens, tolerance)
        where = str(loaded.path)
    report = describe(found, where, str(find_model(reference)), by)
    report["every"] = every
    show(report, as_json, print_report)


def against_model(
    model: Model, other: Model, text: str, most: int, tolerance: float | None
) -> ModelDifference:
    """Compare ``model`` with the reference ``other``, both run by treadle, on the first ``most``
    tokens of ``text``. ``tolerance``: relative error that is allowed, None to derive it from the
    formats.
    """
    from treadle.api.step_diff import check_alike, compare, ids_of, record

    check_alike(model, other)
    ids = ids_of(model, other, text, most)
    reference = record(other, ids)
    return compare(model, ids, reference, tensors=other.gguf.tensors, tolerance=tolerance)


def against_transformers(
    model: Model, ref: str, text: str, most: int, tolerance: float | None, meter: ProgressBar
) -> ModelDifference:
    """Compare a model with transformers' run of the Hugging Face folder ``ref``, on the first
    ``most`` tokens of ``text``. ``tolerance``: as for ``against_model``.
    """
    from treadle.api.step_diff import ids_of
    from treadle.api.transformers_reference import compare_with, load_transformers

    folder = find_model(ref, meter)
    network = load_transformers(folder)
    ids = ids_of(model, None, text, most)
    return compare_with(model, network, folder, ids, tolerance=tolerance)


def describe(found: ModelDifference, model: str, reference: str, by: str) -> dict[str, Any]:
    """Return the report, as JSON has it: the differences ``found``, and the names of the model, the
    reference, and the program that computed the reference (``by``).
    """
    return {
        "model": model,
        "reference": reference,
        "by": by,
        "n_tokens": found.n_tokens,
        "aligned": found.aligned,
        "same_top": found.same_top,
        "first": None if found.first is None else as_row(found.first),
        "steps": [as_row(step) for step in found.steps],
        "missing": list(found.missing),
    }


def as_row(step: StepDifference) -> dict[str, Any]:
    """Return a step's fields, and whether it differs, as JSON has them."""
    return {**asdict(step), "differs": step.differs}


def print_report(report: dict[str, Any]) -> None:
    """Print the report of ``describe`` as text: steps or layers, and the verdict."""
    of = " by transformers" if report["by"] == "transformers" else ""
    heading(f"{report['model']} against {report['reference']}{of}")
    steps = report["steps"]
    rows = [step_row(step) for step in steps] if report["every"] else layer_rows(steps)
    what = "step" if report["every"] else "layer"
    print_table(
        [what, "error ", "own error ", "tolerance ", "" if report["every"] else "largest at"],
        rows,
    )
    print()
    if report["same_top"] is not None:
        say(f"same likeliest token after {report['same_top']} of {report['n_tokens']} tokens")
    if not report["aligned"]:
        say("layers pass on several streams of states, so errors of earlier layers are included")
    if report["missing"]:
        say(f"{len(report['missing'])} steps have no counterpart (--json lists them)")
    say(verdict(report))


def verdict(report: Mapping[str, Any]) -> str:
    """Return the report's last line: the first step that differs, or that none does."""
    first = report["first"]
    if first is None:
        return "no step differs by more than its tolerance"
    steps = report["steps"]
    at = next(i for i, step in enumerate(steps) if step["key"] == first["key"])
    part = f" ({first['part']})" if first["part"] else ""
    text = f"first difference: {first['label']}{part}: {errors_of(first)}"
    if at and steps[at - 1]["layer"] == first["layer"]:
        before = steps[at - 1]
        text += f"; the step before it, {before['label']}: {number(judged(before))}"
    others = sum(step["differs"] for step in steps) - 1
    return text + (f"; {others} more behind it" if others else "")


def errors_of(step: Mapping[str, Any]) -> str:
    """Format the error of a step of the report, with its tolerance."""
    return f"relative error {number(judged(step))}, tolerance {number(step['tolerance'])}"


def judged(step: Mapping[str, Any]) -> float:
    """Return the error of a step that is compared with the tolerance: ``own``, that of the run in
    which each layer begins with the reference's states, or ``error`` if there was no such run.
    """
    value: float = step["error"] if step["own"] is None else step["own"]
    return value


def layer_rows(steps: list[dict[str, Any]]) -> list[tuple[str, ...]]:
    """Return a table row for each layer: name, ``error`` and ``own`` error (see ``judged``) of its
    last step, and the tolerance and label of its first step that differs or, if none does, of the
    step nearest to its tolerance.
    """
    layers: dict[int, list[dict[str, Any]]] = {}
    for step in steps:
        layers.setdefault(step["layer"], []).append(step)
    rows: list[tuple[str, ...]] = []
    for of_layer in layers.values():
        last = of_layer[-1]
        worst = next((step for step in of_layer if step["differs"]), None)
        worst = worst or max(of_layer, key=lambda step: judged(step) / step["tolerance"])
        name = last["key"].partition(".")[0]
        shown = f"{worst['label']} {number(judged(worst))}"
        mark = "  <<" if worst["differs"] else ""
        own = "" if last["own"] is None else number(last["own"])
        rows.append(
            (name, number(last["error"]), own, number(worst["tolerance"]), printable(shown + mark))
        )
    return rows


def step_row(step: Mapping[str, Any]) -> tuple[str, ...]:
    """Return the table row of a step: label, ``error`` and ``own`` error (see ``judged``),
    tolerance, and a mark if it differs.
    """
    own = "" if step["own"] is None else number(step["own"])
    part = f" ({step['part']})" if step["part"] else ""
    mark = "<<" if step["differs"] else ""
    return (
        step["label"] + part,
        number(step["error"]),
        own,
        number(step["tolerance"]),
        mark,
    )


def number(value: float) -> str:
    """Format an error with two digits."""
    return f"{value:.1e}"
