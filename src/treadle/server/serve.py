"""The process of ``treadle serve``: socket, ready line, graceful shutdown."""

from __future__ import annotations

import asyncio
import logging
import os
import signal
import socket
import sys
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from functools import partial
from typing import TYPE_CHECKING, Any

import uvicorn

from treadle.errors import TreadleError
from treadle.server.app import build_app
from treadle.server.http.connection import Connection, most_open
from treadle.server.http.listeners import Listeners
from treadle.server.http.log import log
from treadle.server.http.tls import TlsFiles
from treadle.server.requests.service import ServerSettings, Service

if TYPE_CHECKING:
    from starlette.applications import Starlette

    from treadle.api.model import Model

RENEW_S = 10.0  # seconds between two checks of the TLS files
LAST_S = 2.0  # for connections to close after their requests were aborted
SWITCH_S = 0.0005  # seconds, for ``sys.setswitchinterval``


class UvicornLogHandler(logging.Handler):
    """Writes uvicorn's log records as JSON lines of the server's log."""

    def emit(self, record: logging.LogRecord) -> None:
        """Write one record as a JSON line, with its traceback if there is one."""
        log(level=record.levelname.lower(), message=self.format(record))


class _Server(uvicorn.Server):
    """uvicorn without its own signal handlers. UNIX sockets in ``unix`` are served without TLS:
    nobody else can read them.
    """

    unix: Sequence[socket.socket] = ()

    async def startup(self, sockets: list[socket.socket] | None = None) -> None:
        """Begin to serve at ``sockets`` (TCP) and at the UNIX sockets."""
        await super().startup(sockets)
        loop = asyncio.get_running_loop()
        made = partial(Connection, self.config, self.server_state, self.lifespan.state)
        for each in self.unix:
            self.servers.append(await loop.create_server(made, sock=each))

    @contextmanager
    def capture_signals(self) -> Iterator[None]:
        """Install no handlers; ``ServerProcess`` has its own."""
        yield


class ServerProcess:
    """One server, from its listening sockets to its end. ``ready(urls)`` is called once it can
    serve, with the addresses, one a line.

    ``service``: a Service, SpeechService or RouterService, whose ASGI application ``build`` makes.
    ``grace_s``: seconds that running requests get after a signal.
    """

    def __init__(
        self,
        service: Any,
        grace_s: float,
        ready: Callable[[str], None],
        build: Callable[[Any], Starlette] = build_app,
    ) -> None:
        self.service = service
        settings = service.settings
        certificate = settings.ssl_cert_file
        self.tls = tls = certificate and TlsFiles(certificate, settings.ssl_key_file)
        self.grace_s = grace_s
        self.ready = ready
        Connection.most = most_open()
        log = logging.getLogger("uvicorn")
        log.handlers = [UvicornLogHandler()]
        log.propagate = False
        config = uvicorn.Config(
            build(service),
            log_config=None,
            log_level="warning",
            access_log=False,
            lifespan="off",
            ws="none",
            http=Connection,  # always h11, so that bad requests are parsed the same everywhere
            server_header=False,
            timeout_graceful_shutdown=int(LAST_S) + 1,
            ssl_context_factory=None if tls is None else lambda config, default: tls.context,
        )
        self.server = _Server(config)
        self._n_signals = 0

    async def run(self, listeners: Listeners) -> None:
        """Serve at ``listeners`` until a signal. Raises the error that keeps the model from being
        served.
        """
        loop = asyncio.get_running_loop()
        for number in (signal.SIGINT, signal.SIGTERM):
            try:
                loop.add_signal_handler(number, self.stop, number)
            except NotImplementedError:  # Windows
                signal.signal(number, lambda n, _: loop.call_soon_threadsafe(self.stop, n))
        self.server.unix = listeners.unix
        serving = asyncio.ensure_future(self.server.serve(sockets=listeners.tcp))
        watching = asyncio.ensure_future(self._renew()) if self.tls else None
        self.service.engine.start()
        warmed = asyncio.wrap_future(self.service.engine.warmed)
        await asyncio.wait([serving, warmed], return_when=asyncio.FIRST_COMPLETED)
        try:
            if warmed.done():
                warmed.result()
                if not self._n_signals:
                    prefix = self.service.settings.api_prefix
                    self.ready("\n".join(listeners.urls(tls=self.tls is not None, prefix=prefix)))
        except BaseException:
            self.server.should_exit = True
            raise
        finally:
            await serving
            if watching is not None:
                watching.cancel()

    async def _renew(self) -> None:
        """Every ``RENEW_S`` seconds, load the TLS files again if they have changed, for new
        connections.
        """
        while self.tls is not None:
            await asyncio.sleep(RENEW_S)
            try:
                self.tls.refresh()
            except TreadleError as error:
                self.service.warn(f"{error}; the former certificate stays in use")

    def stop(self, number: int) -> None:
        """Handle the signal ``number``: running requests may finish within ``grace_s``, then they
        are aborted. A second signal ends the process at once.
        """
        self._n_signals += 1
        if self._n_signals > 1:
            os._exit(128 + number)
        n = len(self.service.engine.outputs)
        if n:
            print(
                f"treadle: stopping: {n} requests have {self.grace_s:g} s to finish; "
                "a second signal ends them now",
                file=sys.stderr,
                flush=True,
            )
        self.service.draining = True
        self._draining = asyncio.ensure_future(self._drain())

    async def _drain(self) -> None:
        """Wait until open requests have ended, or ``grace_s`` is over; then abort the rest and end
        the server. Requests that arrive meanwhile are refused with 503.
        """
        loop = asyncio.get_running_loop()
        end = loop.time() + self.grace_s
        while self.service.n_open and loop.time() < end:
            await asyncio.sleep(0.02)
        self.service.stop_streams()
        self.server.should_exit = True


def serve(
    model: Model, settings: ServerSettings, port: int, grace_s: float, ready: Callable[[str], None]
) -> None:
    """Serve ``model`` at ``port`` until a signal; running requests then get ``grace_s`` seconds.
    ``ready`` is called with the addresses, one a line. Raises TreadleError if it cannot listen or
    compile, or for wrong files of TLS or keys.
    """
    run_service(Service(model, settings), build_app, port, grace_s, ready)


def run_service(
    service: Any,
    build: Callable[[Any], Starlette],
    port: int,
    grace_s: float,
    ready: Callable[[str], None],
) -> None:
    """Serve a Service or SpeechService until a signal, and close it; ``build`` makes its ASGI
    application. The other arguments, and errors, as of ``serve``.
    """
    listeners: Listeners | None = None
    # The engine thread needs the GIL after each run: the default 5 ms would be a tenth of a step.
    sys.setswitchinterval(SWITCH_S)
    try:
        listeners = Listeners(service.settings.hosts, port)
        asyncio.run(ServerProcess(service, grace_s, ready, build).run(listeners))
    finally:
        if listeners is not None:
            listeners.close()
        service.close()
