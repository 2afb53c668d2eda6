"""Models in the hub's cache and in the folder of ``TREADLE_MODELS``, found by their files' names.

::

    models--OWNER--REPO/snapshots/COMMIT/...    one entry per model, whatever revisions share it
    TREADLE_MODELS/...                          GGUF files and Hugging Face folders
"""

from __future__ import annotations

import os
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import replace
from pathlib import Path, PurePosixPath
from typing import Any

from treadle.base.fast_classes import dataclass
from treadle.files.projector_files import is_projector_name, named_for_another, projectors_beside
from treadle.files.splits import CONFIG, INDEX, SHARD, shard_name
from treadle.hub.cache import DEFAULT_REVISION, PREFIX, cache_folder, indexed_shards
from treadle.hub.name import MAX_SHARDS
from treadle.hub.offers import ALIASES, TAG
from treadle.hub.resume import INCOMPLETE, UnfinishedDownload, size_of, unfinished_downloads

GENERIC = frozenset({"", "model", "ggml-model", "gguf", "weights"})  # file names that name no model
VOCABULARY = "ggml-vocab-"  # of llama.cpp's test files
MAX_DEPTH = 4  # folders below TREADLE_MODELS: LM Studio has OWNER/REPO/FILE
DEEPEST = 16  # folders below a snapshot: more than any repository has
COMMIT_SHOWN = 7  # digits of a commit


@dataclass(frozen=True)
class StoredModel:
    """A model on this machine: a GGUF file, all its shards, or a Hugging Face folder.

    path: what a command opens: the file, its first shard, or the folder. Of an unfinished download
        the path that it will have.
    files: the model's files that are there; those of a projector are not among them.
    label: the name without type, in lower case: ``qwen3-0.6b``.
    tag: type of weights that the file's name states: ``Q8_0``; "" if it states none.
    repo: OWNER/REPO, "" outside the hub's cache.
    inside: path within the repository, or below TREADLE_MODELS; "" for a repository's own folder.
    commit: of the snapshot, "" outside the hub's cache.
    is_main: whether the snapshot is the one that ``hf:OWNER/REPO`` means.
    current: whether neither ``main`` nor a newer snapshot has another file at this path; short
        names mean current models only.
    n_bytes: bytes of the files that are there.
    projector: the file beside a GGUF with which it reads pictures or sounds.
    unfinished: its interrupted download.
    n_missing: number of shards that are not there.
    """

    path: Path
    files: tuple[Path, ...]
    label: str
    tag: str
    repo: str
    inside: str
    commit: str
    is_main: bool
    current: bool
    n_bytes: int
    projector: Path | None = None
    unfinished: UnfinishedDownload | None = None
    n_missing: int = 0

    @property
    def is_whole(self) -> bool:
        """Whether all of the model's files are there."""
        return self.unfinished is None and not self.n_missing

    @property
    def is_folder(self) -> bool:
        """Whether the model is a Hugging Face folder."""
        return not self.path.name.lower().endswith(".gguf")

    @property
    def hub_name(self) -> str:
        """The ``hf:`` name that downloads the model, "" outside the hub's cache."""
        if not self.repo:
            return ""
        revision = "" if self.is_main else f"@{self.commit}"
        return f"hf:{self.repo}{revision}" + (f"/{self.inside}" if self.inside else "")

    @property
    def weights(self) -> Path:
        """The first file with weights that is there; without one the first file, else ``path``."""
        files = [file for file in self.files if file.suffix in (".gguf", ".safetensors")]
        return next(iter(files or self.files), self.path)

    @property
    def origin(self) -> str:
        """The name on the hub, or the path."""
        return self.hub_name or str(self.path)

    @property
    def projector_bytes(self) -> int:
        """Bytes of the model's projector, 0 without one."""
        return 0 if self.projector is None else size_of(self.projector)


def find_stored() -> list[StoredModel]:
    """Return every model in the hub's cache and the folder of TREADLE_MODELS, unfinished downloads
    included, sorted by label. Models elsewhere are not known.
    """
    notes = list(unfinished_downloads())
    found = [*models_in_cache(cache_folder(), notes), *models_in_folder(models_folder())]
    return sorted(found, key=lambda model: (model.label, model.repo, model.tag, model.inside))


def models_folder() -> Path | None:
    """Return the folder of ``TREADLE_MODELS``, None if it is not set."""
    given = os.environ.get("TREADLE_MODELS")
    return Path(os.path.expanduser(given)) if given else None


def models_in_folder(folder: Path | None) -> Iterator[StoredModel]:
    """Yield the models in a folder and at most MAX_DEPTH folders below it; none for None."""
    if folder is None or not folder.is_dir():
        return
    files = dict(files_below(folder, MAX_DEPTH))
    yield from models_among(folder, files, Snapshot())


def models_in_cache(root: Path, notes: Iterable[UnfinishedDownload] = ()) -> Iterator[StoredModel]:
    """Yield the models in huggingface_hub's cache folder ``root``, and its unfinished downloads;
    ``notes``: those that treadle recorded. Revisions that share a file share one model.
    """
    notes = list(notes)
    try:
        repositories = sorted(root.glob(f"{PREFIX}*--*"))
    except OSError:
        return
    for repository in repositories:
        repo = repository.name.removeprefix(PREFIX).replace("--", "/", 1)
        own = [note for note in notes if note.repo == repo]
        seen: set[Path] = set()  # first files of the models, without links
        named: set[str] = set()
        for snapshot in snapshots(repository, repo):
            folder = repository / "snapshots" / snapshot.commit
            for model in models_among(folder, dict(files_below(folder)), snapshot, own):
                first = model.weights.resolve()
                if first not in seen:
                    seen.add(first)
                    yield replace(model, current=model.inside not in named)
                    named.add(model.inside)
        for note in own:
            if not named & {note.paths[0], note.paths[0].rpartition("/")[0]}:
                yield unfinished_model(repository, repo, note)
        noted = {note.part for note in own}
        for part in sorted(repository.glob(f"blobs/*{INCOMPLETE}")):
            if part not in noted:  # of another program
                about = UnfinishedDownload(f"hf:{repo}", repo, (part.name,), 0, part, part)
                yield unfinished_model(repository, repo, about)


@dataclass(frozen=True)
class Snapshot:
    """One revision of a repository (OWNER/REPO), at ``commit``; ``is_main``: the one of branch
    ``main``. Without a repository, a folder outside the hub's cache.
    """

    repo: str = ""
    commit: str = ""
    is_main: bool = True


def snapshots(repository: Path, repo: str) -> list[Snapshot]:
    """Return the snapshots of a repository's folder: the one of ``main``, then the others, newest
    first.
    """
    try:
        main = (repository / "refs" / DEFAULT_REVISION).read_text().strip()
    except (OSError, ValueError):
        main = ""
    try:
        commits = [each for each in (repository / "snapshots").iterdir() if each.is_dir()]
        commits.sort(key=lambda each: (each.name == main, each.stat().st_mtime), reverse=True)
    except OSError:
        return []
    return [Snapshot(repo, each.name, each.name == main) for each in commits]


def files_below(folder: Path, depth: int = DEEPEST) -> Iterator[tuple[str, int]]:
    """Yield (path below ``folder``, bytes) of each file, at most ``depth`` folders down. Hidden
    folders and links to missing files are left out.
    """
    waiting = [("", 0)]
    while waiting:
        prefix, level = waiting.pop()
        try:
            entries = sorted(os.scandir(folder / prefix), key=lambda entry: entry.name)
        except OSError:
            continue
        for entry in entries:
            try:
                if entry.is_dir():
                    if not entry.name.startswith(".") and level < depth:
                        waiting.append((f"{prefix}{entry.name}/", level + 1))
                elif entry.is_file():
                    yield prefix + entry.name, entry.stat().st_size
            except OSError:
                continue


def models_among(
    folder: Path,
    files: Mapping[str, int],
    snapshot: Snapshot,
    notes: Iterable[UnfinishedDownload] = (),
) -> Iterator[StoredModel]:
    """Yield the models that ``files`` contain: bytes by path below ``folder``, which has the
    revision ``snapshot``. ``notes``: unfinished downloads of the repository.
    """
    repo = snapshot.repo
    of: dict[str, Any] = {
        "repo": repo,
        "commit": snapshot.commit,
        "is_main": snapshot.is_main,
        "current": True,
    }
    groups = ggufs_among(files)
    labels = {label_of(paths[0], repo)[0] for paths in groups}
    for paths in groups:
        match = SHARD.fullmatch(paths[0])
        count = int(match["count"]) if match else 1
        first = shard_name(match["stem"], 0, count) if match else paths[0]
        label, tag = label_of(first, repo)
        path = folder / first
        yield StoredModel(
            path,
            tuple(folder / each for each in paths),
            label,
            tag,
            inside=first,
            n_bytes=sum(files[each] for each in paths),
            projector=projector_of(path, alone=len(labels) == 1),
            unfinished=next((note for note in notes if first in note.paths), None),
            n_missing=count - len(paths),
            **of,
        )
    for prefix in folders_among(files):
        own = [path for path in files if path.startswith(prefix) and not path.endswith(".gguf")]
        inside = prefix.rstrip("/")
        index = folder / prefix / INDEX
        shards = (indexed_shards(index) if prefix + INDEX in files else None) or set()
        yield StoredModel(
            folder / inside,
            tuple(folder / each for each in own),
            label_of(inside or (PurePosixPath(repo).name if repo else folder.name))[0],
            "",
            inside=inside,
            n_bytes=sum(files[each] for each in own),
            unfinished=next((note for note in notes if prefix + CONFIG in note.paths), None),
            n_missing=sum(prefix + shard not in files for shard in shards),
            **of,
        )


def projector_of(path: Path, *, alone: bool) -> Path | None:
    """Return the most likely projector file beside a GGUF; None without one, and for one whose name
    is another model's, unless this model is ``alone`` in its folder.
    """
    found = next(iter(projectors_beside(path)), None)
    if found is None or (not alone and named_for_another(found.name, path.name)):
        return None
    return found


def ggufs_among(files: Iterable[str]) -> list[list[str]]:
    """Return the GGUF files that are models, each as a list of its shards. Projectors, importance
    matrices, llama.cpp's vocabularies without weights, and shards of implausibly large sets are
    left out.
    """
    groups: dict[str, list[str]] = {}
    for path in sorted(files):
        if not path.lower().endswith(".gguf") or is_projector_name(path):
            continue
        if "imatrix" in path or PurePosixPath(path).name.startswith(VOCABULARY):
            continue
        match = SHARD.fullmatch(path)
        if match and not 1 <= int(match["no"]) <= int(match["count"]) <= MAX_SHARDS:
            continue
        groups.setdefault(f"{match['stem']}/{match['count']}" if match else path, []).append(path)
    return list(groups.values())


def folders_among(files: Mapping[str, int]) -> list[str]:
    """Return the Hugging Face folders as prefixes of paths ("" or "sub/"). A folder inside another
    one, as sentence-transformers has them, belongs to that.
    """
    prefixes: list[str] = []
    for path in sorted(files, key=lambda path: path.count("/")):
        prefix, _, name = path.rpartition("/")
        prefix = f"{prefix}/" if prefix else ""
        if name == CONFIG and not any(prefix.startswith(outer) for outer in prefixes):
            weights = (each for each in files if each.startswith(prefix))
            if any(
                each.endswith((".safetensors", ".safetensors.index.json"))
                and "/" not in each.removeprefix(prefix)
                for each in weights
            ):
                prefixes.append(prefix)
    return prefixes


def label_of(path: str, repo: str = "") -> tuple[str, str]:
    """Return (label, tag) of a model file: its name in lower case, and the type of weights that its
    path states, "" if none.

    A file whose name says nothing (``model.gguf``) is named after its folder or repository.
    """
    match = SHARD.fullmatch(path)
    bare = match["stem"] if match else path.removesuffix(".gguf").removesuffix(".GGUF")
    found = [m["tag"].upper() for m in TAG.finditer(bare)]
    tag = found[-1] if found else ""
    tag = ALIASES.get(tag, tag) if tag.startswith("F") else tag
    for part in (*reversed(PurePosixPath(bare).parts), PurePosixPath(repo).name):
        label = TAG.sub("", part).strip("-._ ").lower().replace(" ", "-")
        for suffix in ("-gguf", "_gguf", ".gguf"):
            label = label.removesuffix(suffix)
        if label not in GENERIC:
            return label, tag
    return "model", tag


def unfinished_model(repository: Path, repo: str, note: UnfinishedDownload) -> StoredModel:
    """Return the entry of a download, which ``note`` describes, of which no file is complete.
    ``repository``: the folder of ``repo`` in the hub's cache.
    """
    first = note.paths[0]
    is_model = first.lower().endswith(".gguf") and not is_projector_name(first)
    inside = first if is_model else ""
    label, tag = label_of(inside or PurePosixPath(repo).name, repo)
    return StoredModel(
        repository / (inside or "snapshots"),
        (),
        label,
        tag,
        repo,
        inside,
        commit="",
        is_main=True,
        current=True,
        n_bytes=note.n_done,
        unfinished=note,
    )


def stored_at(path: Path) -> StoredModel:
    """Return the entry of a model's file or folder anywhere on this machine; its ``repo`` is ""."""
    folder = path if path.is_dir() else path.parent
    files = dict(files_below(folder, 1))
    for model in models_among(folder, files, Snapshot()):
        if model.path == path:
            return model
    label, tag = label_of(path.name)
    return StoredModel(path, (path,), label, tag, "", path.name, "", True, True, size_of(path))
