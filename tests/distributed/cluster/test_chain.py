"""A model whose layers are in several processes, on a Ray of this machine."""

from __future__ import annotations

import os
import signal
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import treadle
from tests.engine.test_engine import text
from treadle.errors import FileError, TreadleError, UnsupportedError

LOAD: dict[str, Any] = {"threads": 1, "context": 256, "n_sequences": 4, "deterministic": True}
PROMPTS = ["def add(a, b):", "import os\n", "class Stack:", "for i in range("]


def spoken(model: treadle.Model) -> list[str]:
    return [m.text for m in model.generate_many(PROMPTS, max_tokens=24, temperature=0)]


@pytest.fixture(scope="module")
def one(one_kernel_cache: Path) -> tuple[np.ndarray, list[str]]:
    """What one process gives."""
    with treadle.load(**LOAD) as model:
        return model.logits(text(60)), spoken(model)


def pids(ray: Any, model: Any) -> list[int]:
    def pid(_: Any) -> int:
        return os.getpid()

    actors = model.engine.device.chain.actors
    found: list[int] = ray.get([actor.__ray_call__.remote(pid) for actor in actors])
    return found


def kill_while_it_writes(ray: Any, model: Any, stage: int) -> list[str]:
    made = [model.generate(p, max_tokens=24, temperature=0) for p in PROMPTS]
    for generation in made:
        next(generation)
    os.kill(pids(ray, model)[stage], signal.SIGKILL)
    return [generation.finish() for generation in made]


def check(ray: Any, n: int, one: tuple[np.ndarray, list[str]], stages: list[int]) -> None:
    from treadle.distributed import cluster

    logits, texts = one
    with cluster.load(stages=n, **LOAD) as model:
        assert len(set(pids(ray, model))) == n
        assert np.array_equal(model.logits(text(60)), logits)
        assert spoken(model) == texts
        for i, stage in enumerate(stages, 1):
            assert kill_while_it_writes(ray, model, stage) == texts
            assert model.engine.n_lost == i  # type: ignore[attr-defined]
        assert np.array_equal(model.logits(text(60)), logits)
        assert len(set(pids(ray, model))) == n


def test_two_processes_give_the_same_bits_and_one_may_be_killed(
    cluster: Any, one: tuple[np.ndarray, list[str]]
) -> None:
    check(cluster, 2, one, [1])


@pytest.mark.whole_cluster
@pytest.mark.parametrize("n", [2, 4])
def test_each_process_may_be_killed(
    cluster: Any, one: tuple[np.ndarray, list[str]], n: int
) -> None:
    check(cluster, n, one, list(range(n)))


@pytest.mark.whole_cluster
def test_what_goes_wrong_in_a_stage_is_told(cluster: Any, tmp_path: Path) -> None:
    from treadle.api.options import packaged_model
    from treadle.distributed import cluster as treadle_cluster

    with pytest.raises(TreadleError, match="99 stages: the model has"):
        treadle_cluster.load(stages=99, **LOAD)
    with pytest.raises(UnsupportedError, match="cache_dir"):
        treadle_cluster.load(stages=2, cache_dir=tmp_path, **LOAD)
    copy = tmp_path / "model.gguf"
    copy.write_bytes(packaged_model().read_bytes())
    with treadle_cluster.load(copy, stages=2, **LOAD) as model:
        model.logits(text(5))
        os.truncate(copy, 1 << 12)
        with pytest.raises(FileError):
            model.logits(text(40))
