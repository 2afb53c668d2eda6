"""Stages as actors, on a fake of Ray: what they are given, what each of its errors becomes."""

from __future__ import annotations

from importlib import import_module
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import treadle
from tests.conftest import WriteTiny
from tests.distributed.cluster import fake_ray as fakes
from tests.distributed.cluster.fake_ray import FakeRay
from treadle.distributed import cluster as treadle_cluster
from treadle.distributed.stages.pipeline import StageLostError
from treadle.distributed.stages.stage import Batch
from treadle.errors import FileError, TreadleError, UnsupportedError

PARTS = [range(0, 2), range(2, 3), range(3, 6)]
SETTINGS = {"n_threads": 2, "isa": "portable"}


class NamedStage:
    """A stage whose output names all layers so far."""

    def __init__(self, path: str, layers: range, **settings: Any) -> None:
        if path == "none.gguf":
            raise FileError("no such file", path=Path(path))
        assert settings == SETTINGS
        self.layers = layers
        self.error: Exception | None = None

    def run_laid_out(self, batch: Batch, given: dict[str, Any]) -> dict[str, Any]:
        if self.error:
            raise self.error
        layers = [*given.get("layers", []), *self.layers]
        return {"layers": layers, "n_tokens": batch.n_tokens}

    def read(self, name: str) -> np.ndarray:
        return np.array([self.layers.stop, len(name)])


@pytest.fixture
def chain(fake_ray: FakeRay, monkeypatch: pytest.MonkeyPatch) -> Any:
    """Three stages."""
    module: Any = import_module("treadle.distributed.cluster.chain")
    monkeypatch.setattr(module, "Stage", NamedStage)
    return module.RayChain("model.gguf", PARTS, SETTINGS)


def batch(n_bytes: int = 8) -> Batch:
    return Batch(5, 1, "logits", bytes(n_bytes))


def test_each_stage_passes_its_output_to_the_next(chain: Any, fake_ray: FakeRay) -> None:
    assert fake_ray.n_starts == 1
    assert chain.run(batch()) == {"layers": [0, 1, 2, 3, 4, 5], "n_tokens": 5}
    assert chain.read("logits").tolist() == [6, 6]
    assert not fake_ray.put
    for actor in fake_ray.made:
        assert actor.options["num_cpus"] == 2
        assert actor.options["scheduling_strategy"] == "SPREAD"
        assert actor.options["max_restarts"] == 0  # it would come back without its pages


def test_a_large_batch_is_stored_once(chain: Any, fake_ray: FakeRay) -> None:
    large = batch(1 << 20)
    assert chain.run(large)["layers"] == [0, 1, 2, 3, 4, 5]
    assert fake_ray.put == [large]


def test_a_lost_stage_is_named_and_alone_replaced(chain: Any, fake_ray: FakeRay) -> None:
    first, second, third = chain.actors
    second.error = fakes.RayActorError("The actor died.\nIts log follows.")
    message = r"^stage 2 of 3 \(layers 2 to 2 on 10\.0\.0\.7\) ended: The actor died\.$"
    with pytest.raises(StageLostError, match=message):
        chain.run(batch())
    chain.restart()
    assert (chain.actors[0], chain.actors[2]) == (first, third)
    assert chain.actors[1] is fake_ray.made[-1] is not second
    assert len(fake_ray.made) == 4
    assert chain.run(batch())["layers"] == [0, 1, 2, 3, 4, 5]


def test_two_lost_stages_are_both_named(chain: Any) -> None:
    for i in (0, 2):
        chain.actors[i].error = fakes.ObjectLostError()
    with pytest.raises(StageLostError, match=r"^stage 1 .* and stage 3 .* ended: ObjectLostError$"):
        chain.run(batch())


def test_an_error_of_a_stage_keeps_its_kind(chain: Any) -> None:
    chain.actors[1].object._stage.error = FileError("the file has shrunk", path=Path("x"))
    with pytest.raises(FileError, match="the file has shrunk"):
        chain.run(batch())
    chain.actors[1].object._stage.error = KeyError("stream")
    with pytest.raises(fakes.RayTaskError) as raised:
        chain.run(batch())
    assert isinstance(raised.value.cause, KeyError)


def test_a_loss_where_every_stage_answers_again(chain: Any) -> None:
    """Ray may have lost the value alone."""
    lost = fakes.RayTaskError(fakes.ObjectLostError("object 7 is gone"))
    with pytest.raises(StageLostError, match=r"^a stage ended: object 7 is gone$"):
        chain._get(fakes.Ref(error=lost))


def test_no_free_processors_are_an_error_and_nothing_is_left(chain: Any, fake_ray: FakeRay) -> None:
    module: Any = import_module("treadle.distributed.cluster.chain")
    fake_ray.hangs = True
    with pytest.raises(
        TreadleError, match=r"stage 1 of 3 .*no machine had 2 free processors within 300 s"
    ):
        module.RayChain("model.gguf", PARTS, SETTINGS)
    assert fake_ray.killed == fake_ray.made[3:]  # a dead one cannot be killed: that is no error
    assert fake_ray.n_starts == 1


def test_its_end_kills_each_actor_once(chain: Any, fake_ray: FakeRay) -> None:
    chain.close()
    chain.close()
    assert fake_ray.killed == fake_ray.made


def test_a_model_in_stages_gives_the_bits_of_one_process(
    tiny: WriteTiny, fake_ray: FakeRay
) -> None:
    path = tiny("llama", n_layer=2)
    load: dict[str, Any] = {"threads": 1, "context": 64, "deterministic": True}
    with treadle.load(path, **load) as one:
        expected = one.logits(list(range(3, 12)))
    with treadle_cluster.load(path, stages=2, **load) as model:
        assert [actor.object._stage.layers for actor in fake_ray.made] == [range(1), range(1, 2)]
        assert np.array_equal(model.logits(list(range(3, 12))), expected)
    assert fake_ray.killed == fake_ray.made


def test_what_a_model_in_stages_cannot_do(
    tiny: WriteTiny, fake_ray: FakeRay, tmp_path: Path
) -> None:
    path = tiny("llama", "Q8_0", n_layer=4)
    with pytest.raises(UnsupportedError, match="cache_dir: not supported with pipeline stages"):
        treadle_cluster.load(path, stages=2, cache_dir=tmp_path)
    with pytest.raises(UnsupportedError, match="device='cuda': pipeline stages run on CPUs only"):
        treadle_cluster.load(path, stages=2, device="cuda")
    with pytest.raises(TreadleError, match="9 stages: the model has 4 layers"):
        treadle_cluster.load(path, stages=9)
    assert not fake_ray.made
