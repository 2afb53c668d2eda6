"""The engines of the router: loaded for a call, unloaded when idle or when memory is short.

Everything here runs in the router's event loop. A load is shared by all calls that wait for it, and
cancelled when all of them have left. Loads get their memory in the order of their arrival.
An engine with running calls is never unloaded to make room: it gets no new calls, and is unloaded
after the running ones.
"""

from __future__ import annotations

import asyncio
import math
import os
import secrets
import tempfile
import time
from collections.abc import Awaitable, Callable, Iterator
from contextlib import suppress
from pathlib import Path
from typing import Any

from treadle.base.fast_classes import dataclass
from treadle.base.humanize import n_bytes
from treadle.server.http.api_errors import ApiError, busy
from treadle.server.http.log import log
from treadle.server.http.redaction import without_folders
from treadle.server.router.engine import EngineOrder
from treadle.server.router.launcher import EngineLauncher, EngineProcess
from treadle.server.router.memory_need import MemoryNeed, need_of
from treadle.server.router.served_model import ServedModel

STOP_S = 10.0  # an engine without calls gets to end itself
NO_SOCKETS = ""
MOST_PATH = 100  # bytes of a UNIX socket's path, on every system
TOLD = ("n_bytes", "cache_bytes", "n_ctx")  # facts of an engine that clients may know
UNLOADED = "unloaded"
LOADING = "loading"
DOWNLOADING = "downloading"
LOADED = "loaded"
SLEEPING = "sleeping"
Needs = Callable[[ServedModel, "int | None"], "MemoryNeed | None"]
Event = dict[str, Any]


@dataclass(frozen=True)
class PoolSettings:
    """Settings of an EnginePool.

    memory: bytes for all engines together, None for no bound. idle_s: seconds without a call after
    which an engine is unloaded. n_keys: number of API keys of the router. most_loaded: engines at
    once, None for no bound. log: write the server's log.
    """

    memory: int | None = None
    idle_s: float = math.inf
    n_keys: int = 1
    most_loaded: int | None = None
    log: bool = True


@dataclass(eq=False)
class LoadedEngine:
    """An engine that answers calls, or did before it began to stop. ``n_running``: calls that it
    answers now. ``keys``: its API keys, as of ``EngineOrder``.
    """

    model: ServedModel
    process: EngineProcess
    socket_address: str | int  # path of its UNIX socket, or its port on this machine
    keys: tuple[str, ...]
    facts: dict[str, Any]  # what it reported: sizes, and whether it only transcribes
    idle_s: float  # seconds without a call after which it is unloaded
    n_running: int = 0
    used_s: float = 0.0  # when its last call ended, by the event loop's clock
    expires: float | None = None  # Unix time at which it is unloaded, if no call comes
    retiring: bool = False  # it is to be unloaded, whatever happens
    n_claims: int = 0  # loads that wait for its memory
    stopping: bool = False  # its process is being ended
    timer: asyncio.TimerHandle | None = None  # that unloads it when idle

    @property
    def public_facts(self) -> dict[str, Any]:
        """The sizes in ``facts`` that clients may know."""
        return {name: self.facts[name] for name in TOLD if name in self.facts}

    @property
    def draining(self) -> bool:
        """Whether the engine gets no new calls, because it is to be unloaded."""
        return self.retiring or self.n_claims > 0


@dataclass(eq=False)
class ModelLoad:
    """A load under way, shared by ``n_waiting`` calls that wait for it. ``done`` of ``total``:
    progress of ``stage``, in units of the stage (0 of 0: unknown).
    """

    task: asyncio.Task[LoadedEngine] | None = None
    n_waiting: int = 0
    wanted: bool = False  # it goes on without a waiting call
    cancelling: bool = False  # it was cancelled, and has not ended yet
    stage: str = ""
    done: int = 0
    total: int = 0

    @property
    def progress(self) -> float | None:
        """Done share of the present stage, 0 to 1; None if unknown."""
        return self.done / self.total if self.total else None

    def cancel(self) -> None:
        """Cancel the load, once: a second cancellation would keep it from waiting for its engine's
        end.
        """
        if self.task is not None and not self.cancelling:
            self.cancelling = True
            self.task.cancel()


@dataclass(eq=False)
class ModelSlot:
    """State of one model in the pool: its engine, its load, its last error."""

    model: ServedModel
    engine: LoadedEngine | None = None
    load: ModelLoad | None = None
    stop: asyncio.Task[None] | None = None  # ends the engine; None while it is not being ended
    reserved: int = 0  # bytes of memory reserved for the engine, also while it loads
    sleeping: bool = False  # unloaded because it was idle
    error: str = ""  # of its last load, or its crash; "" for none
    exit_code: int | None = None  # of its last engine that failed; negative: a signal
    n_loads: int = 0
    n_crashes: int = 0
    load_s: float = 0.0  # seconds of the last load


class EnginePool:
    """The engines of a router: loads, unloads, and the memory of all. ``needs(model, most)``:
    estimates a model's memory, as ``memory_need.need_of``. Call ``close`` at the end.
    """

    def __init__(
        self, launcher: EngineLauncher, settings: PoolSettings, needs: Needs = need_of
    ) -> None:
        self.launcher = launcher
        self.settings = settings
        self.needs = needs
        self.slots: dict[str, ModelSlot] = {}
        self.listeners: set[asyncio.Queue[Event]] = set()
        self._folder = tempfile.TemporaryDirectory(prefix="treadle-")
        self._queue = asyncio.Lock()  # of loads that need room; first come, first served
        self._changed = asyncio.Condition()
        self._tasks: set[asyncio.Task[Any]] = set()
        self._n_sockets = 0
        self._closed = False

    # -- state --------------------------------------------------------------------------------

    def slot(self, model: ServedModel) -> ModelSlot:
        """Return the slot of a model, a new one if need be. Changed options take effect at the next
        load.
        """
        slot = self.slots.get(model.name)
        if slot is None:
            slot = self.slots[model.name] = ModelSlot(model)
        slot.model = model
        return slot

    def state(self, model: ServedModel) -> str:
        """Return a model's state: "unloaded", "downloading", "loading", "loaded", or "sleeping"
        (unloaded because it was idle).
        """
        slot = self.slots.get(model.name)
        if slot is None:
            return UNLOADED
        if slot.load is not None and (slot.engine is None or slot.engine.stopping):
            return DOWNLOADING if slot.load.stage.startswith("download") else LOADING
        if slot.engine is not None and not slot.engine.stopping:
            return LOADED
        return SLEEPING if slot.sleeping else UNLOADED

    def engine(self, model: ServedModel) -> LoadedEngine | None:
        """Return the engine that serves a model now, None if there is none."""
        slot = self.slots.get(model.name)
        found = slot.engine if slot else None
        return None if found is None or found.stopping else found

    def engines(self) -> list[LoadedEngine]:
        """Return the engines that serve, the most recently used first."""
        found = [slot.engine for slot in self.slots.values() if slot.engine is not None]
        return sorted(
            (engine for engine in found if not engine.stopping),
            key=lambda engine: engine.used_s,
            reverse=True,
        )

    def text_engines(self) -> list[LoadedEngine]:
        """Return those of ``engines`` that may keep responses and streams: all but speech models',
        which refuse such calls.
        """
        return [engine for engine in self.engines() if not engine.facts.get("transcribes")]

    @property
    def used(self) -> int:
        """Bytes of memory reserved for all engines."""
        return sum(slot.reserved for slot in self.slots.values())

    @property
    def n_running(self) -> int:
        """Number of calls that engines answer now."""
        return sum(slot.engine.n_running for slot in self.slots.values() if slot.engine)

    def publish(self, model: str, event: str, data: Any = None) -> None:
        """Send the event ``event`` about ``model`` to all listeners of ``/models/sse``; ``data``:
        its JSON value, None without one.
        """
        told: Event = {"model": model, "event": event}
        if data is not None:
            told["data"] = data
        for queue in self.listeners:
            queue.put_nowait(told)

    # -- calls --------------------------------------------------------------------------------

    async def acquire(self, model: ServedModel) -> LoadedEngine:
        """Return the model's engine for one call, loaded if need be; call ``release`` after the
        call. Raises ApiError if it cannot be loaded. A load is cancelled when all calls that wait
        for it are.
        """
        slot = self.slot(model)
        engine = slot.engine
        if engine is not None and slot.load is None and not (engine.stopping or engine.draining):
            return self._take(engine)
        load = self._begin(slot)
        load.n_waiting += 1
        assert load.task is not None
        try:
            engine = await asyncio.shield(load.task)
        except asyncio.CancelledError:
            if self._has_taken(load):  # at the same moment: the load had counted this call
                self.release(load.task.result())
            elif load.task.cancelled():
                raise busy(f"{model.name}: its load was cancelled") from None
            raise
        finally:
            load.n_waiting -= 1
            if not (load.n_waiting or load.wanted or load.task.done()):
                load.cancel()
        return engine

    def _has_taken(self, load: ModelLoad) -> bool:
        task = load.task
        return bool(task and task.done() and not task.cancelled() and task.exception() is None)

    def release(self, engine: LoadedEngine, keep_s: float | None = None) -> None:
        """End a call to an engine. ``keep_s``: seconds that the engine stays loaded without a
        further call; None for as many as before.
        """
        engine.n_running -= 1
        self.keep(engine, keep_s)

    def keep(self, engine: LoadedEngine, keep_s: float | None = None) -> None:
        """Set how many seconds (``keep_s``) an engine stays loaded without a call, None for as many
        as before, and count from now.
        """
        if keep_s is not None:
            engine.idle_s = math.inf if engine.model.pinned else keep_s
        engine.used_s = asyncio.get_running_loop().time()
        if not engine.n_running:
            self._watch_idle(engine)
            self._wake()

    async def load(self, model: ServedModel) -> None:
        """Load a model without a call, and wait until it is loaded. Raises ApiError if it cannot be
        loaded.
        """
        slot = self.slot(model)
        if slot.engine is not None and not (slot.engine.stopping or slot.engine.retiring):
            return
        load = self._begin(slot)
        load.wanted = True
        assert load.task is not None
        await asyncio.shield(load.task)

    async def unload(self, model: ServedModel) -> None:
        """Unload a model after its running calls, or cancel its load; wait until it is done."""
        slot = self.slots.get(model.name)
        if slot is None:
            return
        load = slot.load
        if load is not None and load.task is not None:
            load.cancel()
            await asyncio.wait({load.task})
            if slot.load is load:  # it was cancelled before it began
                slot.load = None
        if slot.engine is not None:
            await self._retire(slot, slot.engine)

    async def forget(self, name: str) -> None:
        """Unload the model ``name``, which is no longer listed, and drop its slot."""
        slot = self.slots.get(name)
        if slot is not None:
            await self.unload(slot.model)
            if slot.engine is None and slot.load is None:  # else it is in use again
                self.slots.pop(name, None)

    def replace(self, model: ServedModel) -> None:
        """Retire the engine of a model whose file has been replaced; ``model`` has the new file. An
        engine that is being loaded is retired once it has answered the calls that wait for it.
        """
        slot = self.slots.get(model.name)
        if slot is not None:
            slot.model = model
            if slot.engine is not None:
                self.retire(slot.engine)

    def retire(self, engine: LoadedEngine) -> None:
        """Give an engine no new calls, and unload it in the background once its calls have
        ended.
        """
        slot = self.slots.get(engine.model.name)
        if slot is not None and slot.engine is engine and not engine.retiring:
            engine.retiring = True
            self.run(self._retire(slot, engine))

    async def _retire(self, slot: ModelSlot, engine: LoadedEngine) -> None:
        await self._drain(engine)
        if slot.engine is engine:
            await self._stop(slot, UNLOADED)

    def run(self, work: Awaitable[Any]) -> asyncio.Task[Any]:
        """Run ``work`` as a task in the background, until ``close``; its errors are ignored."""
        task = asyncio.ensure_future(work)
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)
        task.add_done_callback(lambda task: task.cancelled() or task.exception())
        return task

    async def close(self) -> None:
        """Cancel all loads and background tasks, and end every engine."""
        self._closed = True
        for task in list(self._tasks):
            task.cancel()
        loads = [slot.load for slot in self.slots.values() if slot.load is not None]
        for load in loads:
            load.cancel()
        loading = [load.task for load in loads if load.task is not None]
        await asyncio.gather(*self._tasks, *loading, return_exceptions=True)
        stops = [self._stop(slot, UNLOADED) for slot in self.slots.values() if slot.engine]
        await asyncio.gather(*stops, return_exceptions=True)
        await self.launcher.close()
        self._folder.cleanup()

    # -- loads --------------------------------------------------------------------------------

    def _begin(self, slot: ModelSlot) -> ModelLoad:
        """Return the slot's load under way, or begin a new one. Raises ApiError if the pool is
        closed.
        """
        if self._closed:
            raise busy("the server is stopping")
        if slot.load is None or slot.load.cancelling:
            before = slot.load.task if slot.load is not None else None
            load = slot.load = ModelLoad()
            load.task = asyncio.ensure_future(self._load(slot, load, before))
            load.task.add_done_callback(lambda task: task.cancelled() or task.exception())
        return slot.load

    async def _load(
        self, slot: ModelSlot, load: ModelLoad, before: asyncio.Task[LoadedEngine] | None
    ) -> LoadedEngine:
        """Load the model of ``slot``: make room, start an engine, and hand it to the calls that
        wait for ``load``. ``before``: a cancelled load of the model, whose end is waited for; None
        without one. Raises ApiError.
        """
        began = time.monotonic()
        model = slot.model
        try:
            if before is not None:
                await _waited(before)
            if (spared := await self._ended(slot)) is not None:
                return self._loaded(slot, load, spared)
            self.publish(model.name, "model_status", {"status": LOADING})
            need = await asyncio.to_thread(self.needs, model, self.settings.memory)
            async with self._queue:
                need = await self._make_room(slot, self._fitted(model, need))
                slot.reserved = need.n_bytes if need else 0
            engine = await self._start(slot, load, need)
            if need is None:  # it was downloaded just now
                await self._reserve(slot, engine)
        except asyncio.CancelledError:
            self._forget_load(slot, load, "")
            raise
        except Exception as error:
            problem = error if isinstance(error, ApiError) else failed(model.name, error)
            self._forget_load(slot, load, problem.message)
            raise problem from None
        slot.engine = engine
        slot.error = ""
        slot.exit_code = None
        slot.sleeping = False
        slot.n_loads += 1
        slot.load_s = time.monotonic() - began
        self.run(self._watch(slot, engine))
        if self.settings.log:
            log(message="model loaded", model=model.name, seconds=round(slot.load_s, 3))
        self.publish(model.name, "model_status", {"status": LOADED, "info": engine.public_facts})
        self._loaded(slot, load, engine)
        if engine.model.stamp != slot.model.stamp:  # its file was replaced meanwhile
            self.retire(engine)
        return engine

    async def _ended(self, slot: ModelSlot) -> LoadedEngine | None:
        """Wait until the slot's engine, which gets no new calls, has ended, and return None; or
        return it if it serves on, because its memory was not needed after all.
        """
        while (engine := slot.engine) is not None:
            if slot.stop is not None:
                await asyncio.shield(slot.stop)
            elif not engine.draining:
                return engine
            else:
                async with self._changed:
                    await self._changed.wait()
        return None

    def _loaded(self, slot: ModelSlot, load: ModelLoad, engine: LoadedEngine) -> LoadedEngine:
        engine.n_running += load.n_waiting  # before anything may unload it
        slot.load = None
        self.keep(engine)
        self._wake()  # a load that waits for room may choose it
        return engine

    async def _reserve(self, slot: ModelSlot, engine: LoadedEngine) -> None:
        """Reserve the memory that a new engine of ``slot`` has reported, and make room for it.
        Raises ApiError if there is none; the engine is then killed.
        """
        facts = engine.facts
        n_cache = facts.get("cache_bytes", 0)
        need = MemoryNeed(facts.get("n_bytes", 0), n_cache, n_cache)
        try:
            async with self._queue:
                await self._make_room(slot, self._fitted(slot.model, need))
                slot.reserved = need.n_bytes
        except BaseException:
            engine.process.kill()
            raise

    def _forget_load(self, slot: ModelSlot, load: ModelLoad, error: str) -> None:
        if slot.load is load:
            slot.load = None
        if slot.engine is None:
            slot.reserved = 0
        slot.error = error
        data: dict[str, Any] = {"status": UNLOADED}
        if error:
            data |= {"failed": True, "error": error}
            if self.settings.log:
                log(level="error", message=error, model=slot.model.name)
        self.publish(slot.model.name, "model_status", data)
        self._wake()

    def _fitted(self, model: ServedModel, need: MemoryNeed | None) -> MemoryNeed | None:
        """Return ``need`` with a KV cache small enough for the bound of memory; None (unknown)
        unchanged. Raises ApiError (507) if the model does not fit even with the smallest.
        """
        most = self.settings.memory
        if need is None or most is None:
            return need
        if need.least > most:
            raise ApiError(
                507,
                f"{model.name} needs {n_bytes(need.least)} of memory, and the server's models may "
                f"have {n_bytes(most)} (--memory)",
                type="unavailable_error",
                code="model_too_large",
            )
        return need.within(most)

    async def _make_room(self, slot: ModelSlot, need: MemoryNeed | None) -> MemoryNeed | None:
        """Unload other models until ``need`` fits, the least recently used first; return the need,
        with a smaller KV cache if pinned models leave only room for that. None: the need is
        unknown, and counts as 0 bytes. Raises ApiError (507) if pinned models leave too little.
        """
        if need and self.settings.memory is not None:
            pinned = sum(s.reserved for s in self._others(slot) if s.model.pinned)
            if pinned + need.least > self.settings.memory:
                raise ApiError(
                    507,
                    f"{slot.model.name} needs {n_bytes(need.least)} of memory, and pinned models "
                    f"have {n_bytes(pinned)} of {n_bytes(self.settings.memory)} (--memory)",
                    type="unavailable_error",
                    code="model_too_large",
                )
            need = need.within(self.settings.memory - pinned)
        wanted = need.n_bytes if need else 0
        chosen: list[LoadedEngine] = []
        try:
            while not self._fits(slot, wanted):
                for victim in self._victims(slot, wanted):
                    if victim.engine is None:  # it has ended while another one was stopped
                        continue
                    if victim.engine not in chosen:
                        victim.engine.n_claims += 1
                        chosen.append(victim.engine)
                    if not victim.engine.n_running:
                        await self._stop(victim, UNLOADED)
                if not self._fits(slot, wanted):
                    async with self._changed:
                        await self._changed.wait()
        finally:
            for engine in chosen:  # those that were not needed after all
                engine.n_claims -= 1
            self._wake()
        return need

    def _others(self, slot: ModelSlot) -> Iterator[ModelSlot]:
        return (other for other in self.slots.values() if other is not slot)

    def _fits(self, slot: ModelSlot, wanted: int) -> bool:
        others = list(self._others(slot))
        memory = self.settings.memory
        most = self.settings.most_loaded
        n_loaded = sum(other.engine is not None or other.reserved > 0 for other in others)
        room = memory is None or sum(o.reserved for o in others) + wanted <= memory
        return room and (most is None or n_loaded < most)

    def _victims(self, slot: ModelSlot, wanted: int) -> list[ModelSlot]:
        """Return the slots to unload so that ``wanted`` bytes fit: those without calls first, and
        of these the least recently used. Pinned models are never chosen.
        """
        found = [
            other
            for other in self._others(slot)
            if other.engine is not None and not other.model.pinned and not other.engine.stopping
        ]
        found.sort(key=lambda s: (s.engine.n_running > 0, s.engine.used_s) if s.engine else ())
        if self.settings.memory is None:
            return found[:1]
        used = sum(other.reserved for other in self._others(slot))
        result: list[ModelSlot] = []
        for other in found:
            if result and used + wanted <= self.settings.memory:
                break
            result.append(other)
            used -= other.reserved
        return result

    async def _start(
        self, slot: ModelSlot, load: ModelLoad, need: MemoryNeed | None
    ) -> LoadedEngine:
        """Start an engine for the model of ``slot`` with the KV cache of ``need`` (None: unknown, a
        usual size), pass its progress to ``load``, and return it once it serves. Raises ApiError.
        """
        model = slot.model
        self._n_sockets += 1
        keys = tuple(secrets.token_urlsafe(24) for _ in range(max(1, self.settings.n_keys)))
        order = EngineOrder(
            name=model.name,
            ref=model.ref,
            args=model.args,
            socket=self._socket_path(),
            keys=keys,
            kv_bytes=need.cache_bytes if need else 256 << 20,
            turns=self._folder.name,
        )
        process = await self.launcher.start(order)
        why = ""
        try:
            while True:
                report = await process.reports.get()
                if "progress" in report:
                    load.stage = report["progress"]["stage"]
                    load.done = report["progress"]["done"]
                    load.total = report["progress"]["total"]
                    self.publish(model.name, "model_status", loading_event(load))
                elif "failed" in report:
                    why = report["failed"]
                elif "exit" in report:
                    slot.exit_code = report["exit"]
                    raise load_error(model.name, why, report["exit"])
                elif "ready" in report:
                    facts = report["ready"]
                    break
        except BaseException:
            process.kill()
            with suppress(asyncio.TimeoutError):
                await asyncio.wait_for(process.wait(), STOP_S)
            raise
        idle = self.settings.idle_s if model.idle_s is None else model.idle_s
        return LoadedEngine(
            model,
            process,
            facts.get("socket") or facts["port"],
            keys,
            facts,
            math.inf if model.pinned else idle,
        )

    def _socket_path(self) -> str:
        import socket

        path = str(Path(self._folder.name) / f"{self._n_sockets}.sock")
        is_long = len(os.fsencode(path)) > MOST_PATH
        return NO_SOCKETS if is_long or not hasattr(socket, "AF_UNIX") else path

    async def _watch(self, slot: ModelSlot, engine: LoadedEngine) -> None:
        """Wait for the end of an engine's process. If the pool did not order the end, record a
        crash in ``slot``.
        """
        code = await engine.process.wait()
        if engine.stopping:
            return
        engine.stopping = True
        _stop_timer(engine)
        if slot.engine is engine:
            slot.engine = None
            slot.reserved = 0
            slot.exit_code = code
            slot.error = f"{slot.model.name}: {exit_text(code)}"
            slot.n_crashes += 1
            if self.settings.log:
                log(level="error", message=slot.error, model=slot.model.name)
            status = {"status": UNLOADED, "failed": True, "exit_code": code}
            self.publish(slot.model.name, "model_status", status)
        self._wake()

    # -- unloads ------------------------------------------------------------------------------

    async def _drain(self, engine: LoadedEngine) -> None:
        """Mark an engine as retiring, so that it gets no new calls, and wait until its calls have
        ended.
        """
        engine.retiring = True
        async with self._changed:
            await self._changed.wait_for(lambda: not engine.n_running or engine.stopping)

    async def _stop(self, slot: ModelSlot, state: str) -> None:
        """End the slot's engine, which has no calls, and wait for its end. ``state``: of the model
        afterwards.
        """
        self._begin_stop(slot, state)
        if slot.stop is not None:
            await asyncio.shield(slot.stop)

    def _begin_stop(self, slot: ModelSlot, state: str) -> None:
        """Begin to end the slot's engine, in the background; it gets no calls from now on.
        ``state``: of the model afterwards.
        """
        if slot.stop is None and slot.engine is not None:
            slot.engine.stopping = True
            slot.stop = asyncio.ensure_future(self._end(slot, slot.engine, state))

    async def _end(self, slot: ModelSlot, engine: LoadedEngine, state: str) -> None:
        _stop_timer(engine)
        engine.process.terminate()
        try:
            await asyncio.wait_for(engine.process.wait(), STOP_S)
        except asyncio.TimeoutError:
            engine.process.kill()
            await engine.process.wait()
        slot.engine = None
        slot.stop = None
        slot.reserved = 0
        slot.sleeping = state == SLEEPING
        if self.settings.log:
            log(message=f"model {state}", model=slot.model.name)
        self.publish(slot.model.name, "model_status", {"status": state})
        self._wake()

    def _watch_idle(self, engine: LoadedEngine) -> None:
        """Start the timer that unloads an engine after ``idle_s`` seconds without a call."""
        _stop_timer(engine)
        if engine.idle_s == math.inf:
            return
        loop = asyncio.get_running_loop()
        engine.expires = time.time() + engine.idle_s
        engine.timer = loop.call_later(engine.idle_s, self._unload_idle, engine)

    def _unload_idle(self, engine: LoadedEngine) -> None:
        slot = self.slots.get(engine.model.name)
        if slot is not None and slot.engine is engine and not engine.n_running:
            self._begin_stop(slot, SLEEPING)

    def _take(self, engine: LoadedEngine) -> LoadedEngine:
        _stop_timer(engine)
        engine.n_running += 1
        engine.used_s = asyncio.get_running_loop().time()
        return engine

    def _wake(self) -> None:
        """Wake the loads that wait for room or for an engine's end."""

        async def wake() -> None:
            async with self._changed:
                self._changed.notify_all()

        self.run(wake())


async def _waited(task: asyncio.Task[Any]) -> None:
    """Wait for the end of ``task``. If the waiting task is cancelled meanwhile, the cancellation is
    raised only after that end.
    """
    try:
        await asyncio.wait({task})
    except asyncio.CancelledError:
        await asyncio.wait({task})
        raise


def _stop_timer(engine: LoadedEngine) -> None:
    engine.expires = None
    if engine.timer is not None:
        engine.timer.cancel()
        engine.timer = None


def loading_event(load: ModelLoad) -> dict[str, Any]:
    """Return the data of a ``model_status`` event about a load under way: ``status`` and
    ``progress``.
    """
    if load.stage.startswith("download"):
        file = load.stage.partition(" ")[2] or load.stage
        return {"status": DOWNLOADING, "progress": {file: {"done": load.done, "total": load.total}}}
    progress = {"stages": [load.stage], "current": load.stage, "value": load.progress or 0.0}
    return {"status": LOADING, "progress": progress}


def load_error(name: str, why: str, code: int) -> ApiError:
    """Return the error for calls that waited for a failed load of the model ``name``. ``why``: the
    engine's reason, "" without one; ``code``: its exit code.
    """
    said = without_folders(why) if why else exit_text(code)
    return ApiError(500, f"{name} cannot be loaded: {said}", code="model_load_failed")


def failed(name: str, error: Exception) -> ApiError:
    """Return the error for calls that waited for a load of the model ``name`` that ended with an
    exception, ``error``.
    """
    return ApiError(
        500, f"{name} cannot be loaded: {without_folders(str(error))}", code="model_load_failed"
    )


def exit_text(code: int) -> str:
    """Return in words how an engine ended. ``code``: exit code; negative: number of the signal."""
    import signal

    if code >= 0:
        return f"its engine ended with exit code {code}"
    with suppress(ValueError):
        return f"its engine was ended by {signal.Signals(-code).name}"
    return f"its engine was ended by signal {-code}"
