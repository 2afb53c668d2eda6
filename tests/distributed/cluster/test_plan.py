from __future__ import annotations

import pytest

from treadle.distributed.cluster import load
from treadle.distributed.cluster.plan import ReplicaPlan
from treadle.errors import TreadleError


@pytest.mark.parametrize(
    ("plan", "n"),
    [
        (ReplicaPlan(None), 2),
        (ReplicaPlan(None, 3, load={"threads": 4}), 13),
        (ReplicaPlan(None, 1, 4, load={"threads": 2}), 9.1),
        (ReplicaPlan(None, 2, 2), 5.2),
    ],
)
def test_processors_are_those_of_all_actors(plan: ReplicaPlan, n: float) -> None:
    assert plan.n_cpus == pytest.approx(n)


@pytest.mark.parametrize(
    ("plan", "mebi"),
    [
        (ReplicaPlan(None), 64),
        (ReplicaPlan(None, load={"mmproj": "mmproj.gguf"}), 64),
        (ReplicaPlan(None, load={"mmproj": False}), 16),
        (ReplicaPlan(None, stages=2), 16),
    ],
)
def test_bodies_are_as_large_as_any_replica_s(plan: ReplicaPlan, mebi: int) -> None:
    assert plan.max_body == mebi << 20


def test_without_ray_the_cure_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("treadle.distributed.cluster.find_spec", lambda name: None)
    with pytest.raises(TreadleError, match=r"needs ray: pip install 'treadle\[cluster\]'"):
        load(stages=2)
