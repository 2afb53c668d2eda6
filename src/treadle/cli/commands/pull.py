"""``treadle pull``: download a model."""

from __future__ import annotations

import shlex

import click

from treadle.cli.ui.progress import ProgressBar
from treadle.cli.ui.table import n_bytes, print_json, printable, remark
from treadle.errors import FileError


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
    """Return a typed name with ``hf:``; the short name of an unfinished download is one too. Raises
    FileError for a name without an owner.
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
    """Download one model; return its short name, its name on the hub, its path and its size."""
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
    for each in name_models(find_stored()):
        if each.model.path == path or each.model.path.resolve() == path.resolve():
            size = each.model.n_bytes + each.model.projector_bytes
            about |= {"name": each.name, "hub": each.model.hub_name, "n_bytes": size}
    return about


def print_result(result: dict[str, object]) -> None:
    """Print where a model is, and what to do next."""
    size = result["n_bytes"]
    text = f" ({n_bytes(size)})" if isinstance(size, int) else ""
    print(printable(f"{result['path']}{text}"))
    remark(f"next: treadle chat {shlex.quote(str(result['name']))}")
