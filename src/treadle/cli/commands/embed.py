"""``treadle embed``: embedding vectors of texts."""

from __future__ import annotations

import click

from treadle.cli.load import counted, load_model, read_lines
from treadle.cli.options import DEVICE, THREADS, ModelType
from treadle.cli.ui.progress import ProgressBar
from treadle.cli.ui.table import print_json, remark


@click.command()
@click.argument("model", type=ModelType())
@click.argument("texts", nargs=-1, metavar="[TEXT]...")
@click.option("--normalize/--no-normalize", default=True, help="Normalise vectors to length 1.")
@click.option(
    "-d",
    "--dimensions",
    type=click.IntRange(1),
    metavar="N",
    help="Keep only the first N values; for models trained for it (Matryoshka).",
)
@click.option(
    "--default-prompt/--no-default-prompt",
    default=True,
    help="Put the model's own prompt before each text, if it has one.",
)
@click.option("--truncate", is_flag=True, help="Truncate texts that are too long.")
@click.option("-c", "--context", type=click.IntRange(1), metavar="N", help="Most tokens of a text.")
@THREADS
@DEVICE
@click.option("--json", "as_json", is_flag=True, help="Print a list: index, embedding.")
def command(
    model: str,
    texts: tuple[str, ...],
    normalize: bool,
    dimensions: int | None,
    default_prompt: bool,
    truncate: bool,
    context: int | None,
    threads: int | None,
    device: str | None,
    as_json: bool,
) -> None:
    """Print an embedding vector for each TEXT, or each line of standard input, one per line.

    MODEL is an encoder, or any other model: its last hidden states are pooled as its file says.
    """
    from treadle.api.embedding import Embedder

    given = list(texts) or read_lines()
    if not given:
        raise click.UsageError(
            "no texts: pass some as arguments, or one per line on standard input"
        )
    with (
        ProgressBar() as progress,
        load_model(model, progress, context=context, threads=threads, device=device) as loaded,
    ):
        embedder = Embedder(loaded, normalize, dimensions, default_prompt=default_prompt)
        if embedder.note:
            remark(embedder.note)
        name = counted("text" if texts else "line")
        vectors = embedder.vectors(embedder.read(given, name, truncate=truncate))
    if as_json:
        print_json([{"index": i, "embedding": row} for i, row in enumerate(vectors.tolist())])
        return
    for row in vectors:  # the shortest digits that are the same float32
        print(" ".join(map(str, row)))
