"""Engines without a model: their processes, which a test ends as it likes, and the HTTP that they
answer.
"""

from __future__ import annotations

import asyncio
import json
import signal
from collections.abc import AsyncIterator, Awaitable, Callable, Mapping
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from typing import Any
from urllib.parse import unquote

from treadle.server.requests.service import ServerSettings
from treadle.server.router.app import build_router_app
from treadle.server.router.engine import EngineOrder
from treadle.server.router.launcher import EngineProcess
from treadle.server.router.memory_need import MemoryNeed
from treadle.server.router.model_list import ModelList, Scan
from treadle.server.router.pool import EnginePool, PoolSettings
from treadle.server.router.served_model import ServedModel
from treadle.server.router.service import RouterService, RouterSettings

MIB = 1 << 20
Reader = asyncio.StreamReader
Writer = asyncio.StreamWriter
Answer = Callable[[dict[str, Any], Writer], Awaitable[None]]


class FakeEngine(EngineProcess):
    def __init__(self, order: EngineOrder, answer: Answer | None) -> None:
        super().__init__()
        self.order = order
        self.answer = answer
        self.signals: list[int] = []
        self.calls: list[dict[str, Any]] = []  # requests, with "left" of clients that have left
        self.server: asyncio.Server | None = None
        self.obeys = True
        self.lingers = False  # signals do not end it: a test does

    def signal(self, number: int) -> None:
        self.signals.append(number)
        if not self.lingers and (self.obeys or number == signal.SIGKILL):
            self.end(0 if number == signal.SIGTERM else -number)

    def end(self, code: int) -> None:
        if self.server is not None:
            self.server.close()
        super().end(code)

    def report(self, **what: Any) -> None:
        self.reports.put_nowait(what)

    async def ready(self, **facts: Any) -> None:
        """It serves, at its socket if its answers are given."""
        if self.answer is not None:
            self.server = await asyncio.start_unix_server(self._serve, self.order.socket)
        self.report(ready={"socket": self.order.socket, "n_ctx": 64, **facts})

    async def _serve(self, reader: Reader, writer: Writer) -> None:
        assert self.answer is not None
        head = (await reader.readuntil(b"\r\n\r\n")).decode()
        first, *lines = head.split("\r\n")
        headers = dict(line.lower().split(": ", 1) for line in lines if line)
        body = await reader.readexactly(int(headers["content-length"]))
        method, target, _ = first.split()
        call: dict[str, Any] = {
            "method": method,
            "target": target,
            "headers": headers,
            "body": body,
        }
        call["left"] = asyncio.ensure_future(reader.read())
        self.calls.append(call)
        try:
            await self.answer(call, writer)
        finally:
            call["left"].cancel()
            writer.close()


@dataclass
class FakeLauncher:
    """``automatic``: engines serve at once."""

    automatic: bool = True
    answer: Answer | None = None
    facts: dict[str, Any] = field(default_factory=dict)  # that engines report
    engines: list[FakeEngine] = field(default_factory=list)
    error: OSError | None = None
    n_closed: int = 0

    async def prepare(self) -> None:
        pass

    async def start(self, order: EngineOrder) -> EngineProcess:
        if self.error is not None:
            raise self.error
        engine = FakeEngine(order, self.answer)
        self.engines.append(engine)
        if self.automatic:
            await engine.ready(**self.facts)
        return engine

    async def close(self) -> None:
        self.n_closed += 1
        for engine in self.engines:
            engine.end(-9)

    @property
    def names(self) -> list[str]:
        return [engine.order.name for engine in self.engines]


def needs(sizes: Mapping[str, int]) -> Callable[[ServedModel, int | None], MemoryNeed | None]:
    """Bytes of MiB by a model's name; without any, they are unknown."""

    def of(model: ServedModel, most: int | None) -> MemoryNeed | None:
        if model.name not in sizes:
            return None
        return MemoryNeed(sizes[model.name] * MIB, 0, 0, program=0)

    return of


def models(*names: str, **settings: Any) -> list[ServedModel]:
    return [ServedModel(name, f"/{name}.gguf", **settings) for name in names]


@asynccontextmanager
async def pooled(
    launcher: FakeLauncher, sizes: Mapping[str, int] | None = None, **settings: Any
) -> AsyncIterator[EnginePool]:
    """A pool; ``memory`` in MiB."""
    if settings.get("memory"):
        settings["memory"] *= MIB
    pool = EnginePool(launcher, PoolSettings(log=False, **settings), needs(sizes or {}))
    try:
        yield pool
    finally:
        await pool.close()
    assert launcher.n_closed == 1
    assert pool.used == 0
    assert all(engine.ended.done() for engine in launcher.engines)


async def settled() -> None:
    """Everything that can happen without a timer or another process has happened."""
    for _ in range(50):
        await asyncio.sleep(0)


async def until(true: Callable[[], object]) -> None:
    """Wait for what a thread or a socket does."""
    for _ in range(100_000):
        if true():
            return
        await asyncio.sleep(0.0005)
    raise AssertionError("it never became true")


# -- the whole router, over such engines ----------------------------------------------------------


@dataclass
class Reply:
    """What a client has received so far."""

    status: int = 0
    headers: dict[str, str] = field(default_factory=dict)
    body: bytes = b""
    done: bool = False

    def json(self) -> Any:
        return json.loads(self.body)


class Client:
    """One call to the application, which may be left before its end."""

    def __init__(
        self, app: Any, method: str, target: str, body: bytes, headers: Mapping[str, str]
    ) -> None:
        path, _, query = target.partition("?")
        given = {"host": "localhost", "content-type": "application/json", **headers}
        self.scope = {
            "type": "http",
            "http_version": "1.1",
            "method": method,
            "path": unquote(path),
            "raw_path": path.encode(),
            "root_path": "",
            "scheme": "http",
            "query_string": query.encode(),
            "headers": [(name.encode(), value.encode()) for name, value in given.items()],
            "client": ("test", 1),
            "server": ("localhost", 80),
            "state": {},
        }
        self.reply = Reply()
        self._body: list[bytes] = [body]
        self._gone = asyncio.Event()
        self.task = asyncio.ensure_future(app(self.scope, self._receive, self._send))

    async def _receive(self) -> Any:
        if self._body:
            return {"type": "http.request", "body": self._body.pop(), "more_body": False}
        await self._gone.wait()
        return {"type": "http.disconnect"}

    async def _send(self, message: Any) -> None:
        if message["type"] == "http.response.start":
            self.reply.status = message["status"]
            self.reply.headers = {n.decode(): v.decode() for n, v in message["headers"]}
        else:
            self.reply.body += message.get("body", b"")
            self.reply.done = not message.get("more_body", False)

    def leave(self) -> None:
        self._gone.set()

    async def whole(self) -> Reply:
        await asyncio.wait_for(self.task, 60)
        assert self.reply.done
        return self.reply


class Router:
    """The application with a service that a test may look into."""

    def __init__(self, service: RouterService, launcher: FakeLauncher) -> None:
        self.service = service
        self.launcher = launcher
        self.app = build_router_app(service)

    def call(
        self, method: str, target: str, body: Any = None, headers: Mapping[str, str] | None = None
    ) -> Client:
        raw = (
            body if isinstance(body, bytes) else b"" if body is None else json.dumps(body).encode()
        )
        return Client(self.app, method, target, raw, headers or {})

    async def get(self, target: str, **headers: str) -> Reply:
        return await self.call("GET", target, headers=headers).whole()

    async def post(self, target: str, body: Any, **headers: str) -> Reply:
        return await self.call("POST", target, body, headers).whole()


@asynccontextmanager
async def routed(
    launcher: FakeLauncher,
    fixed: list[ServedModel],
    scans: list[Scan] | None = None,
    sizes: Mapping[str, int] | None = None,
    copies: Any = dict,
    own: RouterSettings | None = None,
    **settings: Any,
) -> AsyncIterator[Router]:
    own = own or RouterSettings()
    door = ServerSettings(log=False, page=False, **settings)
    bound = PoolSettings(own.memory, own.idle_s, max(1, len(door.api_keys)), log=False)
    pool = EnginePool(launcher, bound, needs(sizes or {}))
    listed = ModelList(fixed, scans or [], copies)
    service = RouterService(listed, door, own, launcher, pool)
    try:
        yield Router(service, launcher)
    finally:
        await service.end()


async def say(
    writer: Writer, value: Any, status: int = 200, kind: str = "application/json"
) -> None:
    """A whole response."""
    body = value if isinstance(value, bytes) else json.dumps(value).encode()
    head = f"HTTP/1.1 {status} X\r\ncontent-type: {kind}\r\ncontent-length: {len(body)}\r\n\r\n"
    writer.write(head.encode() + body)
    await writer.drain()


async def begin(writer: Writer, kind: str = "text/event-stream") -> None:
    """The head of a stream that ends with the connection's chunks."""
    head = f"HTTP/1.1 200 OK\r\ncontent-type: {kind}\r\ntransfer-encoding: chunked\r\n\r\n"
    writer.write(head.encode())
    await writer.drain()


async def chunk(writer: Writer, data: bytes) -> None:
    """A part of a stream; an empty one ends it."""
    writer.write(f"{len(data):x}\r\n".encode() + data + b"\r\n")
    await writer.drain()
