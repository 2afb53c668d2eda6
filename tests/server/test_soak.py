"""A few seconds of ``bench/soak.py``: mixed calls, clients that leave, an end in the middle."""

from __future__ import annotations

import importlib.util
import signal
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from tests.server.conftest import ROOT


@pytest.fixture
def soak(one_kernel_cache: Path) -> Iterator[Any]:
    spec = importlib.util.spec_from_file_location("soak", ROOT / "bench" / "soak.py")
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules["soak"] = module  # dataclasses look for it
    spec.loader.exec_module(module)
    yield module
    del sys.modules["soak"]


@pytest.mark.slow
def test_every_answer_is_the_one_of_the_call_alone(soak: Any) -> None:
    def enough(found: Any) -> bool:
        return bool(server.n_starts > 1 and found.counts["answered"])

    server = soak.Server([])
    server.start()
    try:
        found = soak.Soak(server, list(soak.calls()), seed=1)
        memory = found.run(8, 6, restart_s=1, enough=lambda: enough(found))
    finally:
        server.end(signal.SIGTERM)
    assert found.wrong == []
    assert found.counts["answered"] > 0
    assert server.n_starts > 1
    assert all(n_kib > 0 for n_kib in memory)


def noticed(said: list[str]) -> set[str]:
    return {line.partition(": ")[0] for line in said}


@pytest.mark.slow
def test_a_wrong_answer_and_a_lost_one_are_noticed(soak: Any) -> None:
    class Always(soak.Server):  # type: ignore[misc]
        def kib(self) -> int:
            return 1

    server = Always([])
    server.start()
    try:
        asks = list(soak.calls())[:2]
        found = soak.Soak(server, asks, seed=1)
        found.alone[asks[0]] = {0: ["something else", "stop"]}
        found.asks = [*asks, soak.Ask("/v1/completions", '{"prompt": 5}')]
        found.run(1, 3, restart_s=1e9, enough=lambda: noticed(found.wrong) == {"wrong", "lost"})
    finally:
        server.end(signal.SIGTERM)
    assert noticed(found.wrong) == {"wrong", "lost"}


def test_memory_that_grows_is_told(soak: Any) -> None:
    assert soak.grown([100] * 50) == 0
    assert soak.grown([*range(100, 200)]) > 0.4
    assert soak.grown([50, 60, *[100] * 48]) == 0  # how it starts does not count
