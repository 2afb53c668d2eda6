"""``treadle inspect``: what a model file holds, and what treadle would miss in it."""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping
from typing import TYPE_CHECKING, Any

import click

from treadle.cli.load import find_model
from treadle.cli.progress import ProgressBar
from treadle.cli.table import heading, n_bytes, print_json, print_table, printable, scaled, shorten
from treadle.errors import TreadleError

if TYPE_CHECKING:
    from treadle.files.gguf import GGUF, Tensor

SHOWN = 8  # elements of an array


@click.command()
@click.argument("model", type=click.Path())
@click.option("--json", "as_json", is_flag=True, help="Print one JSON object.")
def command(model: str, as_json: bool) -> None:
    """Print MODEL's metadata, tensors, formats and sizes, and what is missing or unknown."""
    from treadle.files.gguf import open_gguf

    with ProgressBar() as progress:
        path = find_model(model, progress)
    gguf = open_gguf(path)
    try:
        report = describe(gguf)
    finally:
        gguf.close()
    if as_json:
        print_json(report)
    else:
        print_report(report)


def describe(gguf: GGUF) -> dict[str, Any]:
    """Tell all about a file."""
    tensors = list(gguf.tensors.values())
    return {
        "path": str(gguf.path),
        "version": gguf.version,
        "alignment": gguf.alignment,
        "n_bytes": gguf.n_bytes,
        "n_parameters": sum(n_elements(tensor) for tensor in tensors),
        "formats": count_formats(tensors),
        "metadata": {key: described(value) for key, value in gguf.metadata.items()},
        "tensors": [
            {
                "name": tensor.name,
                "shape": list(tensor.shape),
                "format": tensor.type_name,
                "n_bytes": tensor.n_bytes,
                "offset": tensor.offset,
            }
            for tensor in tensors
        ],
        "problems": find_problems(gguf),
    }


def n_elements(tensor: Tensor) -> int:
    """Count a tensor's numbers."""
    count = 1
    for length in tensor.shape:
        count *= length
    return count


def count_formats(tensors: list[Tensor]) -> list[dict[str, Any]]:
    """Tell, for each weight format, how much of the file is in it."""
    formats: dict[str, dict[str, Any]] = {}
    for tensor in tensors:
        row = formats.setdefault(
            tensor.type_name,
            {"format": tensor.type_name, "n_tensors": 0, "n_parameters": 0, "n_bytes": 0},
        )
        row["n_tensors"] += 1
        row["n_parameters"] += n_elements(tensor)
        row["n_bytes"] += tensor.n_bytes
    return sorted(formats.values(), key=lambda row: -int(row["n_bytes"]))


def described(value: object) -> object:
    """Make a metadata value fit for JSON: of an array, its type, its length and its beginning."""
    from treadle.files.gguf import GGUFArray

    if isinstance(value, GGUFArray):
        first = [described(value[i]) for i in range(min(SHOWN, len(value)))]
        return {"type": value.type.name.lower(), "length": len(value), "first": first}
    if isinstance(value, bytes):
        return value.decode("utf-8", "backslashreplace")
    if hasattr(value, "item"):  # a numpy scalar
        return value.item()
    return value


def find_problems(gguf: GGUF) -> list[str]:
    """List what treadle could not do with this file, each part asked by itself."""
    from treadle.models.config import load_config
    from treadle.text.tokenizer import load_tokenizer

    parts: list[tuple[str, Callable[[GGUF], object]]] = [
        ("model", load_config),
        ("tokenizer", load_tokenizer),
    ]
    problems = []
    for name, load in parts:
        try:
            load(gguf)
        except TreadleError as error:
            problems.append(f"{name}: {error}")
    if "tokenizer.chat_template" not in gguf.metadata:
        problems.append("chat: the file has no chat template")
    unknown = sorted({t.type_name for t in gguf.tensors.values() if t.format is None})
    problems += [f"tensors: treadle has no format {name} yet" for name in unknown]
    return problems


def print_report(report: Mapping[str, Any]) -> None:
    """Print it for people."""
    heading(printable(report["path"]))
    print(
        f"GGUF version {report['version']}, {n_bytes(report['n_bytes'])}, "
        f"{scaled(report['n_parameters'])} parameters in {len(report['tensors'])} tensors\n"
    )
    if report["metadata"]:
        print_table(
            ["key", "value"], [(key, written(value)) for key, value in report["metadata"].items()]
        )
        print()
    if report["tensors"]:
        print_table(
            ["tensor", "shape", "format", "size "],
            [
                (t["name"], "×".join(map(str, t["shape"])), t["format"], n_bytes(t["n_bytes"]))
                for t in report["tensors"]
            ],
        )
        print()
        print_table(
            ["format", "tensors ", "parameters ", "size "],
            [
                (f["format"], f["n_tensors"], scaled(f["n_parameters"]), n_bytes(f["n_bytes"]))
                for f in report["formats"]
            ],
        )
        print()
    heading("missing or unknown")
    for problem in report["problems"] or ["nothing"]:
        print(printable(problem))


def written(value: object) -> str:
    """Write a metadata value on one line."""
    if isinstance(value, Mapping):
        first = ", ".join(shorten(json.dumps(v, ensure_ascii=False), 24) for v in value["first"])
        dots = ", …" if value["length"] > len(value["first"]) else ""
        return f"{value['length']} × {value['type']}: [{first}{dots}]"
    return shorten(str(value), 200)
