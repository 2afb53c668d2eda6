"""A model's service on an event loop of its own thread, and single requests to its endpoints."""

from __future__ import annotations

import asyncio
import atexit
import os
import re
import secrets
import threading
import time
from collections.abc import Callable, Coroutine, Mapping
from concurrent.futures import Future
from contextlib import suppress
from math import inf
from types import SimpleNamespace
from typing import TYPE_CHECKING, Any, TypeVar, cast
from urllib.parse import parse_qsl, unquote, urlsplit

from treadle.errors import ForkedError, TreadleError
from treadle.server.http.api_errors import ApiError, GoneError, problem_of
from treadle.server.http.http_io import Json
from treadle.server.openai_routes import OPENAI_DELETE, OPENAI_GET, OPENAI_POST
from treadle.server.requests.service import ServerSettings, Service

if TYPE_CHECKING:
    from starlette.requests import Request as HttpRequest

    from treadle.api.model import Model
    from treadle.server.openai_routes import Handler

T = TypeVar("T")
Message = Mapping[str, Any]  # of ASGI
LOOK_AHEAD = 1  # messages of a response that wait for their reader; others wait in the request


def _pattern(path: str) -> re.Pattern[str]:
    """Return the pattern of a route's path, in which ``{id}`` matches one part of a path,
    ``{name:path}`` the rest; each is a named group.
    """
    whole = re.sub(r"\{(\w+):path\}", r"(?P<\1>.*)", path)
    return re.compile(re.sub(r"\{(\w+)\}", r"(?P<\1>[^/]+)", whole))


ROUTES: Mapping[str, list[tuple[re.Pattern[str], Handler]]] = {
    method: [(_pattern(path), handler) for path, handler in table.items()]
    for method, table in (("POST", OPENAI_POST), ("GET", OPENAI_GET), ("DELETE", OPENAI_DELETE))
}


def find_endpoint(method: str, path: str) -> tuple[Handler, dict[str, str]]:
    """Return the handler of ``path`` (with or without ``/v1``) and its path parameters. Raises
    ApiError: 404 for an unknown path, 405 for another method.
    """
    path = path if path.startswith("/v1/") else f"/v1{path}"
    for pattern, handler in ROUTES.get(method, ()):
        if (found := pattern.fullmatch(path)) is not None:
            return handler, found.groupdict()
    known = any(pattern.fullmatch(path) for table in ROUTES.values() for pattern, _ in table)
    what = "method not allowed for this path" if known else "not an endpoint of treadle.openai"
    raise ApiError(405 if known else 404, f"{method} {path[:200]}: {what}")


class InProcessServer:
    """The service of one model, shared by all clients of the model; ``join`` makes it. ``owned``:
    close the model with the last client.
    """

    _of_models: dict[int, InProcessServer] = {}  # noqa: RUF012 - by id of the model, which they hold
    _lock = threading.Lock()

    def __init__(self, model: Model, *, owned: bool) -> None:
        urls = model.media_urls
        hosts = () if isinstance(urls, bool) else tuple(urls)
        settings = ServerSettings(
            log=False, page=False, max_queue_s=inf, media_urls=bool(urls), media_hosts=hosts
        )
        self.service = Service(model, settings)
        self.app = SimpleNamespace(state=SimpleNamespace(service=self.service))
        self.n_clients = 0
        self._owned = owned
        self._pid = os.getpid()
        self._loop = asyncio.new_event_loop()
        self._submitting = threading.Lock()
        self._is_closed = False  # whether nothing more is submitted
        self.exchanges: dict[Exchange, asyncio.Task[None]] = {}  # that run
        self.service.engine.warms_when_idle = True
        self.service.engine.start()
        self._thread = threading.Thread(target=self._work, name="treadle-openai", daemon=True)
        self._thread.start()
        atexit.register(self.close)

    @classmethod
    def join(cls, model: Model, *, owned: bool) -> InProcessServer:
        """Return the server of ``model``, made for its first client, and count one client more.
        ``owned`` (read for the first client only): close the model with the last client.
        """
        with cls._lock:
            server = cls._of_models.get(id(model))
            if server is None or server._pid != os.getpid():
                server = cls._of_models[id(model)] = cls(model, owned=owned)
            server.n_clients += 1
            return server

    def leave(self) -> None:
        """Count one client less, and ``close`` after the last one."""
        with self._lock:
            self.n_clients -= 1
            if self.n_clients or self._of_models.get(id(self.service.model)) is not self:
                return
            del self._of_models[id(self.service.model)]
        self.close()

    def leave_soon(self) -> None:
        """Call ``leave`` in a new thread: a garbage collector's finalizer must not wait or lock."""
        if self._pid == os.getpid():
            threading.Thread(target=self.leave, name="treadle-openai-end", daemon=True).start()

    def close(self) -> None:
        """Abort what runs and end the threads. Idempotent."""
        atexit.unregister(self.close)
        if self._pid != os.getpid():
            return
        with self._submitting:
            if self._is_closed:
                return
            self._is_closed = True
        asyncio.run_coroutine_threadsafe(self._end(), self._loop).result()
        self.service.close()
        self._loop.call_soon_threadsafe(self._loop.stop)
        self._thread.join()
        self._loop.close()
        if self._owned:
            self.service.model.close()

    async def _end(self) -> None:
        """Abort the running exchanges, and cancel the tasks that wait for their messages."""
        self.service.draining = True
        tasks = list(self.exchanges.values())
        for exchange in self.exchanges:
            exchange.abort()
        await asyncio.gather(*tasks, return_exceptions=True)
        waiting = asyncio.all_tasks() - {asyncio.current_task()}
        for task in waiting:
            task.cancel()
        # The loop ends after this: their callers have to hear of it first.
        await asyncio.gather(*waiting, return_exceptions=True)

    def _work(self) -> None:
        asyncio.set_event_loop(self._loop)
        self._loop.run_forever()

    def submit(self, work: Coroutine[Any, Any, T]) -> Future[T]:
        """Run ``work`` on the event loop. Raises ForkedError in a forked child, which lacks the
        loop's thread, and TreadleError if the client is closed.
        """
        try:
            if self._pid != os.getpid():
                raise ForkedError(
                    "this client was made before the process forked: make one in the child"
                )
            with self._submitting:  # what comes later than the loop's end would wait forever
                if self._is_closed:
                    raise TreadleError("the client is closed")
                return asyncio.run_coroutine_threadsafe(work, self._loop)
        except BaseException:
            work.close()
            raise

    def call_soon(self, work: Callable[[], object]) -> None:
        """Call ``work`` on the event loop, unless the client is closed."""
        with suppress(RuntimeError):  # the loop is closed
            self._loop.call_soon_threadsafe(work)


class LocalRequest:
    """The part of Starlette's Request that endpoints use, for a request of this process."""

    def __init__(
        self, app: Any, method: str, url: str, headers: Mapping[str, str], body: bytes
    ) -> None:
        target = urlsplit(url)
        self.app = app
        self.method = method
        self.path = unquote(target.path)
        self.headers = {name.lower(): value for name, value in headers.items()}
        self.query_params = dict(parse_qsl(target.query, keep_blank_values=True))
        self.path_params: dict[str, str] = {}
        self.scope: dict[str, Any] = {
            "type": "http",
            "app": app,
            "treadle.came": time.perf_counter(),
            "treadle.id": secrets.token_hex(8),
        }
        self.gone = asyncio.Event()  # its reader has left
        self._body: bytes | None = body

    async def receive(self) -> Message:
        """Return the body as one ASGI message; on the next call wait until the client has left, and
        return ``http.disconnect``.
        """
        if self._body is None:
            await self.gone.wait()
            return {"type": "http.disconnect"}
        body = self._body
        self._body = None
        return {"type": "http.request", "body": body, "more_body": False}


class Exchange:
    """One request and its response, a queue of ASGI messages for the client's transport. The
    endpoint waits while ``LOOK_AHEAD`` messages are unread.
    """

    def __init__(self, server: InProcessServer, request: LocalRequest) -> None:
        self._server = server
        self._request = request
        self._messages: asyncio.Queue[Message | Exception | None] = asyncio.Queue(LOOK_AHEAD)

    async def begin(self) -> Message:
        """Begin, and return the response's first message: its status and headers."""
        task = self._server.exchanges[self] = asyncio.ensure_future(self._run())
        task.add_done_callback(lambda _: self._server.exchanges.pop(self))
        head = await self.next()
        assert head is not None
        return head

    async def next(self) -> Message | None:
        """Return the response's next message, None at its end. Raises the endpoint's error."""
        found = await self._messages.get()
        if isinstance(found, Exception):
            raise found
        return found

    def leave(self) -> None:
        """Abort the request. Any thread may call this, at any time, even after the end."""
        self._server.call_soon(self.abort)

    def abort(self) -> None:
        """Tell the endpoint that the client has left, and drop unread messages. Call this on the
        server's event loop.
        """
        self._request.gone.set()
        while not self._messages.empty():  # the endpoint may wait for room
            self._messages.get_nowait()

    async def _run(self) -> None:
        """Call the endpoint. API errors become error responses; any other error is raised by the
        client's ``next``, with its traceback.
        """
        last: Exception | None = None
        try:
            await self._respond()
        except Exception as error:
            last = error
        await self._send(last)

    async def _send(self, message: Any) -> None:
        if not self._request.gone.is_set():
            await self._messages.put(message)

    async def _respond(self) -> None:
        request = self._request
        try:
            handler, request.path_params = find_endpoint(request.method, request.path)
            await self._ready()
            response = await handler(cast("HttpRequest", request))
        except (ApiError, TreadleError) as error:
            problem = problem_of(error)
            response = Json(problem.as_dict(), problem.status, problem.headers)
        await response(request.scope, request.receive, self._send)  # type: ignore[arg-type]

    async def _ready(self) -> None:
        """Wait until the first kernels are compiled. Raises the error that makes the model
        unusable, and GoneError if the client leaves first.
        """
        warmed = asyncio.wrap_future(self._server.service.engine.warmed)
        gone = asyncio.ensure_future(self._request.gone.wait())
        waiting: list[asyncio.Future[Any]] = [warmed, gone]
        await asyncio.wait(waiting, return_when=asyncio.FIRST_COMPLETED)
        gone.cancel()
        if self._request.gone.is_set():
            raise GoneError
        warmed.result()
