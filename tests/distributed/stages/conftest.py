"""A model whose stages are engines in this process."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from treadle.distributed.stages.front import FrontEngine
from treadle.distributed.stages.pipeline import Pipeline, StageLostError
from treadle.distributed.stages.stage import Batch, Given, Stage
from treadle.files.gguf import open_gguf
from treadle.isa import choose
from treadle.jit.host import host_features
from treadle.models.load import load_config
from treadle.models.stages import split

SETTINGS: dict[str, Any] = {"n_ctx": 256, "n_sequences": 3}


class Local:
    """A chain of stages here; ``kill`` loses one, with all that it held."""

    def __init__(self, path: Path, layers: list[range], **settings: Any) -> None:
        self.path = path
        self.layers = layers
        self.settings = settings
        self.stages: list[Stage | None] = [None] * len(layers)
        self.n_runs = 0
        self.dies_at = -1
        self.restart()

    def restart(self) -> None:
        isa = choose(host_features(), None).name
        self.stages = [
            stage or Stage(str(self.path), layers, isa=isa, n_threads=2, **self.settings)
            for stage, layers in zip(self.stages, self.layers, strict=True)
        ]

    def kill(self, i: int) -> None:
        stage = self.stages[i]
        self.stages[i] = None
        if stage is not None:
            stage.close()

    def run(self, batch: Batch) -> Given:
        self.n_runs += 1
        given: Given = {}
        for i, stage in enumerate(self.stages):
            if self.n_runs == self.dies_at and i == len(self.stages) // 2:
                self.kill(i)  # in the middle of a run: those before it have written already
                stage = None
            if stage is None:
                raise StageLostError(f"stage {i + 1} of {len(self.stages)} has ended")
            given = stage.run_laid_out(batch, given)
        return given

    def read(self, name: str) -> np.ndarray:
        last = self.stages[-1]
        assert last is not None
        return last.read(name)

    def close(self) -> None:
        for i in range(len(self.stages)):
            self.kill(i)


Staged = Callable[..., tuple[FrontEngine, Local]]


@pytest.fixture
def staged() -> Iterator[Staged]:
    """Makes an engine in so many stages."""
    made = []

    def make(path: Path, n: int, **settings: Any) -> tuple[FrontEngine, Local]:
        gguf = open_gguf(path)
        config = load_config(gguf)
        settings = SETTINGS | settings
        chain = Local(path, split(gguf, config, n), **settings)
        device = Pipeline(choose(host_features(), None), 2, chain)
        engine = FrontEngine(gguf, config, device, **settings)
        made.append((engine, gguf))
        return engine, chain

    yield make
    for engine, gguf in made:
        engine.close()
        gguf.close()
