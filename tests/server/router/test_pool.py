"""Loads, unloads and memory of the router's engines, without any engine."""

from __future__ import annotations

import asyncio
import math
import signal
import tempfile
from collections.abc import Awaitable, Callable
from functools import wraps
from pathlib import Path
from typing import Any

import pytest

from tests.server.router.fakes import FakeLauncher, models, pooled, settled, until
from treadle.server.http.api_errors import ApiError
from treadle.server.router.pool import EnginePool

A, B, C = models("a", "b", "c")


def in_loop(test: Callable[..., Awaitable[None]]) -> Callable[..., None]:
    @wraps(test)
    def run(*args: Any, **given: Any) -> None:
        asyncio.run(asyncio.wait_for(test(*args, **given), 120))

    return run


async def one_call(pool: EnginePool, *wanted: Any) -> None:
    for model in wanted:
        pool.release(await pool.acquire(model))


@in_loop
async def test_a_load_is_shared_by_all_who_wait() -> None:
    launcher = FakeLauncher(automatic=False)
    async with pooled(launcher) as pool:
        assert pool.state(A) == "unloaded"
        waiting = [asyncio.ensure_future(pool.acquire(A)) for _ in range(3)]
        await until(lambda: launcher.engines)
        assert pool.state(A) == "loading"
        launcher.engines[0].report(progress={"stage": "compile", "done": 1, "total": 4})
        await settled()
        load = pool.slots["a"].load
        assert load is not None
        assert load.progress == 0.25
        await launcher.engines[0].ready()
        engines = await asyncio.gather(*waiting)
        assert pool.state(A) == "loaded"
        assert len(set(engines)) == len(launcher.engines) == 1
        assert engines[0].n_running == 3
        for engine in engines:
            pool.release(engine)
        assert engines[0].n_running == 0
        assert await pool.acquire(A) is engines[0]
        pool.release(engines[0])


@in_loop
async def test_a_load_is_cancelled_when_all_have_left() -> None:
    launcher = FakeLauncher(automatic=False)
    async with pooled(launcher, {"a": 5}, memory=10) as pool:
        first = asyncio.ensure_future(pool.acquire(A))
        second = asyncio.ensure_future(pool.acquire(A))
        await until(lambda: launcher.engines)
        first.cancel()
        await settled()
        assert not launcher.engines[0].ended.done()
        second.cancel()
        await until(lambda: launcher.engines[0].ended.done())
        assert launcher.engines[0].signals == [signal.SIGKILL]
        await until(lambda: pool.state(A) == "unloaded")
        assert pool.used == 0
        launcher.automatic = True
        await one_call(pool, A)
        assert pool.used == 5 << 20


@in_loop
async def test_a_call_waits_for_the_end_of_a_cancelled_load() -> None:
    """And then has a load of its own; so has the next one, if that call leaves too."""
    launcher = FakeLauncher(automatic=False)
    async with pooled(launcher, {"a": 5}, memory=10) as pool:
        first = asyncio.ensure_future(pool.acquire(A))
        await until(lambda: launcher.engines)
        launcher.engines[0].lingers = True
        first.cancel()
        await settled()
        for _ in range(2):
            waiting = asyncio.ensure_future(pool.acquire(A))
            await settled()
            waiting.cancel()
            await settled()
        unloading = asyncio.ensure_future(pool.unload(A))
        await settled()
        assert not unloading.done()
        waiting = asyncio.ensure_future(pool.acquire(A))
        await settled()
        assert launcher.names == ["a"]
        assert launcher.engines[0].signals == [signal.SIGKILL]
        assert pool.used == 5 << 20
        launcher.automatic = True
        launcher.engines[0].end(-9)
        pool.release(await waiting)
        await unloading
        assert launcher.names == ["a", "a"]
        assert pool.used == 5 << 20


@in_loop
async def test_a_load_that_nobody_waits_for_goes_on_if_it_was_asked_for() -> None:
    launcher = FakeLauncher(automatic=False)
    async with pooled(launcher) as pool:
        loading = asyncio.ensure_future(pool.load(A))
        call = asyncio.ensure_future(pool.acquire(A))
        await until(lambda: launcher.engines)
        call.cancel()
        await settled()
        await launcher.engines[0].ready()
        await loading
        assert pool.state(A) == "loaded"


@pytest.mark.parametrize(
    ("why", "code", "told"),
    [("a.gguf: is no model", 1, "a cannot be loaded: a.gguf: is no model"), ("", -9, "SIGKILL")],
)
@in_loop
async def test_a_failed_load_is_told_to_all_and_tried_again(why: str, code: int, told: str) -> None:
    launcher = FakeLauncher(automatic=False)
    async with pooled(launcher, {"a": 5}, memory=10) as pool:
        waiting = [asyncio.ensure_future(pool.acquire(A)) for _ in range(2)]
        await until(lambda: launcher.engines)
        if why:
            launcher.engines[0].report(failed=why)
        launcher.engines[0].end(code)
        for error in await asyncio.gather(*waiting, return_exceptions=True):
            assert isinstance(error, ApiError)
            assert told in error.message
            assert error.code == "model_load_failed"
            assert pool.slots["a"].error == error.message
        assert pool.used == 0
        launcher.automatic = True
        await one_call(pool, A)
        assert pool.slots["a"].error == ""
        assert launcher.names == ["a", "a"]


@in_loop
async def test_an_engine_that_cannot_be_started() -> None:
    launcher = FakeLauncher(error=OSError(11, "too many processes"))
    async with pooled(launcher) as pool:
        with pytest.raises(ApiError, match="too many processes"):
            await pool.acquire(A)


@in_loop
async def test_the_least_recently_used_is_unloaded_when_memory_is_short() -> None:
    launcher = FakeLauncher()
    async with pooled(launcher, {"a": 4, "b": 4, "c": 4}, memory=10) as pool:
        await one_call(pool, A, B, A, C)
        assert [pool.state(model) for model in (A, B, C)] == ["loaded", "unloaded", "loaded"]
        assert launcher.engines[1].signals == [signal.SIGTERM]
        assert pool.used == 8 << 20


@in_loop
async def test_a_pinned_model_stays() -> None:
    launcher = FakeLauncher()
    (pinned,) = models("a", pinned=True)
    async with pooled(launcher, {"a": 6, "b": 4, "c": 7}, memory=10) as pool:
        await one_call(pool, pinned, B)
        with pytest.raises(ApiError, match=r"c needs 7.0 MiB .* pinned .* 6.0 MiB of 10.0 MiB"):
            await pool.acquire(C)
        assert pool.state(pinned) == pool.state(B) == "loaded"
        engine = pool.engine(pinned)
        assert engine is not None
        pool.keep(engine, 0.0)
        await settled()
        assert pool.state(pinned) == "loaded"


@in_loop
async def test_a_model_larger_than_the_memory_is_refused() -> None:
    launcher = FakeLauncher()
    async with pooled(launcher, {"a": 4, "b": 11}, memory=10) as pool:
        await one_call(pool, A)
        with pytest.raises(ApiError, match=r"b needs 11.0 MiB .* may have 10.0 MiB") as found:
            await pool.acquire(B)
        assert found.value.code == "model_too_large"
        assert pool.state(A) == "loaded"


@in_loop
async def test_nothing_is_unloaded_under_a_running_text() -> None:
    """The load waits for its end; new calls to the other wait behind the load."""
    launcher = FakeLauncher()
    async with pooled(launcher, {"a": 6, "b": 6}, memory=10) as pool:
        running = await pool.acquire(A)
        other = asyncio.ensure_future(pool.acquire(B))
        await until(lambda: running.draining)
        again = asyncio.ensure_future(pool.acquire(A))
        await settled()
        assert launcher.names == ["a"]
        assert not running.stopping
        pool.release(running)
        pool.release(await other)
        pool.release(await again)
        assert launcher.names == ["a", "b", "a"]
        assert pool.used == 6 << 20


@in_loop
async def test_who_leaves_while_he_waits_for_room_costs_nobody_anything() -> None:
    launcher = FakeLauncher()
    async with pooled(launcher, {"a": 6, "b": 6}, memory=10) as pool:
        running = await pool.acquire(A)
        other = asyncio.ensure_future(pool.acquire(B))
        await until(lambda: running.draining)
        told: asyncio.Queue[Any] = asyncio.Queue()
        pool.listeners.add(told)
        again = asyncio.ensure_future(pool.acquire(A))
        await settled()
        other.cancel()
        assert await again is running
        assert [told.get_nowait()["model"] for _ in range(told.qsize())] == ["b"]
        assert running.n_running == 2
        pool.release(running)
        pool.release(running)
        assert launcher.names == ["a"]
        assert pool.state(B) == "unloaded"


@in_loop
async def test_one_that_cannot_go_on_ends_though_its_memory_is_not_needed() -> None:
    """As after a change of its file. Calls that come meanwhile get another engine."""
    launcher = FakeLauncher()
    async with pooled(launcher, {"a": 6, "b": 6}, memory=10) as pool:
        running = await pool.acquire(A)
        other = asyncio.ensure_future(pool.acquire(B))
        await until(lambda: running.draining)
        pool.retire(running)
        other.cancel()
        await settled()
        again = asyncio.ensure_future(pool.acquire(A))
        await settled()
        assert running.draining
        assert not running.stopping
        pool.release(running)
        pool.release(await again)
        assert launcher.names == ["a", "a"]
        assert pool.used == 6 << 20


@in_loop
async def test_a_model_is_loaded_for_itself_behind_an_engine_that_cannot_go_on() -> None:
    launcher = FakeLauncher()
    async with pooled(launcher) as pool:
        running = await pool.acquire(A)
        pool.retire(running)
        loading = asyncio.ensure_future(pool.load(A))
        await settled()
        pool.release(running)
        await loading
        assert launcher.names == ["a", "a"]


@in_loop
async def test_a_file_that_is_replaced_during_its_load() -> None:
    """Calls that wait already are answered from the old one, the next one from the new."""
    old, new = (models("a", stamp=(time, 4))[0] for time in (1, 2))
    launcher = FakeLauncher(automatic=False)
    async with pooled(launcher) as pool:
        waiting = asyncio.ensure_future(pool.acquire(old))
        await until(lambda: launcher.engines)
        pool.replace(new)
        await launcher.engines[0].ready()
        engine = await waiting
        launcher.automatic = True
        again = asyncio.ensure_future(pool.acquire(new))
        await settled()
        assert not engine.stopping
        pool.release(engine)
        pool.release(await again)
        assert launcher.names == ["a", "a"]
        assert pool.engine(new) is not None


@in_loop
async def test_one_that_ends_by_itself_while_another_makes_room() -> None:
    launcher = FakeLauncher()
    async with pooled(launcher, {"a": 4, "b": 4, "c": 9}, memory=10) as pool:
        await one_call(pool, A, B)
        first, second = launcher.engines
        first.lingers = True
        other = asyncio.ensure_future(pool.acquire(C))
        await until(lambda: first.signals)
        second.end(-9)
        await until(lambda: pool.slots["b"].engine is None)
        first.end(0)
        pool.release(await other)
        assert launcher.names == ["a", "b", "c"]
        assert not second.signals


@in_loop
async def test_loads_take_turns_in_the_order_of_their_arrival() -> None:
    launcher = FakeLauncher()
    async with pooled(launcher, {"a": 6, "b": 6, "c": 6}, memory=10) as pool:
        running = await pool.acquire(A)
        waiting = []
        for model in (C, B, C):
            waiting.append(asyncio.ensure_future(pool.acquire(model)))
            await until(lambda: running.draining)  # the first load has its turn
            await settled()
        pool.release(running)
        for call in (waiting[0], waiting[2], waiting[1]):
            pool.release(await call)
        assert launcher.names == ["a", "c", "b"]


@in_loop
async def test_one_that_was_downloaded_just_now_tells_its_own_size() -> None:
    """200 MiB of it are the program's."""
    launcher = FakeLauncher(facts={"n_bytes": 50 << 20, "cache_bytes": 0})
    async with pooled(launcher, {"a": 100}, memory=300) as pool:
        await one_call(pool, A, B)
        assert [pool.state(model) for model in (A, B)] == ["unloaded", "loaded"]
        assert pool.used == 250 << 20
        launcher.facts = {"n_bytes": 500 << 20, "cache_bytes": 0}
        with pytest.raises(ApiError, match=r"d needs 700 MiB .* may have 300 MiB"):
            await pool.acquire(models("d")[0])
        assert launcher.engines[-1].ended.done()
        assert pool.state(B) == "loaded"


@in_loop
async def test_calls_without_a_pause_do_not_starve_a_load() -> None:
    launcher = FakeLauncher(automatic=False)
    async with pooled(launcher, {"a": 6, "b": 6}, memory=10) as pool:
        first = asyncio.ensure_future(pool.acquire(A))
        await until(lambda: launcher.engines)
        other = asyncio.ensure_future(pool.acquire(B))
        await settled()
        await launcher.engines[0].ready()
        running = await first
        await until(lambda: running.draining)
        launcher.automatic = True
        again = asyncio.ensure_future(pool.acquire(A))
        await settled()
        pool.release(running)
        pool.release(await other)
        pool.release(await again)
        assert launcher.names == ["a", "b", "a"]


@in_loop
async def test_at_most_so_many_are_loaded() -> None:
    launcher = FakeLauncher()
    async with pooled(launcher, most_loaded=2) as pool:
        await one_call(pool, A, B, A, C)
        assert [pool.state(model) for model in (A, B, C)] == ["loaded", "unloaded", "loaded"]


@in_loop
async def test_a_crash_is_one_engines_own() -> None:
    launcher = FakeLauncher()
    async with pooled(launcher, {"a": 4, "b": 4}, memory=10) as pool:
        broken = await pool.acquire(A)
        other = await pool.acquire(B)
        launcher.engines[0].end(-11)
        await until(lambda: pool.state(A) == "unloaded")
        slot = pool.slots["a"]
        assert (slot.exit_code, slot.n_crashes) == (-11, 1)
        assert "SIGSEGV" in slot.error
        assert pool.used == 4 << 20
        assert pool.state(B) == "loaded"
        pool.release(broken)
        pool.release(other)
        await one_call(pool, A)
        assert launcher.names == ["a", "b", "a"]


@in_loop
async def test_idle_engines_are_unloaded() -> None:
    """By the router's time, a model's own, or a call's; never while a call runs."""
    launcher = FakeLauncher()
    (quick,) = models("b", idle_s=0.0)
    async with pooled(launcher, idle_s=1000.0) as pool:
        engine = await pool.acquire(A)
        assert engine.timer is None
        pool.release(engine)
        assert engine.idle_s == 1000.0
        assert engine.expires is not None
        running = await pool.acquire(quick)
        await settled()
        assert pool.state(quick) == "loaded"
        pool.release(running)
        await until(lambda: pool.state(quick) == "sleeping")
        await one_call(pool, quick)
        assert pool.slots["b"].n_loads == 2
        pool.release(await pool.acquire(A), keep_s=math.inf)
        assert engine.timer is None
        pool.release(await pool.acquire(A), keep_s=0.0)
        await until(lambda: pool.state(A) == "sleeping")


@in_loop
async def test_a_call_that_comes_as_the_idle_time_ends_gets_another_engine() -> None:
    launcher = FakeLauncher()
    async with pooled(launcher, idle_s=1000.0) as pool:
        await one_call(pool, A)
        engine = pool.engine(A)
        assert engine is not None
        pool._unload_idle(engine)
        again = await pool.acquire(A)
        assert again is not engine
        pool.release(again)


@in_loop
async def test_an_engine_that_does_not_end_is_killed(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("treadle.server.router.pool.STOP_S", 0.01)
    launcher = FakeLauncher()
    async with pooled(launcher) as pool:
        await one_call(pool, A)
        launcher.engines[0].obeys = False
        await pool.unload(A)
        assert launcher.engines[0].signals == [signal.SIGTERM, signal.SIGKILL]
        assert pool.state(A) == "unloaded"


@in_loop
async def test_an_unload_lets_running_calls_end() -> None:
    launcher = FakeLauncher()
    async with pooled(launcher) as pool:
        running = await pool.acquire(A)
        unloading = asyncio.ensure_future(pool.unload(A))
        await settled()
        again = asyncio.ensure_future(pool.acquire(A))
        await settled()
        assert not running.stopping
        pool.release(running)
        await unloading
        pool.release(await again)
        assert launcher.names == ["a", "a"]


@in_loop
async def test_an_unload_cancels_a_load() -> None:
    launcher = FakeLauncher(automatic=False)
    async with pooled(launcher) as pool:
        waiting = asyncio.ensure_future(pool.acquire(A))
        await until(lambda: launcher.engines)
        await pool.unload(A)
        with pytest.raises(ApiError, match="cancelled"):
            await waiting
        assert pool.state(A) == "unloaded"
        waiting = asyncio.ensure_future(pool.acquire(A))
        await asyncio.sleep(0)
        await pool.unload(A)  # before the load has begun
        assert pool.state(A) == "unloaded"
        with pytest.raises(ApiError, match="cancelled"):
            await waiting


@in_loop
async def test_a_model_that_is_forgotten_under_a_call_is_known_while_it_is_loaded_again() -> None:
    launcher = FakeLauncher()
    async with pooled(launcher, {"a": 5}, memory=10) as pool:
        running = await pool.acquire(A)
        forgetting = asyncio.ensure_future(pool.forget("a"))
        await settled()
        again = asyncio.ensure_future(pool.acquire(A))
        await settled()
        pool.release(running)
        await forgetting
        engine = await again
        assert pool.engine(A) is engine is not running
        assert pool.used == 5 << 20
        pool.release(engine)
        await pool.forget("a")
        assert not pool.slots


@in_loop
async def test_engines_have_ports_where_a_sockets_path_would_be_too_long(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    folder = tmp_path / ("x" * 100)
    folder.mkdir()
    monkeypatch.setattr(tempfile, "tempdir", str(folder))
    launcher = FakeLauncher(facts={"port": 1234})
    async with pooled(launcher) as pool:
        engine = await pool.acquire(A)
        assert launcher.engines[0].order.socket == ""
        assert engine.socket_address == 1234
        pool.release(engine)


@in_loop
async def test_states_are_told_as_they_change() -> None:
    launcher = FakeLauncher(automatic=False)
    async with pooled(launcher) as pool:
        queue: asyncio.Queue[Any] = asyncio.Queue()
        pool.listeners.add(queue)
        loading = asyncio.ensure_future(pool.load(A))
        await until(lambda: launcher.engines)
        launcher.engines[0].report(progress={"stage": "downloading x", "done": 1, "total": 2})
        await until(lambda: pool.state(A) == "downloading")
        launcher.engines[0].report(progress={"stage": "compile", "done": 1, "total": 2})
        await launcher.engines[0].ready()
        await loading
        await pool.unload(A)
        told = []
        while not queue.empty():
            event = queue.get_nowait()
            assert event["event"] == "model_status"
            told.append((event["data"]["status"], event["data"].get("progress")))
        assert told == [
            ("loading", None),
            ("downloading", {"x": {"done": 1, "total": 2}}),
            ("loading", {"stages": ["compile"], "current": "compile", "value": 0.5}),
            ("loaded", None),
            ("unloaded", None),
        ]
