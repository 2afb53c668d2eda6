"""Engine processes: forked from a warm one, or new; without a model."""

from __future__ import annotations

import asyncio
import os
import signal
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from tests.server.conftest import ROOT
from tests.server.router.fakes import until
from tests.server.router.test_pool import in_loop
from treadle.server.router.engine import EngineOrder
from treadle.server.router.launcher import (
    EngineLauncher,
    EngineProcess,
    ForkLauncher,
    NewProcessLauncher,
)

MODULE = "tests.server.router.fake_process"
Launch = Callable[[str], Any]


def order(ref: str) -> EngineOrder:
    return EngineOrder("a", ref, (), "here", ("key",), 0)


async def first(engine: EngineProcess, kind: str) -> Any:
    """The first report of a kind."""
    while kind not in (report := await engine.reports.get()):
        assert "exit" not in report, report
    return report[kind]


def is_alive(pid: int) -> bool:
    """A child of init that has ended may stay as a zombie where nobody is init."""
    try:
        state = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0]
    except OSError:
        return False
    return state != "Z"


@pytest.fixture(autouse=True)
def path(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.syspath_prepend(str(ROOT))


@pytest.mark.parametrize("launch", [ForkLauncher, NewProcessLauncher])
@in_loop
async def test_an_engine_from_its_start_to_its_end(launch: Launch) -> None:
    launcher: EngineLauncher = launch(MODULE)
    try:
        engine = await launcher.start(order("wait"))
        progress = await first(engine, "progress")
        assert progress == {"stage": "compile", "done": 1, "total": 2}
        assert (await first(engine, "ready"))["socket"] == "here"
        engine.terminate()
        assert await engine.wait() == 0
        engine = await launcher.start(order("fail"))
        assert await first(engine, "failed") == "as it was told"
        assert await engine.wait() == 1
        engine.kill()  # has no effect on a process that may have its number now
    finally:
        await launcher.close()


@in_loop
async def test_engines_have_nothing_to_do_with_each_other() -> None:
    launcher = ForkLauncher(MODULE)
    try:
        broken, other = [await launcher.start(order(ref)) for ref in ("break", "wait")]
        assert await broken.wait() == -signal.SIGSEGV
        facts = await first(other, "ready")
        assert facts["parent"] == launcher.pid
        assert not other.ended.done()
        assert os.getpgid(facts["pid"]) != os.getpgid(0)  # Ctrl-C does not reach it
    finally:
        await launcher.close()
    assert await other.wait() == -9
    await until(lambda: not is_alive(facts["pid"]))


@in_loop
async def test_a_warm_process_that_was_killed_is_replaced() -> None:
    launcher = ForkLauncher(MODULE)
    try:
        engine = await launcher.start(order("wait"))
        facts = await first(engine, "ready")
        assert launcher.pid is not None
        os.kill(launcher.pid, signal.SIGKILL)
        assert await engine.wait() == -9
        await until(lambda: not is_alive(facts["pid"]))
        again = await launcher.start(order("wait"))
        await first(again, "ready")
    finally:
        await launcher.close()


@in_loop
async def test_engines_end_with_the_router() -> None:
    """However that ends: their pipes are closed."""
    launcher = NewProcessLauncher(MODULE)
    try:
        engine = await launcher.start(order("wait"))
        await first(engine, "ready")
        (own,) = launcher.engines
        assert own.process.stdin is not None
        own.process.stdin.close()
        assert await asyncio.wait_for(engine.wait(), 60) == 3
    finally:
        await launcher.close()
