"""``treadle inspect``: a model file's contents, and the parts that treadle does not support."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Mapping
from dataclasses import asdict
from functools import partial
from typing import TYPE_CHECKING, Any

import click

from treadle.api.summary import bytes_by_type
from treadle.base.humanize import n_bytes, n_weights
from treadle.cli.load import find_model, find_projector
from treadle.cli.metadata import described, written
from treadle.cli.options import MMPROJ, ModelType
from treadle.cli.projector import CLIP, describe_projector, projector_text
from treadle.cli.ui.progress import ProgressBar
from treadle.cli.ui.table import heading, print_table, printable, say, show
from treadle.errors import TreadleError
from treadle.files.projector_files import named_for_another

if TYPE_CHECKING:
    from pathlib import Path

    from treadle.files.gguf import GGUF, Tensor


@click.command()
@click.argument("model", type=ModelType())
@click.argument("other", type=ModelType(), required=False)
@click.option("--diff", is_flag=True, help="Compare two files, tensor by tensor.")
@MMPROJ
@click.option("--json", "as_json", is_flag=True, help="Print one JSON object.")
def command(model: str, other: str | None, diff: bool, mmproj: str | None, as_json: bool) -> None:
    """Print MODEL's metadata, tensors, formats and sizes, its projector, and its unsupported parts.
    MODEL may be a projector file (mmproj).

    `inspect --diff A B` compares two files, and prints how much their weights differ.
    """
    if diff != (other is not None):
        raise click.UsageError("--diff needs two files" if diff else "two files need --diff")
    if diff and mmproj is not None:
        raise click.UsageError("--diff and --mmproj exclude each other")
    if other is not None:
        print_difference(model, other, as_json)
        return
    from treadle.convert.open import open_model

    with ProgressBar() as progress:
        path = find_model(model, progress)
        named = None if mmproj is None else find_projector(mmproj, progress)
    with open_model(path) as gguf:
        report = describe(gguf, named)
    show(report, as_json, print_report)


def print_difference(a: str, b: str, as_json: bool) -> None:
    """Compare the files ``a`` and ``b``, and print the result as text or JSON."""
    from treadle.cli.file_diff import compare, print_diff
    from treadle.convert.open import open_model
    from treadle.machine.topology import usable_threads

    with ProgressBar() as progress:
        paths = [find_model(ref, progress) for ref in (a, b)]
        with open_model(paths[0]) as first, open_model(paths[1]) as second:
            report = compare(first, second, usable_threads()[0], progress)
    show(report, as_json, print_diff)


def describe(gguf: GGUF, mmproj: Path | None = None) -> dict[str, Any]:
    """Return all facts about a file, as JSON has them. ``version`` is None for a Hugging Face
    folder. ``mmproj``: the model's projector file, None for the one beside it.
    """
    from treadle.files.splits import is_hf

    projector, problems = find_parts(gguf, mmproj)
    tensors = list(gguf.tensors.values())
    return {
        "path": str(gguf.path),
        "version": None if is_hf(gguf.path) else gguf.version,
        "alignment": gguf.alignment,
        "n_bytes": gguf.n_bytes,
        "n_parameters": n_elements(tensors),
        "bits_per_weight": bits(tensors),
        "f16_share": bits(tensors) / 16,
        "per_token": per_token(gguf),
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
        "chat_template": find_template(gguf),
        "projector": projector,
        "problems": problems,
    }


def per_token(gguf: GGUF) -> dict[str, int] | None:
    """Return the parameters and bytes that one token reads, and the numbers of experts, by name;
    None if the model is not supported.
    """
    from treadle.models.active_parameters import active
    from treadle.models.load import load_config

    try:
        found = active(gguf, load_config(gguf, warn=False))
    except TreadleError:  # ``find_problems`` reports it
        return None
    return asdict(found)


def n_elements(tensors: Iterable[Tensor]) -> int:
    """Return the number of elements of all tensors."""
    return sum(math.prod(tensor.shape) for tensor in tensors)


def bits(tensors: list[Tensor]) -> float:
    """Return the mean bits per weight of ``tensors``."""
    return 8 * sum(t.n_bytes for t in tensors) / max(n_elements(tensors), 1)


def count_formats(tensors: list[Tensor]) -> list[dict[str, Any]]:
    """Return an object for each weight format, that of most bytes first: counts, bytes, share of
    all bytes and bits per weight.
    """
    sizes = bytes_by_type(tensors)
    groups = {name: [t for t in tensors if t.type_name == name] for name in sizes}
    return [
        {
            "format": name,
            "n_tensors": len(members),
            "n_parameters": n_elements(members),
            "n_bytes": sizes[name],
            "share": sizes[name] / max(sum(sizes.values()), 1),
            "bits_per_weight": bits(members),
            "f16_share": bits(members) / 16,
        }
        for name, members in groups.items()
    ]


def find_parts(gguf: GGUF, mmproj: Path | None) -> tuple[dict[str, Any] | None, list[str]]:
    """Return the facts of a model's projector, or of the file itself if it is one (None: no
    projector), and a list of problems with the file and the projector. ``mmproj``: the projector
    file, None to look for one beside the model.
    """
    if gguf.metadata.get("general.architecture") != CLIP:
        projector, unread = projector_of(gguf, mmproj)
        return projector, find_problems(gguf) + unread
    problems = unknown_formats(gguf)
    try:
        towers = list(describe_projector(gguf, problems))
    except TreadleError as error:
        return None, [f"projector: {error}", *problems]
    return {"path": str(gguf.path), "towers": towers}, problems


def projector_of(gguf: GGUF, mmproj: Path | None) -> tuple[dict[str, Any] | None, list[str]]:
    """Return the facts of the first projector that fits the model, None without one, and a list of
    problems with it. ``mmproj``: the only file to try, None for those beside the model.
    """
    from treadle.api.projector_choice import NO_PROJECTOR, find_projectors, lacks_projector
    from treadle.devices import open_device
    from treadle.media.projector import open_projector, open_projector_file
    from treadle.models.load import load_config

    try:
        config = load_config(gguf, warn=False)
    except TreadleError:  # ``find_problems`` reports it
        return None, []
    if mmproj is None and lacks_projector(gguf.path, config):
        return None, [f"pictures: {NO_PROJECTOR}"]
    problems: list[str] = []
    device = open_device("cpu", None, 1, None)
    try:
        for path in [mmproj] if mmproj is not None else find_projectors(gguf.path):
            try:
                projector = open_projector(path, device)
                try:
                    projector.check(config)
                    with open_projector_file(path) as file:
                        unread: list[str] = []
                        towers = list(describe_projector(file, unread))
                        return {"path": str(path), "towers": towers}, unread
                finally:
                    projector.close()
            except TreadleError as error:
                if mmproj is not None or not named_for_another(path.name, gguf.path.name):
                    problems.append(f"pictures: {error}")
    finally:
        device.close()
    return None, problems


def find_problems(gguf: GGUF) -> list[str]:
    """List the parts of a model's file that treadle does not support, each checked separately."""
    from treadle.models.ignored_tensors import SPEECH
    from treadle.models.load import load_config
    from treadle.tokenizer.tokenizer import load_tokenizer

    if gguf.metadata.get("general.architecture") in SPEECH:
        return speech_problems(gguf) + unknown_formats(gguf)
    parts: list[tuple[str, Callable[[GGUF], object]]] = [
        ("model", partial(load_config, warn=False)),  # problems are listed here instead
        ("tokenizer", load_tokenizer),
    ]
    problems = []
    for name, load in parts:
        try:
            loaded = load(gguf)
        except TreadleError as error:
            problems.append(f"{name}: {error}")
            continue
        unused = getattr(loaded, "ignored", ())
        problems += [f"tensors: {tensor} is not used" for tensor in unused]
    if "tokenizer.chat_template" not in gguf.metadata:
        problems.append("chat: the file has no chat template")
    return problems + unknown_formats(gguf)


def speech_problems(gguf: GGUF) -> list[str]:
    """Return why the file of a speech model cannot be read, as a list of at most one message."""
    from treadle.speech.read import read_parts

    try:
        read_parts(gguf)
    except TreadleError as error:
        return [f"model: {error}"]
    return []


def unknown_formats(gguf: GGUF) -> list[str]:
    """Return a message for each weight format in the file that treadle does not read."""
    unknown = sorted({t.type_name for t in gguf.tensors.values() if t.format is None})
    return [f"tensors: format {name} is not supported yet" for name in unknown]


def find_template(gguf: GGUF) -> str | None:
    """Return the origin of the chat template that ``chat`` and ``serve`` use; None if it cannot be
    loaded.
    """
    from treadle.chat.template.template import load_template
    from treadle.models.load import load_config

    try:
        return load_template(gguf, load_config(gguf, warn=False).arch.name).origin
    except TreadleError:  # ``find_problems`` reports it
        return None


def token_line(report: Mapping[str, Any]) -> str:
    """Format the bytes that a token reads and, if there are experts, their numbers and the
    parameters in use; "" if unknown.
    """
    each = report["per_token"]
    if each is None:
        return ""
    size = n_bytes(each["n_bytes"])
    if not each["n_experts"]:
        return f"{size} read per token"
    few = n_weights(each["n_parameters"])
    every = n_weights(report["n_parameters"])
    experts = f"{each['n_experts']} experts, {each['n_experts_used']} used"
    return f"{experts}: {few} of {every} parameters and {size} read per token"


def print_report(report: Mapping[str, Any]) -> None:
    """Print the facts that ``describe`` returns, as text."""
    heading(report["path"])
    version = report["version"]
    kind = "Hugging Face folder" if version is None else f"GGUF version {version}"
    print(
        f"{kind}, {n_bytes(report['n_bytes'])}, "
        f"{n_weights(report['n_parameters'])} parameters in {len(report['tensors'])} tensors, "
        f"{report['bits_per_weight']:.2f} bits per weight"
    )
    line = token_line(report)
    print(f"{line}\n" if line else "")
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
            ["format", "tensors ", "parameters ", "size ", "share ", "bits per weight ", "of F16 "],
            [
                (
                    f["format"],
                    f["n_tensors"],
                    n_weights(f["n_parameters"]),
                    n_bytes(f["n_bytes"]),
                    f"{f['share']:.1%}",
                    f"{f['bits_per_weight']:.2f}",
                    f"{f['f16_share']:.0%}",
                )
                for f in report["formats"]
            ],
        )
        print()
    if report["chat_template"]:
        say(f"chat template: {printable(report['chat_template'])}\n")
    if projector := report["projector"]:
        for tower in projector["towers"]:
            own = projector["path"] == report["path"]
            where = "" if own else f"{printable(projector['path'])}: "
            say(f"projector: {where}{printable(projector_text(tower))}\n")
    heading("missing or unknown")
    for problem in report["problems"] or ["nothing"]:
        say(printable(problem), indent="  ")
