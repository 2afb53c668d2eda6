"""MCP servers that run beside a model: their tools, and calls of these tools within limits.

One thread with an event loop holds all connections. A server that ends, hangs or sends too much is
stopped, and the call returns the reason as an error. The next call tries once to start it again. A
server that failed at the first start has no tools, so it is never called.
"""

from __future__ import annotations

import asyncio
import json
import re
import threading
from collections.abc import Coroutine, Iterable, Sequence
from concurrent.futures import Future
from concurrent.futures import TimeoutError as WaitTimeout
from contextlib import AbstractAsyncContextManager, suppress
from typing import Any, TypeVar

from treadle.base.fast_classes import dataclass
from treadle.errors import TreadleError, printable
from treadle.mcp.config import ToolBounds, ToolServerConfig
from treadle.mcp.session import MAX_TOOLS, Connect, ListedTool, ToolOutput, ToolSession

MAX_NAME = 64  # characters of a tool's name for the model
MAX_DESCRIPTION = 4096
LAST_S = 10.0  # for all servers to end
REFUSED = "error: the user did not allow this call"
T = TypeVar("T")


@dataclass(frozen=True)
class ServerTool:
    """One tool. name: for the model, ``SERVER__TOOL``; tool: its own name at the ``server``;
    schema: the JSON schema of its arguments.
    """

    name: str
    server: str
    tool: str
    description: str
    schema: dict[str, Any]

    @property
    def function(self) -> dict[str, Any]:
        """The tool in the form of OpenAI's chat API: ``{"type": "function", "function":
        {...}}``.
        """
        own = {"name": self.name, "description": self.description, "parameters": self.schema}
        return {"type": "function", "function": own}


class ServerTask:
    """The connection to one server, in the toolbox's event loop. ``why``: the reason why the server
    cannot be used, "" if it can.
    """

    def __init__(self, config: ToolServerConfig, bounds: ToolBounds, connect: Connect) -> None:
        self.config = config
        self.bounds = bounds
        self.tools: list[ListedTool] = []
        self.why = ""  # it cannot be used
        self._connect = connect
        self._session: ToolSession | None = None
        self._stop = asyncio.Event()
        self._task: asyncio.Task[None] | None = None
        self._one = asyncio.Lock()  # starts one after the other

    async def start(self) -> None:
        """Connect, and list the tools; on failure set ``why``. The attempt is stopped after
        ``bounds.start_s`` seconds.
        """
        async with self._one:
            if self._session is not None:
                return
            self.why = ""
            self._stop = asyncio.Event()
            ready: asyncio.Future[None] = asyncio.get_running_loop().create_future()
            self._task = asyncio.ensure_future(self._run(ready))
            done, _ = await asyncio.wait({ready}, timeout=self.bounds.start_s)
            if not done:
                await self.stop(f"it did not start within {self.bounds.start_s:g} s")

    async def _run(self, ready: asyncio.Future[None]) -> None:
        """Keep the connection open until ``stop``: one task must open and close it. ``ready`` is
        done when the tools are listed, or when that has failed (``why``).
        """
        try:
            async with self._connect(self.config, self.bounds) as session:
                self.tools = await session.list_tools()
                self._session = session
                ready.set_result(None)
                await self._stop.wait()
        except asyncio.CancelledError:
            pass
        except BaseException as error:
            self.why = self.why or reason_of(error)
        finally:
            self._session = None
            if not ready.done():
                ready.set_result(None)

    async def stop(self, why: str = "") -> None:
        """End the connection, and the server's process. ``why``: the reason to keep, if none is
        known yet.
        """
        self.why = self.why or why
        connected = self._session is not None
        self._session = None
        self._stop.set()
        task = self._task
        if task is not None:
            if not connected:
                task.cancel()
            done, _ = await asyncio.wait({task}, timeout=LAST_S / 2)
            if not done:
                task.cancel()
                await asyncio.wait({task}, timeout=LAST_S / 2)

    async def call(self, tool: str, arguments: dict[str, Any]) -> ToolOutput:
        """Call ``tool`` (its name at the server); if the server has ended, start it again first.
        Failures of the server become outputs with ``is_error``.
        """
        if self._session is not None and self._session.is_over:
            await self.stop("it ended")
        if self._session is None:
            await self.start()
        session = self._session
        if session is None:
            return ToolOutput(f"error: server {self.config.name}: {self.why}", is_error=True)
        try:
            found = await asyncio.wait_for(session.call(tool, arguments), self.bounds.call_s)
        except (asyncio.TimeoutError, TimeoutError):
            why = f"it did not answer within {self.bounds.call_s:g} s, and was stopped"
        except Exception as error:
            why = reason_of(error)
        else:
            return ToolOutput(cut(found.text, self.bounds.characters), found.is_error)
        await self.stop(why)
        return ToolOutput(f"error: server {self.config.name}: {why}", is_error=True)


class Toolbox:
    """Runs MCP servers, and calls their tools. ``close`` ends the servers.

    Methods may be called from any thread; those that wait must not be called from the toolbox's own
    thread, which runs the connections.
    """

    def __init__(
        self,
        servers: Sequence[ToolServerConfig],
        bounds: ToolBounds | None = None,
        connect: Connect | None = None,
    ) -> None:
        self.bounds = ToolBounds() if bounds is None else bounds
        self._loop = asyncio.new_event_loop()
        self._thread = threading.Thread(target=self._run_loop, name="treadle-mcp", daemon=True)
        self._thread.start()
        connect = lazy_connect if connect is None else connect
        self._tasks = self._wait(self._begin(servers, connect))
        self._started = self._submit(self._start())
        self._closed = False

    def _run_loop(self) -> None:
        asyncio.set_event_loop(self._loop)
        self._loop.run_forever()
        self._loop.close()

    def _submit(self, work: Coroutine[Any, Any, T]) -> Future[T]:
        return asyncio.run_coroutine_threadsafe(work, self._loop)

    def _wait(self, work: Coroutine[Any, Any, T]) -> T:
        return self._submit(work).result()

    async def _begin(
        self, servers: Sequence[ToolServerConfig], connect: Connect
    ) -> dict[str, ServerTask]:
        return {each.name: ServerTask(each, self.bounds, connect) for each in servers}

    async def _start(self) -> None:
        await asyncio.gather(*(task.start() for task in self._tasks.values()))

    def __enter__(self) -> Toolbox:
        """Return itself."""
        return self

    def __exit__(self, *_: object) -> None:
        """End the servers."""
        self.close()

    def close(self) -> None:
        """End the servers, within a bounded time."""
        if self._closed:
            return
        self._closed = True
        self._started.cancel()

        async def stop() -> None:
            await asyncio.gather(*(task.stop("it was stopped") for task in self._tasks.values()))

        with suppress(TimeoutError, WaitTimeout):
            self._submit(stop()).result(LAST_S)
        self._loop.call_soon_threadsafe(self._loop.stop)
        self._thread.join(1.0)

    # -- tools ----------------------------------------------------------------------------------

    @property
    def servers(self) -> list[str]:
        """The names of the servers."""
        return list(self._tasks)

    def started(self) -> Future[None]:
        """Return the future that is done when every server has started, or has failed."""
        return self._started

    def problems(self) -> dict[str, str]:
        """Return the servers that cannot be used: name to reason."""
        return {name: task.why for name, task in self._tasks.items() if task.why}

    def tools(self, servers: Iterable[str] | None = None) -> list[ServerTool]:
        """Return the tools of ``servers`` (None: all), after waiting until all have started."""
        self._started.result()
        return self.known_tools(servers)

    def known_tools(self, servers: Iterable[str] | None = None) -> list[ServerTool]:
        """Return the tools of ``servers`` (None: all) that are listed so far; at most MAX_TOOLS."""
        wanted = None if servers is None else set(servers)
        taken: set[str] = set()
        found = []
        for server, task in self._tasks.items():
            for listed in task.tools:
                name = unique(public_name(server, listed.name), taken)
                taken.add(name)
                if wanted is None or server in wanted:
                    description = listed.description[:MAX_DESCRIPTION]
                    found.append(ServerTool(name, server, listed.name, description, listed.schema))
        return found[:MAX_TOOLS]

    def submit(self, name: str, arguments: str) -> Future[ToolOutput]:
        """Start a call. ``name``: as shown to the model. ``arguments``: the JSON that the model
        wrote. Errors, such as invalid JSON, are outputs with ``is_error``.
        """
        tool = next((each for each in self.known_tools() if each.name == name), None)
        if tool is None:
            return failed_future(f"error: no tool {printable(name)[:80]!r}")
        try:
            given = json.loads(arguments or "{}")
        except ValueError as error:
            return failed_future(f"error: the arguments are no JSON: {error}")
        if not isinstance(given, dict):
            return failed_future("error: the arguments are no JSON object")
        return self._submit(self._tasks[tool.server].call(tool.tool, given))

    def call(self, name: str, arguments: str) -> ToolOutput:
        """Call a tool, and wait for its result; arguments and errors as of ``submit``."""
        return self.submit(name, arguments).result()


def failed_future(text: str) -> Future[ToolOutput]:
    """Return a future that is done, with the error ``text`` as output."""
    done: Future[ToolOutput] = Future()
    done.set_result(ToolOutput(text, is_error=True))
    return done


def lazy_connect(
    config: ToolServerConfig, bounds: ToolBounds
) -> AbstractAsyncContextManager[ToolSession]:
    """Return the connection that ``client.connect`` opens; the ``mcp`` package is imported only
    here.
    """
    from treadle.mcp.client import connect

    return connect(config, bounds)


def public_name(server: str, tool: str) -> str:
    """Return the name for the model of ``tool`` at ``server``: ``SERVER__TOOL``, with ``_`` in
    place of characters other than letters, digits, ``_`` and ``-``, cut to MAX_NAME characters.
    """
    both = (re.sub(r"[^A-Za-z0-9_-]+", "_", part).strip("_") or "x" for part in (server, tool))
    return "__".join(both)[:MAX_NAME]


def unique(name: str, taken: set[str]) -> str:
    """Return ``name``, with a number appended if it is in ``taken``."""
    at = 2
    found = name
    while found in taken:
        end = f"_{at}"
        found = name[: MAX_NAME - len(end)] + end
        at += 1
    return found


def cut(text: str, most: int) -> str:
    """Return ``text``, cut to ``most`` characters plus a note of how many are left out."""
    if len(text) <= most:
        return text
    return f"{text[:most]}\n[cut: {len(text) - most} more characters]"


def reason_of(error: BaseException) -> str:
    """Return an error as one line; of an exception group, the first error in it."""
    while isinstance(inner := getattr(error, "exceptions", None), tuple) and inner:
        error = inner[0]
    said = str(error) or type(error).__name__
    if isinstance(error, TreadleError):
        return printable(said)
    return printable(f"{type(error).__name__}: {said}")[:400]
