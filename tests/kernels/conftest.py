"""One kernel cache for the whole test run, so that no kernel is compiled twice and the user's own
stays untouched.
"""

from __future__ import annotations

import os
from collections.abc import Iterator

import numpy as np
import pytest

from tests.kernels.harness import Memory


@pytest.fixture(scope="session", autouse=True)
def kernel_cache(tmp_path_factory: pytest.TempPathFactory) -> Iterator[None]:
    with pytest.MonkeyPatch.context() as patch:
        if "TREADLE_TEST_CACHE" in os.environ:  # for a quicker edit-and-test loop
            patch.setenv("TREADLE_CACHE", os.environ["TREADLE_TEST_CACHE"])
        else:
            patch.setenv("TREADLE_CACHE", str(tmp_path_factory.mktemp("kernels")))
        yield


@pytest.fixture
def memory() -> Iterator[Memory]:
    made = Memory()
    yield made
    made.check()


@pytest.fixture
def rng(request: pytest.FixtureRequest) -> np.random.Generator:
    """Seeded by the test's name: the same data in every order of tests."""
    return np.random.default_rng(list(request.node.name.encode()))
