"""The models that the router offers: of the command line, presets, folders and the library.

A name is unique among all. The folders and the library are read again every few seconds, and when a
client lists the models or names an unknown one, then at most once a second.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable, Mapping
from dataclasses import field, replace
from pathlib import Path

from treadle.base.fast_classes import dataclass
from treadle.base.humanize import listed
from treadle.catalog.names import LATEST, has_parts
from treadle.catalog.stored import StoredModel, models_in_folder
from treadle.errors import FileError, TreadleError
from treadle.server.http.api_errors import ApiError
from treadle.server.http.log import log
from treadle.server.router.served_model import MemoryRequest, ServedModel

RESCAN_S = 1.0
SHOWN = 20  # names in a message
Scan = Callable[[], Iterable[ServedModel]]


@dataclass(frozen=True)
class EngineOptions:
    """Options for the engines of models that are found in a folder or the library.

    ``args``: the engine's command-line options, ``cache``: the memory that these ask for. Both come
    from the router's command line and from the presets for all models; the command line wins.
    ``settings``: by a found model's name, the preset of that name, if it gives no MODEL itself; its
    options replace these.
    """

    args: tuple[str, ...] = ()
    cache: MemoryRequest = MemoryRequest()
    settings: Mapping[str, ServedModel] = field(default_factory=dict)

    def applied(self, name: str, ref: str, source: str) -> ServedModel:
        """Return a model that was found in a folder or the library, with the settings of the preset
        ``name`` or, without one, these options. ``name``: the model's; ``ref``: its path;
        ``source``: where it was found, for messages.
        """
        own = self.settings.get(name)
        if own is None:
            own = ServedModel(name, ref, self.args, cache=self.cache)
        return replace(own, name=name, ref=ref, source=source, stamp=stamp_of(Path(ref)))


class ModelList:
    """All models, by name. ``fixed``: those of the command line and of presets; each of ``scans``
    finds more. ``aliases``: returns further names that clients gave models, name to model's name.

    Raises TreadleError if two fixed models have one name.
    """

    def __init__(
        self,
        fixed: Iterable[ServedModel],
        scans: Iterable[Scan] = (),
        aliases: Callable[[], Mapping[str, str]] = dict,
        *,
        logs: bool = True,
    ) -> None:
        self._logs = logs
        self.fixed = list(fixed)
        self.scans = list(scans)
        self.copies = aliases
        check_names(self.fixed)
        self._models: dict[str, ServedModel] = {}
        self._scanned = -RESCAN_S
        self._warned: set[str] = set()
        self.refresh()

    @property
    def models(self) -> list[ServedModel]:
        """The models in their order: fixed ones, then those found."""
        return list(self._models.values())

    @property
    def is_stale(self) -> bool:
        """Whether the folders were last read more than a second ago."""
        return bool(self.scans) and time.monotonic() - self._scanned > RESCAN_S

    def refresh(self) -> list[str]:
        """Read the folders and the library again; return the names of models that are gone, or
        whose file was replaced by another one.
        """
        old = self._models
        found = {model.name: model for model in self.fixed}
        paths = {str(model.path()) for model in self.fixed}
        taken = {name.lower() for model in self.fixed for name in names(model)}
        for scan in self.scans:
            for model in scan():
                if model.ref in paths:
                    continue
                if model.name.lower() in taken:
                    self._warn(f"{model.source}: the name {model.name} is taken: not served")
                    continue
                taken |= {name.lower() for name in names(model)}
                found[model.name] = model
        for name, original in self.copies().items():
            if original in found and name.lower() not in taken:
                own = found[original]
                found[original] = replace(own, aliases=(*own.aliases, name))
        self._models = found
        self._scanned = time.monotonic()
        return [
            name
            for name, model in old.items()
            if name not in found or (found[name].ref, found[name].stamp) != (model.ref, model.stamp)
        ]

    def _warn(self, message: str) -> None:
        if message not in self._warned:
            self._warned.add(message)
            if self._logs:
                log(level="warning", message=message)

    def default(self) -> ServedModel:
        """Return the model for a call that names none: the first pinned one, else the first. Raises
        ApiError if there are no models.
        """
        models = self.models
        for model in models:
            if model.pinned:
                return model
        if not models:
            raise ApiError(404, "the server has no models", code="model_not_found", param="model")
        return models[0]

    def find(
        self, name: str | None, shown: Callable[[ServedModel], bool] = lambda model: True
    ) -> ServedModel:
        """Return the model with this name or alias, in any letter case; else the only one whose
        name contains the parts of ``name``, among those that ``shown`` accepts. ``default`` for
        None and "". Raises ApiError with the available names.
        """
        if not name:
            return self.default()
        found = self.get(name)
        if found is not None:
            return found
        known = [model for model in self.models if shown(model)]
        fitting = [model for model in known if has_parts(name.lower(), model.name.lower())]
        if len(fitting) == 1:
            return fitting[0]
        what = f"fits {len(fitting)} models" if fitting else "no such model"
        told = listed([model.name for model in fitting or known], SHOWN) or "none"
        raise ApiError(
            404,
            f"model {name[:200]!r}: {what}; available: {told}",
            param="model",
            code="model_not_found",
        )

    def get(self, name: str) -> ServedModel | None:
        """Return the model with exactly this name or alias, in any letter case; None without
        one.
        """
        if name in self._models:
            return self._models[name]
        plain = name.lower().removesuffix(LATEST)
        for model in self.models:
            if plain in (known.lower().removesuffix(LATEST) for known in names(model)):
                return model
        return None


def stamp_of(path: Path) -> tuple[int, int] | None:
    """Return a file's time of change (ns) and size (bytes), by which a replaced file is noticed;
    None if it cannot be read.
    """
    try:
        info = path.stat()
    except OSError:
        return None
    return info.st_mtime_ns, info.st_size


def names(model: ServedModel) -> tuple[str, ...]:
    """Return a model's name and aliases."""
    return (model.name, *model.aliases)


def check_names(models: Iterable[ServedModel]) -> None:
    """Raise TreadleError if two models share a name or alias."""
    seen: dict[str, ServedModel] = {}
    for model in models:
        for name in names(model):
            other = seen.setdefault(name.lower(), model)
            if other is not model:
                raise TreadleError(
                    f"two models have the name {name}: {where(other)} and {where(model)}"
                )


def where(model: ServedModel) -> str:
    """Return a text for messages: the source that named a model, and its file."""
    return f"{model.source} ({model.ref})" if model.source else model.ref


def scan_folder(folder: Path, options: EngineOptions) -> Scan:
    """Return a function that lists the models in a folder, with ``options`` for their engines.
    Raises FileError if the folder does not exist.
    """
    if not folder.is_dir():
        raise FileError("no such folder", path=str(folder), expected="a folder of models")

    def scan() -> list[ServedModel]:
        found = [model for model in models_in_folder(folder) if model.is_whole]
        stems = [file_stem(model) for model in found]
        return [
            options.applied(
                stem if stems.count(stem) == 1 else model.inside.removesuffix(".gguf"),
                str(model.path),
                str(folder),
            )
            for model, stem in zip(found, stems, strict=True)
        ]

    return scan


def scan_library(options: EngineOptions) -> Scan:
    """Return a function that lists the downloaded models of this machine, with ``options`` for
    their engines.
    """

    def scan() -> list[ServedModel]:
        from treadle.catalog.names import name_models
        from treadle.catalog.stored import find_stored

        whole = [model for model in find_stored() if model.is_whole and model.current]
        made = [
            options.applied(named.name, str(named.model.path), named.model.origin)
            for named in name_models(whole)
        ]
        return [replace(model, from_library=True) for model in made]

    return scan


def file_stem(model: StoredModel) -> str:
    """Return the name for a model, from its file: without the ending, without a shard's number; for
    a file of CTranslate2 the name of its folder.
    """
    from treadle.files.splits import CTRANSLATE2, SHARD

    name = model.path.name
    if name == CTRANSLATE2:
        return model.path.parent.name
    match = SHARD.fullmatch(name)
    return match["stem"] if match else name.removesuffix(".gguf")
