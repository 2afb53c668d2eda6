"""Streams that outlive their connection, through the router."""

from __future__ import annotations

import asyncio
from typing import Any

import pytest

from tests.server.router.fakes import FakeLauncher, Writer, begin, chunk, models, routed, until
from tests.server.router.test_pool import in_loop
from treadle.server.router import forwarding

FIXED = models("small")
BODY = {"model": "small", "stream": True}
KEPT = {"x-conversation-id": "talk"}


@in_loop
async def test_a_client_that_leaves_keeps_its_engine(monkeypatch: pytest.MonkeyPatch) -> None:
    """Till the end of the text, or for as long as an answer that nobody reads is written."""
    more = asyncio.Event()

    async def half(call: dict[str, Any], writer: Writer) -> None:
        await begin(writer)
        await chunk(writer, b"data: 1\n\n")
        waits = asyncio.ensure_future(more.wait())
        await asyncio.wait({waits, call["left"]}, return_when=asyncio.FIRST_COMPLETED)
        waits.cancel()
        await chunk(writer, b"")

    launcher = FakeLauncher(answer=half)
    async with routed(launcher, FIXED) as router:
        client = router.call("POST", "/v1/completions", BODY, KEPT)
        await until(lambda: client.reply.body)
        engine = router.service.pool.engine(FIXED[0])
        assert engine is not None
        client.leave()
        await asyncio.sleep(0)
        assert not router.service.loading_streams
        assert engine.n_running == router.service.n_open == 1
        more.set()
        await client.task
        assert engine.n_running == router.service.n_open == 0
        more.clear()
        monkeypatch.setattr(forwarding, "UNREAD_S", 0.01)
        client = router.call("POST", "/v1/completions", BODY, KEPT)
        await until(lambda: client.reply.body)
        client.leave()
        await client.task
        assert engine.n_running == 0


@pytest.mark.parametrize("pings", [False, True])
@in_loop
async def test_a_stream_that_is_stopped_during_the_load(
    pings: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Its call ends with an error, whether or not its response has begun."""
    monkeypatch.setattr(forwarding, "PING_S", 0.001 if pings else 100.0)
    launcher = FakeLauncher(automatic=False)
    async with routed(launcher, FIXED) as router:
        assert (await router.get("/v1/stream?conv_id=talk")).status == 404
        client = router.call("POST", "/v1/completions", BODY, KEPT)
        await until(lambda: launcher.engines and (client.reply.body or not pings))
        reply = await router.get("/v1/stream?conv_id=talk")
        assert (reply.status, reply.headers["retry-after"]) == (503, "2")
        assert (await router.get("/v1/stream?conv_id=other")).status == 404
        client.leave()  # as a page that is reloaded
        other = router.call("POST", "/v1/completions", BODY, KEPT)  # and asks again
        reply = await client.whole()
        assert b"cancelled" in reply.body
        assert (await router.call("DELETE", "/v1/stream?conv_id=talk").whole()).status == 204
        reply = await other.whole()
        assert reply.status == (200 if reply.body.startswith(b":") else 400)
        assert b"cancelled" in reply.body
        assert (await router.get("/v1/stream?conv_id=talk")).status == 404
        assert not router.service.loading_streams
