"""``treadle rerank``: documents sorted by how well they answer a query."""

from __future__ import annotations

import click

from treadle.cli.load import counted, load_model, read_lines
from treadle.cli.options import DEVICE, THREADS, ModelType
from treadle.cli.ui.progress import ProgressBar
from treadle.cli.ui.table import print_json, print_table


@click.command()
@click.argument("model", type=ModelType())
@click.argument("query")
@click.argument("documents", nargs=-1, metavar="[DOCUMENT]...")
@click.option("-n", "--top", type=click.IntRange(1), metavar="N", help="Print only the N best.")
@click.option("--truncate", is_flag=True, help="Truncate documents that are too long.")
@click.option(
    "-c",
    "--context",
    type=click.IntRange(1),
    metavar="N",
    help="Most tokens of the query and a document together.",
)
@THREADS
@DEVICE
@click.option("--json", "as_json", is_flag=True, help="Print a list: index, score, document.")
def command(
    model: str,
    query: str,
    documents: tuple[str, ...],
    top: int | None,
    truncate: bool,
    context: int | None,
    threads: int | None,
    device: str | None,
    as_json: bool,
) -> None:
    """Score how well each DOCUMENT, or line of standard input, answers QUERY; best first.

    MODEL is a reranker: a safetensors folder of a cross-encoder, or a GGUF file with its full head.
    """
    from treadle.api.rerank import Reranker

    texts = list(documents) or read_lines()
    if not texts:
        raise click.UsageError(
            "no documents: pass some as arguments, or one per line on standard input"
        )
    with (
        ProgressBar() as progress,
        load_model(model, progress, context=context, threads=threads, device=device) as loaded,
    ):
        name = counted("document" if documents else "line")
        scores = Reranker(loaded).scores(query, texts, name, truncate=truncate).tolist()
    best = sorted(range(len(texts)), key=lambda i: -scores[i])[:top]
    if as_json:
        print_json([{"index": i, "score": scores[i], "document": texts[i]} for i in best])
    else:
        print_table(["score", "document"], [(f"{scores[i]:.4f}", texts[i]) for i in best])
