"""One Ray on this machine for all tests here, with four processors declared."""

from __future__ import annotations

import os
from collections.abc import Iterator
from importlib.util import find_spec
from typing import Any

import pytest

from tests.distributed.cluster.fake_ray import FakeRay, faked

FOLDER = "tests/distributed/cluster/"
N_CPUS = 4
OBJECT_STORE = 100 << 20  # bytes


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """What takes minutes is for ``make cluster``. Ray's own use of its libraries is not ours."""
    for item in items:
        if FOLDER in item.nodeid:
            item.add_marker(pytest.mark.filterwarnings("ignore::DeprecationWarning"))
    if os.environ.get("TREADLE_CLUSTER") != "1":
        skip = pytest.mark.skip(reason="minutes long: make cluster")
        for item in items:
            if FOLDER in item.nodeid and item.get_closest_marker("whole_cluster"):
                item.add_marker(skip)


@pytest.fixture(scope="session")
def cluster(one_kernel_cache: Any) -> Iterator[Any]:
    if find_spec("ray") is None:
        assert os.environ.get("CI") != "true", "Ray is not installed"
        pytest.skip("Ray is not installed: pip install 'treadle[cluster]'")
    import logging

    with pytest.MonkeyPatch.context() as patch:
        # Ray ends processes where memory is short: ours, even if others have taken it.
        patch.setenv("RAY_memory_monitor_refresh_ms", "0")
        import ray

        ray.init(
            num_cpus=N_CPUS,
            include_dashboard=False,
            object_store_memory=OBJECT_STORE,
            logging_level=logging.ERROR,
            log_to_driver=False,
        )
        try:
            yield ray
        finally:
            ray.shutdown()


@pytest.fixture
def fake_ray() -> Iterator[FakeRay]:
    """Our modules on a fake of Ray (``fake_ray.py``), for one test."""
    with faked() as fake:
        yield fake
