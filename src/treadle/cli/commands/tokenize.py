"""``treadle tokenize``: a text as the model sees it."""

from __future__ import annotations

import json
from typing import Any

import click

from treadle.cli.commands.run import is_utf8, read_prompt
from treadle.cli.load import find_model
from treadle.cli.options import ModelType
from treadle.cli.ui.progress import ProgressBar
from treadle.cli.ui.table import print_json, print_table


@click.command()
@click.argument("model", type=ModelType())
@click.argument("text", required=False)
@click.option("--ids", "only_ids", is_flag=True, help="Print only the ids, on one line.")
@click.option("--json", "as_json", is_flag=True, help="Print a list of objects: id, piece, bytes.")
@click.option("--raw", is_flag=True, help="Use the text byte for byte: no BOS, no control tokens.")
def command(model: str, text: str | None, only_ids: bool, as_json: bool, raw: bool) -> None:
    """Print the tokens of TEXT, or of standard input, and their ids.

    Only the vocabulary is read, so a file without weights is enough.
    """
    if only_ids and as_json:
        raise click.UsageError("--ids and --json exclude each other")
    with ProgressBar() as progress:
        path = find_model(model, progress)
    if text is None:
        text = read_prompt(raw=raw)
    elif not is_utf8(text):
        raise click.UsageError("TEXT is not UTF-8")

    from treadle.convert.open import open_model
    from treadle.tokenizer.tokenizer import load_tokenizer

    with open_model(path) as gguf:
        tokenizer = load_tokenizer(gguf)
        ids = tokenizer.encode(text, bos=False if raw else None, special=not raw)
        if only_ids:
            print(*ids)
        elif as_json:
            print_json([describe(tokenizer, id) for id in ids])
        else:
            rows = ((id, tokenizer.piece(id), tokenizer.token_bytes(id).hex(" ")) for id in ids)
            print_table(
                ["id ", "piece", "bytes"],
                [(id, json.dumps(piece, ensure_ascii=False), octets) for id, piece, octets in rows],
            )


def describe(tokenizer: Any, id: int) -> dict[str, object]:
    """Return a token's id, its piece of text, and its bytes in hexadecimal."""
    return {"id": id, "piece": tokenizer.piece(id), "bytes": tokenizer.token_bytes(id).hex()}
