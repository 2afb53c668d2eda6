"""``treadle control-vector``: a control vector from pairs of texts."""

from __future__ import annotations

import time
from pathlib import Path
from typing import Any

import click

from treadle.base.validate import file_name
from treadle.cli.load import load_model, read_text
from treadle.cli.options import DEVICE, LORA, THREADS, ModelType
from treadle.cli.ui.progress import ProgressBar
from treadle.cli.ui.table import printable, show
from treadle.errors import TreadleError
from treadle.files.target import check_target, files_of

ESCAPES = {"n": "\n", "t": "\t", "r": "\r", "\\": "\\", '"': '"', "'": "'"}
METHODS = ("pca", "mean")
TOKENS = ("last", "all")


@click.command()
@click.argument("model", type=ModelType())
@click.option(
    "--positive",
    required=True,
    metavar="FILE",
    type=click.Path(readable=False),
    help="Texts that show what is wanted, one a line.",
)
@click.option(
    "--negative",
    required=True,
    metavar="FILE",
    type=click.Path(readable=False),
    help="The opposite of each, line by line.",
)
@click.option(
    "-o",
    "--output",
    default="control_vector.gguf",
    metavar="OUT",
    type=click.Path(readable=False),
    show_default=True,
    help="Output file.",
)
@click.option(
    "--method",
    type=click.Choice(METHODS),
    default=METHODS[0],
    show_default=True,
    help="Reduce the differences of each layer's states to one direction: the first principal "
    "one, or that of the mean.",
)
@click.option(
    "--tokens",
    type=click.Choice(TOKENS),
    default=TOKENS[0],
    show_default=True,
    help="Compare the states of each text's last token, or of all tokens, aligned at the end.",
)
@click.option("--force", is_flag=True, help="Replace OUT if it exists.")
@LORA
@THREADS
@DEVICE
@click.option("--json", "as_json", is_flag=True, help="Print one JSON object.")
def command(
    model: str,
    positive: str,
    negative: str,
    output: str,
    method: str,
    tokens: str,
    force: bool,
    lora: tuple[tuple[str, float], ...],
    threads: int | None,
    device: str | None,
    as_json: bool,
) -> None:
    r"""Make a control vector for MODEL from pairs of texts: two files with one text a line.

    A line's \n, \t, \r, \\ and \" stand for these characters; empty lines are skipped. Use the
    vector with `--control-vector OUT:STRENGTH`.
    """
    from treadle.api.control_vector import make_control_vector

    sources = files_of(model, file_name(positive), file_name(negative))
    check_target(file_name(output), [*sources, *(Path(path) for path, _ in lora)], force=force)
    texts = [lines_of(name) for name in (positive, negative)]
    if len(texts[0]) != len(texts[1]):
        found = f"{positive} has {len(texts[0])} texts, {negative} {len(texts[1])}"
        raise TreadleError(f"{found}: expected as many, as they are compared line by line")
    with (
        ProgressBar("states", "texts") as meter,
        load_model(model, meter, threads=threads, lora=lora, device=device) as loaded,
    ):
        began = time.perf_counter()
        name = Path(output).stem
        how = {"method": method, "tokens": tokens, "name": name}
        vector = make_control_vector(loaded, *texts, **how, progress=meter)
        seconds = time.perf_counter() - began
        vector.save(output, force=force)
        report: dict[str, Any] = {
            "model": str(loaded.path),
            "path": output,
            "n_pairs": len(texts[0]),
            "method": method,
            "tokens": tokens,
            "n_layers": len(vector.directions),
            "n_embd": loaded.config.n_embd,
            "seconds": seconds,
        }
    show(report, as_json, print_report)


def lines_of(name: str) -> list[str]:
    """Return the texts of the file ``name``, one a line, with escapes replaced. Raises TreadleError
    for a file without texts.
    """
    texts = [unescaped(line) for line in read_text(name).splitlines() if line]
    if not texts:
        raise TreadleError(f"{name}: has no texts: expected one a line")
    return texts


def unescaped(line: str) -> str:
    """Return a line with the escapes of ESCAPES replaced; an unknown escape stays as it is."""
    result: list[str] = []
    at = 0
    while at < len(line):
        pair = line[at : at + 2]
        known = pair[0] == "\\" and pair[1:] in ESCAPES
        result.append(ESCAPES[pair[1]] if known else pair[0])
        at += 2 if known else 1
    return "".join(result)


def print_report(report: dict[str, Any]) -> None:
    """Print the report on the file that was written, as text."""
    print(
        f"{printable(report['path'])}: {report['n_layers']} directions of {report['n_embd']} "
        f"values, by {report['method']} from {report['n_pairs']} pairs of texts, in "
        f"{report['seconds']:.1f} s"
    )
