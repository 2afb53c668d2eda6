"""``treadle imatrix``: importance of each weight column, measured on a text."""

from __future__ import annotations

import time
from typing import TYPE_CHECKING, Any

import click

from treadle.base.validate import file_name
from treadle.cli.commands.perplexity import DEFAULT_CONTEXT, bos_of
from treadle.cli.load import load_model, read_text
from treadle.cli.options import DEVICE, THREADS, ModelType
from treadle.cli.ui.progress import ProgressBar
from treadle.cli.ui.table import printable, show
from treadle.files.target import check_target, files_of

if TYPE_CHECKING:
    from treadle.api.model import Model
    from treadle.quantize.imatrix.matrix import ImportanceMatrix

STAGE = "imatrix"


@click.command()
@click.argument("model", type=ModelType())
@click.argument("file", type=click.Path(readable=False))
@click.option(
    "-o",
    "--output",
    default="imatrix.gguf",
    metavar="OUT",
    type=click.Path(readable=False),
    show_default=True,
    help="Output file.",
)
@click.option(
    "-c",
    "--context",
    type=click.IntRange(4),
    default=DEFAULT_CONTEXT,
    metavar="N",
    show_default=True,
    help="Tokens per window.",
)
@click.option("--chunks", type=click.IntRange(1), metavar="N", help="Stop after N windows.")
@click.option(
    "--in-file",
    "others",
    multiple=True,
    metavar="FILE",
    type=click.Path(readable=False),
    help="Add the results of an earlier run, in FILE; may be repeated.",
)
@click.option("--process-output", is_flag=True, help="Also process the output matrix (slower).")
@click.option("--force", is_flag=True, help="Replace OUT if it exists.")
@THREADS
@DEVICE
@click.option("--json", "as_json", is_flag=True, help="Print one JSON object.")
def command(
    model: str,
    file: str,
    output: str,
    context: int,
    chunks: int | None,
    others: tuple[str, ...],
    process_output: bool,
    force: bool,
    threads: int | None,
    device: str | None,
    as_json: bool,
) -> None:
    """Run MODEL on the text FILE, and write the importance of each weight column (mean squared
    activations).

    `treadle quantize --imatrix OUT` then quantizes important columns more precisely. Use a text
    similar to what the model will process, of some hundred thousand tokens, and preferably the
    unquantized MODEL.
    """
    from treadle.quantize.imatrix.matrix import missing, read
    from treadle.quantize.plan import is_matrix

    # One of --in-file may be OUT: its contents are merged into its replacement.
    check_target(file_name(output), files_of(model, file_name(file)), force=force)
    earlier = [read(other) for other in others]
    with (
        ProgressBar(STAGE, "tok") as meter,
        load_model(model, meter, threads=threads, context=context, device=device) as loaded,
    ):
        began = time.perf_counter()
        matrix = run(loaded, file, context, chunks, process_output, meter)
        seconds = time.perf_counter() - began
        own = matrix.n_chunks
        for other in earlier:
            matrix = matrix + other
        names = [t.name for t in loaded.gguf.tensors.values() if is_matrix(t.name, t.shape)]
        left_out = missing(matrix, names)
    matrix.write(output)
    report: dict[str, Any] = {
        "model": str(loaded.path),
        "path": output,
        "n_entries": len(matrix.entries),
        "n_chunks": matrix.n_chunks,
        "chunk_size": matrix.chunk_size,
        "datasets": list(matrix.datasets),
        "without": left_out,
        "seconds": seconds,
        "tok_s": own * context / seconds,
    }
    show(report, as_json, print_report)


def run(
    model: Model, file: str, n_ctx: int, chunks: int | None, with_output: bool, meter: ProgressBar
) -> ImportanceMatrix:
    """Tokenize the text FILE, cut it into windows of ``n_ctx`` tokens, at most ``chunks`` (None:
    all), and collect the importance matrix of ``model`` over them. ``with_output``: the output
    matrix too.
    """
    from treadle.evaluate import cut
    from treadle.quantize.imatrix.collect import collect

    bos = bos_of(model.tokenizer)
    ids = model.tokenize(read_text(file), special=False)
    windows = cut(ids, n_ctx, bos=bos, n_windows=chunks)
    return collect(
        model.engine,
        windows.tokens,
        file,
        bos=bos,
        with_output=with_output,
        progress=lambda done, total: meter(STAGE, done, total),
    )


def print_report(report: dict[str, Any]) -> None:
    """Print the report on the file that was written, as text."""
    print(
        f"{printable(report['path'])}: {report['n_entries']} matrices, "
        f"{report['n_chunks']} windows of {report['chunk_size']} tokens, "
        f"{report['tok_s']:.0f} tokens/s"
    )
    if report["without"]:
        print(f"no values for {', '.join(map(printable, report['without']))}")
