"""A model in stages with the same interface as any other model."""

from __future__ import annotations

from typing import Any, ClassVar

from treadle.api.model import Model, load
from treadle.distributed.cluster.chain import RayChain
from treadle.distributed.stages.front import FrontEngine
from treadle.distributed.stages.pipeline import Pipeline
from treadle.engine.engine import Engine
from treadle.errors import UnsupportedError
from treadle.isa import choose
from treadle.jit.host import host_features
from treadle.models.stages import split, staged

OF_ENGINES = ("kv", "n_sequences", "kv_bytes", "kv_tokens", "deterministic")


class StagedModel(Model):
    """A model whose layers are split over Ray actors, made by ``treadle.cluster.load``.
    ``engine.n_lost``: number of times that stages were lost and replaced.
    """

    engine_type: ClassVar[type[Engine]] = FrontEngine

    def __init__(self, path: Any, *, stages: int, **settings: Any) -> None:
        plain = {**(load.__kwdefaults__ or {}), "threads": 1}
        self._n_stages = stages
        self._settings = {**plain, **settings}
        if self._settings.get("cache_dir") is not None:
            raise UnsupportedError("cache_dir: not supported with pipeline stages")
        super().__init__(path, **self._settings)

    def device_type(self, name: str, isa: str | None, n_threads: int, progress: object) -> Pipeline:
        """Split the layers, start the stages, and return the front engine's device, a ``Pipeline``.
        Raises UnsupportedError for a device other than "cpu", and for layers that cannot be split.
        """
        if name != "cpu":
            raise UnsupportedError(f"device={name!r}: pipeline stages run on CPUs only")
        row = choose(host_features(), isa)
        own = {name: self._settings[name] for name in OF_ENGINES}
        own |= {"isa": row.name, "n_threads": n_threads, "n_ctx": self.n_ctx}
        parts = split(self.gguf, self.config, self._n_stages)
        for part in parts:
            staged(self.config, part)  # raises for layers that cannot be split, before any start
        path = str(self.path.resolve())
        return Pipeline(row, n_threads, RayChain(path, parts, own))
