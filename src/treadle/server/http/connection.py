"""One client connection: its timeouts, and the limit on open connections."""

from __future__ import annotations

import asyncio
import socket
from typing import Any

from uvicorn.protocols.http.h11_impl import H11Protocol

from treadle.system import SYSTEM

HEAD_S = 20.0  # to receive a whole request head
STALLED_S = 300.0  # a client that reads nothing for this long is considered gone
SPARE = 256  # file descriptors reserved for things other than connections


def most_open() -> int:
    """Return how many connections this process may hold, after raising its limit on open files as
    far as the system allows.
    """
    n_files = SYSTEM.most_files()
    return 1 << 20 if n_files is None else max(n_files - SPARE, SPARE)


class Connection(H11Protocol):
    """uvicorn's h11 protocol with timeouts: by itself it waits forever for a request head, and for
    a client that has stopped reading.

    At most ``most`` connections are held; further ones are closed at once. Without this limit the
    process could run out of file descriptors, and nobody could connect.
    """

    most = 1 << 20

    def __init__(self, *args: Any, **settings: Any) -> None:
        super().__init__(*args, **settings)
        self._head: asyncio.TimerHandle | None = None
        self._stalled: asyncio.TimerHandle | None = None

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]
        """Set TCP_NODELAY and start the head timeout; abort if there are too many connections."""
        super().connection_made(transport)
        # asyncio sets it only if a socket names its protocol, and a listening one does not. With
        # Nagle's algorithm an event waits for the previous one's acknowledgement, up to 40 ms.
        opened: socket.socket = transport.get_extra_info("socket")
        if opened.family in (socket.AF_INET, socket.AF_INET6):  # not of a UNIX socket
            opened.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        if len(self.connections) > self.most:
            transport.abort()
        else:
            self._head = self.loop.call_later(HEAD_S, transport.close)

    def data_received(self, data: bytes) -> None:
        """Parse bytes of a request's head, its body, or the next request; start the head timeout
        when a head is awaited, and stop it when the head is complete.
        """
        super().data_received(data)
        if self.cycle is not None and not self.cycle.response_complete:
            _stop(self._head)
            self._head = None
        elif self._head is None:
            self._head = self.loop.call_later(HEAD_S, self.transport.close)

    def _unsupported_upgrade_warning(self) -> None:
        """Log nothing: a WebSocket request is answered as plain HTTP. uvicorn's own warning advises
        to install libraries for it.
        """

    def pause_writing(self) -> None:
        """Start the stall timeout: the client does not read what was sent, and the buffer is
        full.
        """
        super().pause_writing()
        _stop(self._stalled)
        self._stalled = self.loop.call_later(STALLED_S, self.transport.abort)

    def resume_writing(self) -> None:
        """Stop the stall timeout: the client reads again."""
        super().resume_writing()
        _stop(self._stalled)

    def connection_lost(self, exc: Exception | None) -> None:
        """Cancel all timeouts."""
        _stop(self._head)
        _stop(self._stalled)
        super().connection_lost(exc)


def _stop(timer: asyncio.TimerHandle | None) -> None:
    if timer is not None:
        timer.cancel()
