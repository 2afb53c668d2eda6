"""Removal of models from this machine: their files, except those that another revision needs.

In the hub's cache a snapshot consists of links to blobs. The model's links are removed, then the
blobs to which no link of the repository points any more, then folders that have become empty.
"""

from __future__ import annotations

import os
import shutil
from collections.abc import Iterable, Iterator
from contextlib import suppress
from pathlib import Path

from treadle.base.fast_classes import dataclass
from treadle.base.humanize import listed
from treadle.catalog.records import forget
from treadle.catalog.stored import StoredModel, files_below
from treadle.errors import FileError, why
from treadle.files.projector_files import is_projector_name
from treadle.hub.cache import cache_folder, repository
from treadle.machine.mapped_files import mapping_processes

SHOWN = 3  # processes in a message


@dataclass(frozen=True)
class RemovalPlan:
    """The effect of removing ``models``. files: their links and files; blobs: those that only these
    links need; n_bytes: bytes that become free; shared: blobs that stay, because another revision
    needs them.
    """

    models: tuple[StoredModel, ...]
    files: tuple[Path, ...]
    blobs: tuple[Path, ...]
    n_bytes: int
    shared: tuple[Path, ...]


def plan_removal(models: Iterable[StoredModel], everything: Iterable[StoredModel]) -> RemovalPlan:
    """Return the effect of removing ``models``. ``everything``: all models on this machine. In the
    hub's cache the projectors in a model's folder are removed with the last model that uses them.
    """
    models = tuple(models)
    others = [model for model in everything if model not in models]
    files: dict[Path, None] = {}
    for model in models:
        files |= dict.fromkeys(files_of_model(model, others))
    own = set(files)
    blobs: dict[Path, None] = {}
    shared: dict[Path, None] = {}
    repos = {model.repo for model in models if model.repo}
    referred = {blob for repo in repos for link, blob in links_of(repo) if link not in own}
    for file in files:
        blob = blob_of(file)
        if blob is None or not is_cached(file):
            continue
        (shared if blob in referred else blobs)[blob] = None
    kept = {file for file in files if blob_of(file) is not None}
    freed = [*blobs, *(file for file in files if file not in kept)]
    return RemovalPlan(models, (*files,), (*blobs,), sum(map(own_bytes, freed)), (*shared,))


def files_of_model(model: StoredModel, others: Iterable[StoredModel]) -> Iterator[Path]:
    """Yield the files to remove with a model: its own, those of its unfinished download and, in the
    hub's cache, all projector files beside it, unless one of the ``others`` has the same projector.
    """
    yield from model.files
    if model.unfinished is not None:
        yield model.unfinished.part
        yield model.unfinished.note
    if model.projector is None or not is_cached(model.path):
        return
    if not any(other.projector == model.projector for other in others):
        for each in model.projector.parent.iterdir():
            if is_projector_name(each.name):
                yield each


def check_unused(plan: RemovalPlan) -> None:
    """Raise FileError if another process has mapped a model file of the plan, as far as the system
    tells.
    """
    for model in plan.models:
        users = mapping_processes(file for file in model.files if file in plan.files)
        if users:
            names = [f"process {user.pid} ({user.command})" for user in users]
            raise FileError(
                f"is in use by {listed(names, SHOWN)}: stop it first", path=model.origin
            )


def remove(plan: RemovalPlan, everything: Iterable[StoredModel]) -> int:
    """Remove the files and records of the plan's models; return the bytes that became free.

    The plan is computed again from ``everything``, all models that are on this machine now: another
    program may have added a revision since. Raises FileError for a file that cannot be removed.
    """
    plan = plan_removal(plan.models, everything)
    for model in plan.models:
        forget(model.path)
    n_bytes = plan.n_bytes
    for path in (*plan.files, *plan.blobs):
        try:
            path.unlink(missing_ok=True)
        except OSError as error:
            raise FileError(f"cannot be removed: {why(error)}", path=path) from error
    for model in plan.models:
        if model.repo:
            tidy(model.repo)
    return n_bytes


def tidy(repo: str) -> None:
    """Remove empty folders of a repository, references to snapshots that are gone, and the whole
    folder of a repository without snapshots and blobs.
    """
    root = repository(repo)
    snapshots = root / "snapshots"
    remove_empty(snapshots)
    refs = root / "refs"
    for path, _ in list(files_below(refs)):
        with suppress(OSError, ValueError):
            if not (snapshots / (refs / path).read_text().strip()).is_dir():
                (refs / path).unlink()
    remove_empty(refs)
    if not snapshots.is_dir() and not any(root.glob("blobs/*")):
        shutil.rmtree(root, ignore_errors=True)
        shutil.rmtree(cache_folder() / ".locks" / root.name, ignore_errors=True)


def remove_empty(folder: Path) -> None:
    """Remove a folder and its subfolders, except those that contain files."""
    with suppress(OSError):
        for entry in list(folder.iterdir()):
            if entry.is_dir() and not entry.is_symlink():
                remove_empty(entry)
        folder.rmdir()


def links_of(repo: str) -> Iterator[tuple[Path, Path]]:
    """Yield (link, blob) for each link in all snapshots of a repository, also for blobs that are
    missing.
    """
    for folder, _, names in os.walk(repository(repo) / "snapshots"):
        for name in names:
            link = Path(folder, name)
            blob = blob_of(link)
            if blob is not None:
                yield link, blob


def blob_of(link: Path) -> Path | None:
    """Return the blob that a link in a snapshot points to; None if ``link`` is no link. The blob
    may itself be a link, into a store that several repositories share.
    """
    try:
        return Path(os.path.abspath(link.parent / os.readlink(link)))
    except OSError:
        return None


def is_cached(path: Path) -> bool:
    """Return whether a path is in the hub's cache."""
    return cache_folder().absolute() in path.absolute().parents


def own_bytes(path: Path) -> int:
    """Return the bytes that removing ``path`` frees: 0 for a symbolic link, and for a file with
    several hard links.
    """
    try:
        info = os.lstat(path)
    except OSError:
        return 0
    return 0 if os.path.islink(path) or info.st_nlink > 1 else info.st_size
