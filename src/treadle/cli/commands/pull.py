"""``treadle pull``: download a model."""

from __future__ import annotations

import shlex
from typing import TYPE_CHECKING

import click

from treadle.base.humanize import n_bytes
from treadle.cli.ui.progress import ProgressBar
from treadle.cli.ui.table import print_json, printable, remark
from treadle.errors import FileError

if TYPE_CHECKING:
    from treadle.catalog.facts import ModelFacts

# Commands for models that write no text, by what they give.
NEXT = {"vectors": "embed {name} TEXT", "scores": "rerank {name} QUERY DOCUMENT"}


@click.command()
@click.argument("names", nargs=-1, required=True, metavar="NAME...")
@click.option(
    "--mmproj/--no-mmproj",
    default=True,
    help="Also download the projector file with which the model reads pictures and sounds, if its "
    "repository has one.",
)
@click.option(
    "--json", "as_json", is_flag=True, help="Print a list of objects: name, path, n_bytes."
)
def command(names: tuple[str, ...], mmproj: bool, as_json: bool) -> None:
    """Download each NAME: hf:OWNER/REPO, with :TYPE or /FILE, or OWNER/REPO alone.

    Without a type treadle takes the best one that fits into memory. A download that was interrupted
    goes on where it stopped. What is there already is not downloaded again.
    """
    refs = [hub_name(name) for name in names]
    results = []
    with ProgressBar() as progress:
        for ref in refs:
            results.append(pull(ref, mmproj, progress))
            progress.close()
            if not as_json:
                print_result(results[-1])
    if as_json:
        print_json(results)


def hub_name(name: str) -> str:
    """Return the ``hf:`` name of a typed one: OWNER/REPO, a name with ``hf:``, or the short name of
    a model of the hub's cache, such as an unfinished download. Raises FileError for other names.
    """
    if name.startswith("hf:"):
        return name
    if "/" in name and not name.startswith((".", "/", "~")):
        return f"hf:{name}"
    from treadle.catalog.names import fitting, resume_name
    from treadle.catalog.stored import find_stored

    found = {resume_name(model) for model in fitting(name, find_stored())} - {""}
    if len(found) == 1:
        return found.pop()
    raise FileError("no name on the hub", path=name, expected="OWNER/REPO or hf:OWNER/REPO:TYPE")


def pull(ref: str, mmproj: bool, progress: ProgressBar) -> dict[str, object]:
    """Download one model; return its short name (``name``), hub name (``hub``), path, bytes and the
    next command to type (``next``). ``mmproj``: download its projector too.
    """
    from treadle.catalog.facts import facts_of
    from treadle.catalog.names import name_models
    from treadle.catalog.stored import find_stored
    from treadle.hub import download

    try:
        path = download(ref, progress=progress, say=remark, projector=mmproj)
    except KeyboardInterrupt:
        progress.close()
        remark(f"interrupted: go on with `treadle pull {ref}`; what has arrived is kept")
        raise
    about: dict[str, object] = {"name": ref, "hub": ref, "path": str(path), "n_bytes": None}
    about["next"] = f"treadle chat {shlex.quote(ref)}"
    for each in name_models(find_stored()):
        model = each.model
        if model.path == path or model.weights.resolve() == path.resolve():
            size = model.n_bytes + model.projector_bytes
            about |= {"name": each.name, "hub": model.hub_name, "n_bytes": size}
            about["next"] = next_step(each.name, facts_of(model))
    return about


def next_step(name: str, facts: ModelFacts) -> str:
    """Return the command to type next: the one for the model's kind, such as ``treadle chat NAME``,
    or ``treadle inspect`` for a model that treadle does not run.
    """
    if facts.problem:
        return f"treadle inspect {shlex.quote(name)} ({facts.problem})"
    if facts.kind != "text":
        return f"treadle {NEXT[facts.kind]}".format(name=shlex.quote(name))
    return f"treadle {'chat' if facts.has_template else 'run'} {shlex.quote(name)}"


def print_result(result: dict[str, object]) -> None:
    """Print where the downloaded model is, and what to do next. ``result``: as of ``pull``."""
    size = result["n_bytes"]
    text = f" ({n_bytes(size)})" if isinstance(size, int) else ""
    print(printable(f"{result['path']}{text}"))
    remark(f"next: {result['next']}")
