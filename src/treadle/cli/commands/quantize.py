"""``treadle quantize``: a model file in smaller formats."""

from __future__ import annotations

import time
from collections import Counter
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from treadle.base.humanize import listed, n_bytes, scaled
from treadle.cli.load import find_model
from treadle.cli.options import THREADS, ModelType, adapter, as_usage
from treadle.cli.ui.progress import ProgressBar
from treadle.cli.ui.table import print_table, printable, remark, show
from treadle.errors import TreadleError, UnsupportedError

if TYPE_CHECKING:
    from treadle.convert.recipe import Shard
    from treadle.models.lora import Adapter
    from treadle.quantize.plan import Recipe

SHOWN = 6  # most tensor names in a remark


@click.command()
@click.argument("src", type=ModelType())
@click.argument("dst", type=click.Path(readable=False))
@click.argument("mix", metavar="TYPE")
@click.option(
    "--tensor",
    "rules",
    multiple=True,
    metavar="PATTERN=TYPE",
    help="Type for tensors whose name matches a regular expression, such as ffn_down=Q6_K; may "
    "be repeated, the last match wins.",
)
@click.option("--output-type", metavar="TYPE", help="Type of output.weight.")
@click.option("--embd-type", metavar="TYPE", help="Type of token_embd.weight.")
@click.option(
    "--imatrix",
    metavar="FILE",
    type=click.Path(readable=False),
    help="Importance matrix, from `treadle imatrix`.",
)
@click.option(
    "--lora",
    metavar="FILE[=SCALE]",
    type=adapter,
    multiple=True,
    help="Add an adapter (LoRA) to the weights; may be repeated.",
)
@click.option("--pure", is_flag=True, help="Use TYPE's own format for every matrix, not a mix.")
@click.option("--allow-requantize", is_flag=True, help="Accept weights that are already quantized.")
@click.option(
    "--dry-run", is_flag=True, help="Print the format of every tensor, and write nothing."
)
@click.option("--force", is_flag=True, help="Replace DST if it exists.")
@THREADS
@click.option("--json", "as_json", is_flag=True, help="Print one JSON object.")
def command(
    src: str,
    dst: str,
    mix: str,
    rules: tuple[str, ...],
    output_type: str | None,
    embd_type: str | None,
    imatrix: str | None,
    lora: tuple[tuple[str, float], ...],
    pure: bool,
    allow_requantize: bool,
    dry_run: bool,
    force: bool,
    threads: int | None,
    as_json: bool,
) -> None:
    """Quantize the model SRC to DST, with matrices in TYPE: a format, or a mix such as Q4_K_M.

    If the rows of a matrix are not a multiple of TYPE's blocks, another format is used and
    reported.
    """
    from treadle.files.gguf import open_gguf
    from treadle.machine.topology import usable_threads
    from treadle.quantize.imatrix.matrix import read
    from treadle.quantize.plan import find_mix, format_by_name, make_recipe, parse_rule
    from treadle.quantize.write import STAGE, check_importances, check_target, plan_shards, write

    with as_usage(TreadleError):
        wanted = find_mix(mix)
        asked = [parse_rule(rule) for rule in rules]
        for name in filter(None, (output_type, embd_type)):
            format_by_name(name)
    if not dst:
        raise click.UsageError("DST is empty")
    with ProgressBar(STAGE, "B") as meter:
        gguf = open_gguf(gguf_of(src, meter))
        try:
            matrix = None if imatrix is None else read(imatrix)
            recipe = make_recipe(
                gguf,
                wanted,
                rules=asked,
                output_type=output_type,
                embd_type=embd_type,
                pure=pure,
                imatrix=matrix,
            )
            if matrix is not None:
                check_importances(gguf, recipe, matrix)  # also in a dry run
            merged = adapters_of(gguf.path, lora)
            began = time.perf_counter()
            if not dry_run:
                check_target(gguf, Path(dst), force, matrix, merged)
                for text in remarks(recipe, matrix):
                    remark(text)
                write(
                    gguf,
                    recipe,
                    dst,
                    n_threads=threads or usable_threads()[0],
                    imatrix=matrix,
                    overwrite=force,
                    allow_requantize=allow_requantize,
                    merged=merged,
                    progress=meter,
                    say=remark,
                )
            seconds = time.perf_counter() - began
            (made,) = plan_shards(gguf, recipe, Path(dst), matrix)
            report = describe(recipe, gguf, made, None if dry_run else seconds)
            report["remarks"] = remarks(recipe, matrix)
        finally:
            gguf.close()
    show(report, as_json, print_report)


def adapters_of(path: Path, given: Sequence[tuple[str, float]]) -> list[tuple[Adapter, float]]:
    """Open the adapters (file, scale) for merging into the model at ``path``. Raises
    UnsupportedError for one that changes the embeddings of a model whose output matrix shares them.
    """
    if not given:
        return []
    from treadle.convert.lora.lora import open_adapter
    from treadle.files.gguf import open_gguf
    from treadle.models.graphs import GRAPHS
    from treadle.models.load import load_config
    from treadle.models.lora import EMBEDDINGS

    result = []
    with open_gguf(path) as gguf:  # load_config renames tensors: this copy is not for writing
        config = load_config(gguf)
        for file, scale in given:
            adapter = open_adapter(file, gguf, config)
            writes = "logits" in GRAPHS[config.arch.graph].outputs
            if EMBEDDINGS in adapter.ranks and config.tied and writes:
                what = "the output matrix shares these weights, and the adapter changes only one"
                raise UnsupportedError(f"{adapter.path}: {EMBEDDINGS}: {what}")
            ranks = {gguf.tensors[name].name: low for name, low in adapter.ranks.items()}
            result.append((replace(adapter, ranks=ranks), scale))
    return result


def gguf_of(src: str, meter: ProgressBar) -> Path:
    """Return the path of SRC. Raises UnsupportedError unless it is GGUF: tensors of a folder have
    another order.
    """
    path = find_model(src, meter)
    if path.is_dir() or path.suffix == ".safetensors":
        raise UnsupportedError(
            f"{path} is not a GGUF file: convert it with 'treadle convert {path} FILE.gguf', and "
            "quantize that"
        )
    return path


def describe(recipe: Recipe, gguf: Any, made: Shard, seconds: float | None) -> dict[str, Any]:
    """Return the report, as JSON has it, on quantizing ``gguf`` to the file ``made``. ``seconds``:
    time of writing, None for a dry run.
    """
    before = sum(target.tensor.n_bytes for target in recipe.targets)
    return {
        "source": str(gguf.path),
        "path": str(made.path),
        "mix": recipe.name,
        "file_type": recipe.file_type,
        "n_weights": recipe.n_weights,
        "n_bytes_before": gguf.n_bytes,
        "n_bytes": made.layout.n_bytes,
        "bits_per_weight_before": 8 * before / max(recipe.n_weights, 1),
        "bits_per_weight": recipe.bits_per_weight,
        "seconds": seconds,
        "bytes_s": None if not seconds else before / seconds,
        "formats": dict(Counter(target.type.name for target in recipe.targets)),
        "tensors": [
            {
                "name": target.tensor.name,
                "shape": list(target.tensor.shape),
                "from": target.tensor.kind.name,
                "to": target.type.name,
                "n_bytes": target.n_bytes,
                "note": target.note,
            }
            for target in recipe.targets
        ],
    }


def remarks(recipe: Recipe, matrix: Any) -> list[str]:
    """Return warnings about the recipe: substituted and unsuitable formats, importances that are
    missing or have no effect. ``matrix``: the importance matrix, or None.
    """
    from treadle.quantize.imatrix.matrix import missing

    out = [*substitution_text(recipe), *training_warnings(recipe)]
    groups: dict[tuple[str, str], list[str]] = {}
    for target in recipe.targets:
        if target.note and target.instead_of is None:
            groups.setdefault((target.type.name, target.note), []).append(target.tensor.name)
    for (fmt, note), names in groups.items():
        out.append(f"{fmt} instead ({note}): {printable(listed(names, SHOWN))}")
    if matrix is not None and (unheeded := recipe.unused_importances(matrix)):
        each = ", ".join(f"{fmt} ({matrices(len(names))})" for fmt, names in unheeded.items())
        out.append(f"the importance matrix has no effect in {each}")
    coarse = recipe.wants_imatrix
    if coarse and matrix is None:
        out.append(
            f"{len(coarse)} tensors become very coarse without --imatrix: expect a poor model; "
            f"{printable(listed(coarse, SHOWN))}"
        )
    elif matrix is not None and (without := missing(matrix, coarse)):
        out.append(f"the importance matrix has no values for {printable(listed(without, SHOWN))}")
    return out


def substitution_text(recipe: Recipe) -> list[str]:
    """Return one line about all formats that were substituted because rows do not divide into whole
    blocks; empty if none was.
    """
    groups = recipe.fallbacks
    if not groups:
        return []
    rows = sorted({target.tensor.shape[-1] for targets in groups.values() for target in targets})
    each = (
        f"{fmt} instead of {wanted} ({matrices(len(targets))})"
        for (wanted, fmt), targets in groups.items()
    )
    sizes = listed([str(k) for k in rows], SHOWN)
    return [f"rows of {sizes} weights do not divide into whole blocks: {', '.join(each)}"]


def training_warnings(recipe: Recipe) -> list[str]:
    """Return a warning for each format that only suits weights trained in it."""
    from treadle.formats import by_name
    from treadle.quantize.mixes import TRAINED
    from treadle.quantize.plan import nearest

    out = []
    for fmt, targets in recipe.trained.items():
        cost, better = TRAINED[fmt]
        fits = {nearest(by_name(better), target.tensor.shape[-1]).name for target in targets}
        narrow = (f"{name} where that does not fit" for name in sorted(fits - {better}))
        advice = ", or ".join([better, *narrow])
        out.append(
            f"{matrices(len(targets))} in {fmt}, which suits only weights trained in it: others "
            f"lose {cost}; use {advice} instead"
        )
    return out


def matrices(n: int) -> str:
    """Return a count with its noun: ``1 matrix``, ``2 matrices``."""
    return f"{n} {'matrix' if n == 1 else 'matrices'}"


def print_report(report: dict[str, Any]) -> None:
    """Print the report of ``describe`` as text; for a dry run, every tensor."""
    dry_run = report["seconds"] is None
    if dry_run:
        print_table(
            ["tensor", "shape", "from", "to", "size ", ""],
            [
                (
                    t["name"],
                    "×".join(map(str, t["shape"])),
                    t["from"],
                    t["to"],
                    n_bytes(t["n_bytes"]),
                    t["note"],
                )
                for t in report["tensors"]
            ],
        )
        print()
        for text in report["remarks"]:
            remark(text)
    counts = ", ".join(f"{n} {fmt}" for fmt, n in report["formats"].items())
    print(f"{report['mix']}: {counts}")
    print(
        f"{n_bytes(report['n_bytes_before'])} -> {n_bytes(report['n_bytes'])}, "
        f"{report['bits_per_weight_before']:.2f} -> {report['bits_per_weight']:.2f} bits per weight"
        + (" (not written)" if dry_run else "")
    )
    if not dry_run:
        rate = scaled(report["bytes_s"] or 0, "B/s")
        print(f"{printable(report['path'])} in {report['seconds']:.1f} s, {rate}")
