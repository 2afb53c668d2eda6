"""Starts engine processes, and passes on what they report.

Where the system allows it, engines are forked from a warm process that has imported everything:
a fork takes milliseconds, the imports a second or more. Elsewhere each is a new Python.
"""

from __future__ import annotations

import asyncio
import json
import os
import signal
from collections.abc import Mapping
from contextlib import suppress
from typing import Any, Protocol

from treadle.base.python_process import detached, import_path, interpreter
from treadle.server.router.engine import EngineOrder
from treadle.system import SYSTEM

LOST = -9  # exit code of engines whose warm process was killed
LINE = 1 << 20  # bytes of a report


class EngineProcess:
    """The process of one engine. ``reports``: a queue of the JSON objects that it reports
    (``engine.ReportPipe``); the last is ``{"exit": code}``.
    """

    def __init__(self) -> None:
        self.reports: asyncio.Queue[dict[str, Any]] = asyncio.Queue()
        self.ended: asyncio.Future[int] = asyncio.get_running_loop().create_future()

    def end(self, code: int) -> None:
        """Record that the process has ended, with exit ``code``."""
        if not self.ended.done():
            self.ended.set_result(code)
            self.reports.put_nowait({"exit": code})

    def signal(self, number: int) -> None:
        """Send signal ``number`` to the process, unless it has ended."""
        raise NotImplementedError

    def terminate(self) -> None:
        """Send SIGTERM: the engine stops its server, and ends."""
        self.signal(int(signal.SIGTERM))

    def kill(self) -> None:
        """Send SIGKILL (where there is none, SIGTERM): the engine ends at once."""
        self.signal(int(getattr(signal, "SIGKILL", signal.SIGTERM)))

    async def wait(self) -> int:
        """Wait for the end of the process, and return its exit code."""
        return await asyncio.shield(self.ended)


class EngineLauncher(Protocol):
    """Starts engine processes."""

    async def prepare(self) -> None:
        """Do the work of a start that is the same for all engines, so that the first start is
        quick.
        """

    async def start(self, order: EngineOrder) -> EngineProcess:
        """Start an engine process for ``order``. Raises OSError."""

    async def close(self) -> None:
        """End all engines that still run."""


def launcher() -> EngineLauncher:
    """Return the launcher for this system: ForkLauncher where it can fork, else
    NewProcessLauncher.
    """
    return ForkLauncher() if SYSTEM.FORKS else NewProcessLauncher()


def environment() -> dict[str, str]:
    """Return the environment variables for an engine: numpy has one thread, because more would poll
    on cores that treadle's threads need.
    """
    path = os.pathsep.join(import_path())
    return {**os.environ, "PYTHONPATH": path, "OPENBLAS_NUM_THREADS": "1"}


# -- forked from a warm process -------------------------------------------------------------------


class ForkedEngine(EngineProcess):
    """An engine that the warm process has forked; ``number``: the one by which the warm process
    knows it.
    """

    def __init__(self, parent: ForkLauncher, number: int) -> None:
        super().__init__()
        self._parent = parent
        self._number = number

    def signal(self, number: int) -> None:
        """Send signal ``number`` through the warm process, which knows whether the engine's process
        still exists.
        """
        if not self.ended.done():
            self._parent.command({"child": self._number, "signal": number})


class ForkLauncher:
    """Starts a warm process, which has imported everything, and lets it fork engines. If the warm
    process was killed, its engines ended with it, and the next start makes a new one. ``module``:
    the one that the warm process runs.
    """

    def __init__(self, module: str = "treadle.cli.engine_process") -> None:
        self.module = module
        self.engines: dict[int, ForkedEngine] = {}
        self._number = 0
        self._process: asyncio.subprocess.Process | None = None
        self._reading: asyncio.Task[None] | None = None
        self._starting = asyncio.Lock()

    @property
    def pid(self) -> int | None:
        """Process id of the warm process; None if it does not run."""
        return self._process.pid if self._process else None

    async def prepare(self) -> None:
        """Start the warm process, unless it runs."""
        async with self._starting:
            if self._process is not None:
                return
            self._process = await asyncio.create_subprocess_exec(
                interpreter(),
                "-m",
                self.module,
                "--warm",
                stdin=asyncio.subprocess.PIPE,
                stdout=asyncio.subprocess.PIPE,
                env=environment(),
                limit=LINE,
                **detached(),
            )
            self._reading = asyncio.ensure_future(self._read(self._process))

    async def start(self, order: EngineOrder) -> EngineProcess:
        """Let the warm process fork an engine for ``order``."""
        await self.prepare()
        self._number += 1
        engine = ForkedEngine(self, self._number)
        self.engines[self._number] = engine
        self.command({"start": self._number, "order": order.as_json()})
        return engine

    def command(self, line: Mapping[str, Any]) -> None:
        """Send the warm process a command, as a line of JSON. If it is gone this does nothing: its
        engines are gone too.
        """
        if self._process is not None and self._process.stdin is not None:
            with suppress(ConnectionError, RuntimeError):
                self._process.stdin.write(json.dumps(line).encode() + b"\n")

    async def _read(self, process: asyncio.subprocess.Process) -> None:
        assert process.stdout is not None
        try:
            while line := await process.stdout.readline():
                told = json.loads(line)
                engine = self.engines.get(told["child"])
                if engine is None:
                    continue
                if "exit" in told:
                    del self.engines[told["child"]]
                    engine.end(told["exit"])
                else:
                    engine.reports.put_nowait(told["report"])
        except ValueError:  # half a line: the warm process was killed
            pass
        finally:
            self._process = None
            lost = [*self.engines.values()]
            self.engines.clear()
            for engine in lost:
                engine.end(LOST)
            await process.wait()

    async def close(self) -> None:
        """End the warm process, and so its engines; kill it after 5 seconds."""
        process = self._process
        if process is None:
            return
        if process.stdin is not None:
            process.stdin.close()
        try:
            await asyncio.wait_for(process.wait(), 5)
        except asyncio.TimeoutError:
            process.kill()
            await process.wait()
        if self._reading is not None:
            await self._reading


# -- new processes --------------------------------------------------------------------------------


class NewEngine(EngineProcess):
    """An engine in a newly started Python process."""

    def __init__(self, process: asyncio.subprocess.Process) -> None:
        super().__init__()
        self.process = process

    def signal(self, number: int) -> None:
        """Send signal ``number`` to the process, unless it has ended."""
        with suppress(ProcessLookupError):
            self.process.send_signal(number)


class NewProcessLauncher:
    """Starts a new Python, which runs ``module``, for each engine."""

    def __init__(self, module: str = "treadle.cli.engine_process") -> None:
        self.module = module
        self.engines: set[NewEngine] = set()
        self._readers: set[asyncio.Task[None]] = set()

    async def prepare(self) -> None:
        """Do nothing: there is no warm process."""

    async def start(self, order: EngineOrder) -> EngineProcess:
        """Start a Python process, and send it the order on its standard input."""
        process = await asyncio.create_subprocess_exec(
            interpreter(),
            "-m",
            self.module,
            stdin=asyncio.subprocess.PIPE,
            stdout=asyncio.subprocess.PIPE,
            env=environment(),
            limit=LINE,
            **detached(),
        )
        assert process.stdin is not None
        with suppress(ConnectionError):
            process.stdin.write(json.dumps(order.as_json()).encode() + b"\n")
        engine = NewEngine(process)
        self.engines.add(engine)
        reader = asyncio.ensure_future(self._read(engine))
        self._readers.add(reader)
        reader.add_done_callback(self._readers.discard)
        return engine

    async def _read(self, engine: NewEngine) -> None:
        assert engine.process.stdout is not None
        try:
            while line := await engine.process.stdout.readline():
                with suppress(ValueError):
                    engine.reports.put_nowait(json.loads(line))
        finally:
            code = await engine.process.wait()
            self.engines.discard(engine)
            engine.end(code)

    async def close(self) -> None:
        """Kill all engines, and wait for their ends."""
        for engine in list(self.engines):
            engine.kill()
        if self._readers:
            await asyncio.gather(*self._readers, return_exceptions=True)
