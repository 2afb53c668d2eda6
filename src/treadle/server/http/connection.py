"""One connection of a client: how long is waited for it, and how many there may be."""

from __future__ import annotations

import asyncio
import socket
from typing import Any

from uvicorn.protocols.http.h11_impl import H11Protocol

from treadle.system import SYSTEM

HEAD_S = 20.0  # until the head of a request is whole
STALLED_S = 300.0  # a reader who takes nothing for so long has left without a word
SPARE = 256  # files that the process may need beside its connections


def most_open() -> int:
    """Connections that this process may hold, when its bound on open files is as high as can be."""
    n_files = SYSTEM.most_files()
    return 1 << 20 if n_files is None else max(n_files - SPARE, SPARE)


class Connection(H11Protocol):
    """uvicorn's, which by itself waits for ever for a head, and for a reader who has stopped.

    ``most`` connections are held; one more is closed at once. Without that bound the process could
    open no file, and nobody could connect any more.
    """

    most = 1 << 20

    def __init__(self, *args: Any, **settings: Any) -> None:
        super().__init__(*args, **settings)
        self._head: asyncio.TimerHandle | None = None
        self._stalled: asyncio.TimerHandle | None = None

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]
        """It is there."""
        super().connection_made(transport)
        # asyncio does so only where a socket names its protocol, and a listening one does not. With
        # Nagle's delay an event waits for the acknowledgement of the one before it, up to 40 ms.
        opened: socket.socket = transport.get_extra_info("socket")
        opened.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        if len(self.connections) > self.most:
            transport.abort()
        else:
            self._head = self.loop.call_later(HEAD_S, transport.close)

    def data_received(self, data: bytes) -> None:
        """Bytes have come: of a head, of a body, or of the next request."""
        super().data_received(data)
        if self.cycle is not None and not self.cycle.response_complete:
            _stop(self._head)
            self._head = None
        elif self._head is None:
            self._head = self.loop.call_later(HEAD_S, self.transport.close)

    def _unsupported_upgrade_warning(self) -> None:
        """Nothing: whoever asks for a WebSocket is answered without one. uvicorn's own advises to
        install libraries for it.
        """

    def pause_writing(self) -> None:
        """The client does not take what was sent."""
        super().pause_writing()
        _stop(self._stalled)
        self._stalled = self.loop.call_later(STALLED_S, self.transport.abort)

    def resume_writing(self) -> None:
        """It does again."""
        super().resume_writing()
        _stop(self._stalled)

    def connection_lost(self, exc: Exception | None) -> None:
        """It is gone."""
        _stop(self._head)
        _stop(self._stalled)
        super().connection_lost(exc)


def _stop(timer: asyncio.TimerHandle | None) -> None:
    if timer is not None:
        timer.cancel()
