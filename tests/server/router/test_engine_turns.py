"""Turns of engines: one at a time, in alternation, and never for ever."""

from __future__ import annotations

import threading
from pathlib import Path

import pytest

from treadle.server.router import engine_turns
from treadle.server.router.engine_turns import EngineStepLock


def test_one_computes_at_a_time_and_then_the_other(tmp_path: Path) -> None:
    held: list[str] = []
    inside: list[str] = []
    first_in = threading.Event()

    def work(name: str) -> None:
        turns = EngineStepLock(tmp_path)
        for _ in range(20):
            with turns:
                inside.append(name)
                first_in.set()
                assert len(inside) == 1
                held.append(name)
                inside.clear()

    with EngineStepLock(tmp_path):
        threads = [threading.Thread(target=work, args=(name,)) for name in "ab"]
        for thread in threads:
            thread.start()
        assert not first_in.wait(0.02)
    for thread in threads:
        thread.join()
    assert sorted(held) == ["a"] * 20 + ["b"] * 20


def test_an_engine_that_hangs_holds_up_nobody_for_ever(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(engine_turns, "MOST_S", 0.01)
    with EngineStepLock(tmp_path), EngineStepLock(tmp_path):
        pass
    with EngineStepLock(tmp_path / "gone"):
        pass
