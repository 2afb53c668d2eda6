"""Download of a named model: choose it, fetch it unless it is here, return its local path."""

from __future__ import annotations

import shutil
from collections.abc import Callable, Mapping
from difflib import get_close_matches
from pathlib import Path
from typing import Any

from treadle.base.humanize import listed
from treadle.base.humanize import n_bytes as size
from treadle.errors import FileError, TreadleError, UnsupportedError
from treadle.files.projector_files import is_projector_name
from treadle.files.splits import CONFIG, INDEX, MODELOPT, SENTENCES, SINGLE
from treadle.hub import cache
from treadle.hub.failure import explain
from treadle.hub.name import HubName, parse
from treadle.hub.offers import (
    QUALITY,
    RepositoryModel,
    best,
    find_offers,
    find_projector,
    one_model,
    projectors_near,
    rank,
    tag_of,
    tagged,
)
from treadle.hub.resume import INCOMPLETE, fetch_blob, size_of
from treadle.machine.memory import usable_memory
from treadle.models.archs import ARCHS

ProgressCallback = Callable[[str, int, int], None]
Say = Callable[[str], None]

BESIDE = (  # files of a Hugging Face folder that are read besides weights, if present
    *("generation_config.json", "tokenizer.json", "tokenizer_config.json", "tokenizer.model"),
    "tiktoken.model",
    "spiece.model",
    *("special_tokens_map.json", "added_tokens.json", "vocab.json", "merges.txt"),
    *("chat_template.jinja", "chat_template.json", MODELOPT, INDEX),
    *("preprocessor_config.json", "processor_config.json"),  # of pictures and sound
    *("modules.json", "1_Pooling/config.json", *SENTENCES, "config_sentence_transformers.json"),
    *(f"{dense}/{name}" for dense in ("2_Dense", "3_Dense") for name in (CONFIG, SINGLE)),
)
USUAL = "Q4_K_M"  # the type that other programs choose
SHOWN = 10  # models that an error lists


def download(
    ref: str,
    *,
    progress: ProgressCallback | None = None,
    say: Say = lambda text: None,
    to_run: bool = True,
    projector: bool | None = False,
) -> Path:
    """Return the local path of the model that ``ref`` (``hf:...``) names, downloading what is not
    here yet.

    A file: every shard of a split model is fetched, and the first one's path is returned. A
    repository, or a folder or a type (``:Q4_K_M``) in it: the best GGUF model that fits into free
    memory, or one that was downloaded before; without GGUF files, the folder of the safetensors.

    ``say`` is called with what was chosen and why; ``progress`` with a stage, the bytes done and
    the bytes in all. ``to_run``: safetensors must fit into free memory. ``projector``: whether to
    download the model's projector file too, if its repository has one; None: only with a new model;
    True: also for a model that was downloaded before without it.

    Raises FileError if there is no such model (it lists those there are), if none fits, or without
    network or permission; UnsupportedError, before any download, if a GGUF model that is to be
    chosen has an architecture that treadle lacks (a file named in full is not checked).
    """
    name = parse(ref)
    stored = cache.files(name)
    if name.path.lower().endswith(".gguf"):
        return fetch_file(name, stored, progress, say, projector)
    here = in_folder(name, stored)
    chosen = choose_downloaded(name, find_offers(here))
    if chosen is not None:
        if not name.tag:
            say(f"{name}: {chosen.paths[0]}, downloaded before; another: {name.root}:TYPE")
        if projector and find_projector(stored, chosen) is None:
            fetch_missing_projector(name, chosen, progress, say)
        return fetch(name, chosen.paths, progress)
    if not name.tag and cache.is_whole(name, here):
        return fetch_folder(name, here, progress, say, to_run)
    info = look_up(name)
    every = sizes_of(info)
    if name.path in every:
        return fetch(name, name.shards(), progress)
    files = in_folder(name, every)
    offers = find_offers(files)
    if not offers:
        return fetch_folder(name, files, progress, say, to_run)
    check_architecture(name, getattr(info, "gguf", None))
    wanted = projector is not False
    beside = find_projector(every, offers[0]) if wanted else None
    n_beside = every[beside] if beside else 0
    chosen = choose(name, offers, n_beside)
    say(reason(name, chosen, offers))
    check_disk(name, chosen.n_bytes + n_beside)
    if wanted:
        fetch_projector(name, every, chosen, progress, say)
    return fetch(name, chosen.paths, progress, chosen.n_bytes)


def fetch_file(
    name: HubName,
    stored: Mapping[str, int],
    progress: ProgressCallback | None,
    say: Say,
    projector: bool | None,
) -> Path:
    """Download the GGUF file that the user named, with all its shards, and return the path of the
    first. ``stored``: the files here, path to bytes; the other arguments as in ``download``.
    """
    here = stored.keys() >= set(name.shards())
    model = RepositoryModel(tuple(name.shards()), 0, *tag_of(name.path))
    lacks = projector is not False and find_projector(stored, model) is None
    n_bytes = 0
    if here and projector and lacks and not is_projector_name(name.path):
        fetch_missing_projector(name, model, progress, say)
    elif not here:
        info = look_up(name)  # asks once; a download without a network tries for 25 s
        files = sizes_of(info)
        if files.keys() >= set(model.paths):
            n_bytes = sum(files[path] for path in model.paths)
            check_disk(name, sum(files[path] for path in model.paths if path not in stored))
            if lacks and not is_projector_name(name.path):
                fetch_projector(name, files, model, progress, say)
    return fetch(name, name.shards(), progress, n_bytes)


def fetch_missing_projector(
    name: HubName, model: RepositoryModel, progress: ProgressCallback | None, say: Say
) -> None:
    """Download the projector of a model that was downloaded without one. Where the hub cannot be
    reached, only ``say`` so: the model itself is here, and most models have no projector.
    ``progress`` and ``say``: as in ``download``.
    """
    try:
        files = sizes_of(look_up(name))
    except FileError as error:
        say(f"whether the repository has a projector file is not known: {error}")
        return
    fetch_projector(name, files, model, progress, say)


def fetch_projector(
    name: HubName,
    files: Mapping[str, int],
    model: RepositoryModel,
    progress: ProgressCallback | None,
    say: Say,
) -> None:
    """Download the projector of ``model``, if the repository's ``files`` (path to bytes) have one.
    ``progress`` and ``say``: as in ``download``.
    """
    found = find_projector(files, model)
    if found is not None:
        say(f"{name.root}: {found}, {size(files[found])}, with which the model reads pictures")
        fetch(name, [found], progress)


def download_projector(
    ref: str, *, progress: ProgressCallback | None = None, say: Say = lambda text: None
) -> Path:
    """Return the local path of the projector file that ``ref`` (``hf:...``) names, or of the best
    one in a repository or its folder, downloading it if it is not here yet. ``progress`` and
    ``say``: as in ``download``.

    Raises FileError if there is none, or without network or permission.
    """
    name = parse(ref)
    if name.path.lower().endswith(".gguf"):
        return fetch(name, [name.path], progress)
    files = cache.files(name)
    found = next(iter(projectors_near(files, name.path)), None)
    if found is None:
        files = sizes_of(look_up(name))
        found = next(iter(projectors_near(files, name.path)), None)
    if found is None:
        raise FileError("has no projector file", path=ref, expected="a GGUF with mmproj")
    say(f"{name.root}: {found}, {size(files[found])}")
    return fetch(name, [found], progress)


def sizes_of(info: Any) -> dict[str, int]:
    """Return the files of a repository, path to bytes, from ``info``, a ``ModelInfo`` of
    huggingface_hub.
    """
    return {s.rfilename: s.size or 0 for s in info.siblings or ()}


def choose_downloaded(name: HubName, offers: list[RepositoryModel]) -> RepositoryModel | None:
    """Return the best of the downloaded models ``offers`` that ``name`` fits; None if there is
    none, or if they are of several models.

    It is taken even if memory is short now: mapped, it runs from the disk, and the user does not
    expect another download.
    """
    same = one_model(tagged(offers, name.tag), name.repo)
    return (best(same, free_bytes()) or best(same, None)) if same else None


def choose(name: HubName, offers: list[RepositoryModel], n_beside: int = 0) -> RepositoryModel:
    """Return the model in ``offers`` to download: the best that fits into free memory, less
    ``n_beside`` bytes for its projector; one whose type was named is taken even if it does not fit.
    Raises FileError, with a list, if none fits or the offers are of several models.
    """
    wanted = tagged(offers, name.tag)
    same = one_model(wanted, name.repo)
    if not wanted:
        raise FileError(f"has no {name.tag}; {choices(name, offers)}", path=str(name))
    if not same:
        raise FileError(f"holds several models; {choices(name, wanted)}", path=str(name))
    if name.tag and len(same) == 1:
        return same[0]  # named explicitly: mapped, it runs even if it does not fit
    n_free = free_bytes()
    found = best(same, None if n_free is None else n_free - n_beside)
    if found is None:
        smallest = sorted(same, key=lambda offer: offer.n_bytes)
        need = f"the smallest model needs about {size(smallest[0].needs)}"
        if n_free is None or smallest[0].needs <= n_free:
            need = (
                "only types below 3 bits fit, and their answers are much worse: name one to use it"
            )
        what = f"{size(n_free or 0)} of memory is free, and {need}"
        raise FileError(f"{what}; {choices(name, smallest)}", path=str(name))
    return found


def free_bytes() -> int | None:
    """Return the bytes of free memory that a model may take; None if the system does not tell."""
    bound = usable_memory()
    return bound.free_bytes if bound else None


def reason(name: HubName, chosen: RepositoryModel, offers: list[RepositoryModel]) -> str:
    """Return a message for the user: which model was chosen, why, and how to name another."""
    text = f"{name}: {chosen.paths[0]}, {size(chosen.n_bytes)}"
    if len(chosen.paths) > 1:
        text += f" in {len(chosen.paths)} files"
    if name.tag or len(offers) == 1:
        return text
    n_free = free_bytes()
    fits = f" that fits into {size(n_free)} of free memory" if n_free else ""
    usual = [offer for offer in offers if rank(offer) < len(QUALITY)]
    others = [offer for offer in usual if offer.n_bytes < chosen.n_bytes]
    text += f", the best of {len(offers)} types{fits}"
    if others:
        smaller = next((offer for offer in others if offer.tag == USUAL), others[0])
        text += f"; smaller and faster: {name.root}:{smaller.tag} ({size(smaller.n_bytes)})"
    else:
        text += f"; another: {name.root}:TYPE"
    return text


def choices(name: HubName, offers: list[RepositoryModel]) -> str:
    """Return a text for an error: up to ``SHOWN`` models with their sizes, and how to name one."""
    several = len({offer.stem for offer in offers}) > 1 or not all(o.tag for o in offers)
    shown = [f"{o.paths[0] if several else o.tag} ({size(o.n_bytes)})" for o in offers]
    form = f"{name.root}/FILE" if several else f"{name.root}:{offers[0].tag}"
    return f"available: {listed(shown, SHOWN)}: name one as {form}"


def in_folder(name: HubName, files: Mapping[str, int]) -> dict[str, int]:
    """Return those of ``files`` (path to bytes) that are below the folder in ``name``; all without
    one.
    """
    folder = f"{name.path}/" if name.path else ""
    return {path: n for path, n in files.items() if path.startswith(folder)}


# -- the hub ------------------------------------------------------------------------------------


def look_up(name: HubName) -> Any:
    """Return huggingface_hub's ``ModelInfo`` of a repository, with the files and their sizes.
    Raises FileError.
    """
    from huggingface_hub import HfApi

    try:
        return HfApi().model_info(name.repo, revision=name.revision, files_metadata=True)
    except Exception as error:
        raise explain(error, name) from error


def check_architecture(name: HubName, said: Any) -> None:
    """Raise UnsupportedError if treadle lacks the architecture in ``said``, the hub's ``gguf``
    facts about a model (a dict, None if unknown), so that no gigabytes are downloaded for nothing.
    """
    arch = said.get("architecture") if isinstance(said, dict) else None
    if isinstance(arch, str) and arch not in (*ARCHS, "clip"):  # clip: the hub read an mmproj file
        raise UnsupportedError(
            f"{name}: architecture {arch!r:.60} is not supported; nothing was downloaded (name "
            f"a file in full to download it anyway); supported: {', '.join(ARCHS)}"
        )


def check_disk(name: HubName, n_bytes: int) -> None:
    """Raise FileError if the cache's disk has no room for ``n_bytes`` more, less the parts that
    interrupted downloads have left.
    """
    n_bytes -= sum(
        size_of(part) for part in cache.repository(name.repo).glob(f"blobs/*{INCOMPLETE}")
    )
    folder = cache.cache_folder()
    while not folder.exists() and folder != folder.parent:
        folder = folder.parent
    free = shutil.disk_usage(folder).free
    if free < n_bytes:
        raise FileError(
            f"the download needs {size(n_bytes)}, but {folder} has only {size(free)} free: free "
            "some space, or set HF_HOME to another folder",
            path=str(name),
        )


def fetch(
    name: HubName,
    paths: tuple[str, ...] | list[str],
    progress: ProgressCallback | None,
    n_bytes: int = 0,
) -> Path:
    """Download the files ``paths`` of a repository, unless they are here; return the first one's
    path. ``n_bytes``: of all of them, 0 if unknown; ``progress``: as in ``download``. Raises
    FileError; OSError for the local disk.
    """
    from huggingface_hub import errors, hf_hub_download

    folder = cache.snapshot(name)
    if folder is not None and cache.files(name).keys() >= set(paths):
        return folder / paths[0]
    found = []
    try:
        for path in paths:
            report = reporter(path, progress)
            if folder is None or not (folder / path).is_file():
                fetch_blob(name, path, paths, n_bytes, report)
            found.append(
                hf_hub_download(name.repo, path, revision=name.revision, tqdm_class=report)
            )
    except FileError:
        raise
    except errors.LocalEntryNotFoundError as error:
        raise explain(error, name) from error
    except errors.EntryNotFoundError as error:
        raise FileError(f"no such file{similar_files(name)}", path=str(name)) from error
    except Exception as error:
        if isinstance(error, OSError) and error.filename:  # the local disk: full, or not writable
            raise
        raise explain(error, name) from error
    return Path(found[0])


def similar_files(name: HubName) -> str:
    """Return a suggestion for a file that does not exist: the repository's GGUF files with similar
    names, else a few of them; "" if the hub cannot be asked.
    """
    try:
        files = [s.rfilename for s in look_up(name).siblings or ()]
    except TreadleError:  # a suggestion only: the first error is the one to show
        return ""
    models = [path for path in files if path.lower().endswith(".gguf")]
    stems = {path[: -len(".gguf")].lower(): path for path in models}
    found = get_close_matches(name.path[: -len(".gguf")].lower(), stems, n=3)
    if found:
        return f"; did you mean {' or '.join(stems[stem] for stem in found)}?"
    if not models:
        return "; the repository has no .gguf file"
    return "; available: " + listed(models, 8)


def fetch_folder(
    name: HubName,
    files: Mapping[str, int],
    progress: ProgressCallback | None,
    say: Say,
    to_run: bool,
) -> Path:
    """Download a Hugging Face folder (configuration, tokenizer, safetensors) and return its path.
    ``files``: path to bytes; ``to_run``: the weights must fit into free memory. Raises FileError if
    they do not, or if the folder has no configuration and safetensors.
    """
    prefix = f"{name.path}/" if name.path else ""
    files = {path.removeprefix(prefix): n for path, n in files.items()}
    top = [path for path in files if "/" not in path]
    weights = [path for path in top if path.endswith(".safetensors")]
    if len(weights) > 1:  # Mistral's repositories hold the same weights a second time
        weights = [path for path in weights if not path.startswith("consolidated")]
    if CONFIG not in top or not weights or name.tag:
        kinds = sorted({Path(path).suffix for path in top if Path(path).suffix})
        what = "no GGUF model" if files else f"no folder '{name.path}'"
        if name.tag:
            what += f", so no {name.tag}"
        elif files:
            what += f", nor {CONFIG} and safetensors (its files end in {', '.join(kinds)})"
        raise FileError(f"has {what}", path=str(name), expected="a repository of GGUF files")
    n_bytes = sum(files[path] for path in weights)
    n_free = free_bytes() if to_run else None
    wanted = [CONFIG, *(path for path in BESIDE if path in files), *weights]
    if n_free is not None and n_bytes + (1 << 30) > n_free:
        raise FileError(
            f"has no GGUF files, and its safetensors ({size(n_bytes)}) do not fit into "
            f"{size(n_free)} of free memory: look for a repository like "
            f"hf:{name.repo}-GGUF, with smaller types",
            path=str(name),
        )
    say(f"{name}: {len(weights)} safetensors files, {size(n_bytes)}, used as they are")
    check_disk(name, n_bytes)
    return fetch(name, [prefix + path for path in wanted], progress, n_bytes).parent


def reporter(name: str, progress: ProgressCallback | None) -> Any:
    """Return a class to pass as huggingface_hub's ``tqdm_class``: it draws no bar, but calls
    ``progress`` with "downloading ``name``", the bytes done, and the bytes in all.
    """

    class Report:
        def __init__(self, *, total: float | None = None, initial: float = 0, **_: Any) -> None:
            self.total = total
            self.n = initial
            self.update(0)

        def update(self, n: float | None = 1) -> None:
            self.n += n or 0
            if progress is not None:
                progress(f"downloading {name}", int(self.n), int(self.total or 0))

        def __enter__(self) -> Report:
            return self

        def __exit__(self, *_: object) -> None:
            self.close()

        def close(self) -> None:
            if progress is not None and self.total:  # remove the bar, however it ended
                progress(f"downloading {name}", int(self.total), int(self.total))

    return Report
