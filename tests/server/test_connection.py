"""Connections that are waited for no longer: no head, no reader, one too many."""

from __future__ import annotations

import asyncio
import socket
from collections.abc import Awaitable, Callable
from typing import Any

import pytest
import uvicorn
from uvicorn.server import ServerState

from tests.server.conftest import PATIENCE_S
from treadle.server.http import connection
from treadle.server.http.connection import Connection
from treadle.server.http.listeners import listen

Talk = Callable[[asyncio.StreamReader, asyncio.StreamWriter], Awaitable[Any]]
HEAD = b"GET / HTTP/1.1\r\nHost: x\r\n\r\n"
left: list[str] = []


async def app(scope: Any, receive: Any, send: Any) -> None:
    """Gives a little, or for ever as long as somebody takes it."""
    head = {"type": "http.response.start", "status": 200, "headers": [(b"content-length", b"2")]}
    if scope["path"] != "/endless":
        await send(head)
        await send({"type": "http.response.body", "body": b"ok"})
        return
    await send({**head, "headers": []})
    await receive()  # the body, which is empty
    gone = asyncio.ensure_future(receive())
    while not gone.done():
        more = {"type": "http.response.body", "body": b"x" * 65536, "more_body": True}
        sent = asyncio.ensure_future(send(more))
        await asyncio.wait([gone, sent], return_when=asyncio.FIRST_COMPLETED)
        sent.cancel()
    left.append((await gone)["type"])


def talk(*talks: Talk, made: list[Connection] | None = None) -> list[Any]:
    """What comes of several clients at once. The server's ends of them go into ``made``."""
    made = [] if made is None else made

    async def run() -> list[Any]:
        config = uvicorn.Config(app, lifespan="off", ws="none", log_level="critical")
        config.load()
        state = ServerState()

        def make() -> Connection:
            made.append(Connection(config=config, server_state=state, app_state={}))
            return made[-1]

        listener = listen("127.0.0.1", 0)
        server = await asyncio.get_running_loop().create_server(make, sock=listener)
        port = server.sockets[0].getsockname()[1]

        async def one(said: Talk) -> Any:
            reader, writer = await asyncio.open_connection("127.0.0.1", port, limit=1024)
            try:
                return await said(reader, writer)
            finally:
                writer.close()

        found = [await one(said) for said in talks]
        while state.connections:  # as long as all of this may take
            await asyncio.sleep(0.005)
        server.close()
        return found

    return asyncio.run(asyncio.wait_for(run(), PATIENCE_S))


@pytest.mark.parametrize("said", [b"", b"GET / HT"])
def test_a_head_that_does_not_come_is_not_waited_for(
    said: bytes, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(connection, "HEAD_S", 0.05)

    async def silent(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> bytes:
        writer.write(said)
        return await reader.read(-1)  # to the end, which is the server's

    (found,) = talk(silent)
    assert found == b""


def test_a_call_is_served_however_short_the_wait(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(connection, "HEAD_S", 60.0)

    async def quick(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> bytes:
        writer.write(HEAD)
        return await reader.readuntil(b"ok")

    assert all(found.startswith(b"HTTP/1.1 200") for found in talk(quick, quick))


def test_no_part_of_an_answer_waits_for_the_one_before() -> None:
    """Nagle's delay is off, also where the socket comes from ``listen``."""
    made: list[Connection] = []

    async def quick(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> int:
        writer.write(HEAD)
        await reader.readuntil(b"ok")
        end: socket.socket = made[0].transport.get_extra_info("socket")
        return end.getsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY)

    assert all(talk(quick, made=made))


def test_a_reader_who_takes_nothing_is_given_up(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(connection, "STALLED_S", 0.05)
    left.clear()

    async def stalled(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        writer.transport.pause_reading()  # type: ignore[attr-defined]
        writer.write(HEAD.replace(b"/ ", b"/endless ", 1))
        while not left:
            await asyncio.sleep(0.005)

    talk(stalled)
    assert left == ["http.disconnect"]


def test_one_too_many_is_closed_at_once(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(Connection, "most", 0)

    async def refused(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> bytes:
        try:
            writer.write(HEAD)
            return await reader.read(-1)
        except ConnectionError:
            return b""

    assert talk(refused) == [b""]


def test_the_bound_leaves_files_to_the_process() -> None:
    assert connection.most_open() >= connection.SPARE
