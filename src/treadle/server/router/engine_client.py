"""HTTP to an engine: one connection for each call. Closing it cancels the call in the engine, like
a client that leaves.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Sequence
from contextlib import suppress

import h11

PART = 1 << 16
HEAD_BYTES = 1 << 18
Headers = Sequence[tuple[bytes, bytes]]


class EngineGoneError(Exception):
    """The engine's process ended before its response was complete. ``reached``: it had accepted the
    connection of the call.
    """

    def __init__(self, reached: bool = True) -> None:
        super().__init__()
        self.reached = reached


class EngineResponse:
    """The response of an engine: status, headers, and its body's parts. Call ``close`` at the end;
    before the end of the body that cancels the call in the engine.
    """

    def __init__(
        self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter, connection: h11.Connection
    ) -> None:
        self._reader = reader
        self._writer = writer
        self._connection = connection
        self.status = 0
        self.headers: list[tuple[bytes, bytes]] = []

    async def read_head(self) -> None:
        """Read status and headers into the attributes. Raises EngineGoneError."""
        event = await self._next()
        while isinstance(event, h11.InformationalResponse):
            event = await self._next()
        if not isinstance(event, h11.Response):
            raise EngineGoneError
        self.status = event.status_code
        self.headers = [(bytes(name), bytes(value)) for name, value in event.headers]

    async def parts(self) -> AsyncIterator[bytes]:
        """Yield the bytes of the body as they come. Raises EngineGoneError."""
        while True:
            event = await self._next()
            if isinstance(event, h11.Data):
                yield bytes(event.data)
            elif isinstance(event, h11.EndOfMessage):
                return
            else:
                raise EngineGoneError

    async def body(self) -> bytes:
        """Read the body to its end and return it. Raises EngineGoneError."""
        return b"".join([part async for part in self.parts()])

    async def _next(self) -> object:
        while True:
            try:
                event = self._connection.next_event()
                if event is not h11.NEED_DATA:
                    return event
                self._connection.receive_data(await self._reader.read(PART))
            except (OSError, h11.RemoteProtocolError):
                raise EngineGoneError from None

    def close(self) -> None:
        """Close the connection; idempotent."""
        with suppress(OSError, RuntimeError):
            self._writer.transport.abort()


async def call_engine(
    address: str | int, method: str, target: bytes, headers: Headers, body: bytes
) -> EngineResponse:
    """Send an HTTP request to an engine and return its response once the headers are there.
    ``address``: path of its UNIX socket, or its port; ``target``: path and query. Raises
    EngineGoneError.
    """
    try:
        if isinstance(address, int):
            reader, writer = await asyncio.open_connection("127.0.0.1", address, limit=PART)
        else:
            opened = getattr(asyncio, "open_unix_connection")  # noqa: B009  # not on Windows
            reader, writer = await opened(address, limit=PART)
    except OSError:
        raise EngineGoneError(reached=False) from None
    connection = h11.Connection(h11.CLIENT, max_incomplete_event_size=HEAD_BYTES)
    response = EngineResponse(reader, writer, connection)
    try:
        given = [*headers, (b"content-length", str(len(body)).encode()), (b"connection", b"close")]
        head = connection.send(h11.Request(method=method, target=target, headers=given))
        data = connection.send(h11.Data(data=body)) if body else b""
        end = connection.send(h11.EndOfMessage())
        with suppress(ConnectionError):  # the engine may close before it has read all
            writer.write((head or b"") + (data or b"") + (end or b""))
            await writer.drain()
        await response.read_head()
    except BaseException:
        response.close()
        raise
    return response
