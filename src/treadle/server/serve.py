"""The process of ``treadle serve``: a socket, the ready line, an end that clients are told of."""

from __future__ import annotations

import asyncio
import logging
import os
import signal
import socket
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING

import uvicorn

from treadle.errors import TreadleError
from treadle.server.app import build_app
from treadle.server.http.connection import Connection, most_open
from treadle.server.http.log import log
from treadle.server.requests.service import ServerSettings, Service

if TYPE_CHECKING:
    from treadle.api.model import Model

LAST_S = 2.0  # for connections to close, when their answers have been given up
SWITCH_S = 0.0005


class UvicornLogHandler(logging.Handler):
    """What uvicorn has to say, as lines of the log: one object each."""

    def emit(self, record: logging.LogRecord) -> None:
        """Write one, with the traceback that it may have."""
        log(level=record.levelname.lower(), message=self.format(record))


class _Server(uvicorn.Server):
    """uvicorn, without signal handlers of its own."""

    @contextmanager
    def capture_signals(self) -> Iterator[None]:
        """Leave them to ``_ServerProcess``."""
        yield


class _ServerProcess:
    """One server, from its socket to its end. ``ready(url)`` is called when it can answer."""

    def __init__(self, service: Service, grace_s: float, ready: Callable[[str], None]) -> None:
        self.service, self.grace_s, self.ready = service, grace_s, ready
        Connection.most = most_open()
        log = logging.getLogger("uvicorn")
        log.handlers, log.propagate = [UvicornLogHandler()], False
        config = uvicorn.Config(
            build_app(service),
            log_config=None,
            log_level="warning",
            access_log=False,
            lifespan="off",
            ws="none",
            http=Connection,  # by h11, whatever else is installed: one way to read bad requests
            server_header=False,
            timeout_graceful_shutdown=int(LAST_S) + 1,
        )
        self.server = _Server(config)
        self._n_signals = 0

    async def run(self, listener: socket.socket, url: str) -> None:
        """Until it is told to stop. Raises what keeps the model from being served."""
        loop = asyncio.get_running_loop()
        for number in (signal.SIGINT, signal.SIGTERM):
            try:
                loop.add_signal_handler(number, self.stop, number)
            except NotImplementedError:  # Windows
                signal.signal(number, lambda n, _: loop.call_soon_threadsafe(self.stop, n))
        serving = asyncio.ensure_future(self.server.serve(sockets=[listener]))
        self.service.engine.start()
        warmed = asyncio.wrap_future(self.service.engine.warmed)
        await asyncio.wait([serving, warmed], return_when=asyncio.FIRST_COMPLETED)
        try:
            if warmed.done():
                warmed.result()
                if not self._n_signals:
                    self.ready(url)
        except BaseException:
            self.server.should_exit = True
            raise
        finally:
            await serving

    def stop(self, number: int) -> None:
        """A signal: what is being written may end within ``grace_s``, then it is given up. A second
        one ends the process at once.
        """
        self._n_signals += 1
        if self._n_signals > 1:
            os._exit(128 + number)
        n = len(self.service.engine.texts)
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
        """New calls are told 503 until those in hand have ended, or ``grace_s`` is over."""
        loop = asyncio.get_running_loop()
        end = loop.time() + self.grace_s
        while self.service.n_open and loop.time() < end:
            await asyncio.sleep(0.02)
        self.service.stop_calls()
        self.server.should_exit = True


def listen(host: str, port: int) -> socket.socket:
    """A socket that listens; port 0: any. Raises TreadleError."""
    try:
        found = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM, flags=socket.AI_PASSIVE)
        family, _, _, _, address = found[0]
        return socket.create_server(address, family=family, backlog=2048)
    except OSError as error:
        why = error.strerror or error
        raise TreadleError(f"cannot listen on {host} port {port}: {why}") from error


def address_of(listener: socket.socket) -> str:
    """The URL that a client on this machine takes."""
    host, port = listener.getsockname()[:2]
    host = {"0.0.0.0": "127.0.0.1", "::": "::1"}.get(host, host)
    return f"http://[{host}]:{port}" if ":" in host else f"http://{host}:{port}"


def serve(
    model: Model, settings: ServerSettings, port: int, grace_s: float, ready: Callable[[str], None]
) -> None:
    """Serve ``model`` until a signal. Raises TreadleError where it cannot listen or compile."""
    listener = listen(settings.host, port)
    service = Service(model, settings)
    # The engine's thread comes back from a run and wants the GIL: the usual 5 ms would be a tenth
    # of a step.
    sys.setswitchinterval(SWITCH_S)
    try:
        asyncio.run(_ServerProcess(service, grace_s, ready).run(listener, address_of(listener)))
    finally:
        listener.close()
        service.close()
