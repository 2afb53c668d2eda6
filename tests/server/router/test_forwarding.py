"""Calls through the router's application to engines that are sockets without a model."""

from __future__ import annotations

import asyncio
import json
import signal
from typing import Any

import pytest

from tests.server.router.fakes import (
    FakeLauncher,
    Writer,
    begin,
    chunk,
    models,
    routed,
    say,
    until,
)
from tests.server.router.test_pool import in_loop
from treadle.server.router import forwarding
from treadle.server.router.engine_client import HEAD_BYTES
from treadle.server.router.service import RouterSettings

FIXED = [*models("small", aliases=("gpt-4o",)), *models("large-7b")]


async def echo(call: dict[str, Any], writer: Writer) -> None:
    """The call itself, as JSON."""
    body = call["body"].decode()
    await say(writer, {**call, "left": None, "body": body})


@in_loop
async def test_a_call_reaches_the_engine_of_its_model() -> None:
    """With the engine's own key in place of the client's, and its body as it was."""
    launcher = FakeLauncher(answer=echo)
    keys = ("one", "two")
    async with routed(launcher, FIXED, api_keys=keys) as router:
        raw = b'{"model": "GPT-4o:latest" , "prompt": "x"}'
        headers = {"authorization": "Bearer two", "x-request-id": "mine", "x-own": "1"}
        reply = await router.post("/v1/completions?a=b", raw, **headers)
        assert reply.status == 200
        assert reply.headers["x-request-id"] == "mine"
        got = reply.json()
        assert launcher.names == ["small"]
        assert (got["method"], got["target"]) == ("POST", "/v1/completions?a=b")
        assert got["body"] == raw.decode()
        own = launcher.engines[0].order.keys
        assert len(own) == len(set(own)) == 2
        sent = got["headers"]
        assert sent["authorization"] == f"bearer {own[1]}".lower()
        assert (sent["host"], sent["x-request-id"], sent["x-own"]) == ("localhost", "mine", "1")
        # by the query, a multipart form, or a part of the name that fits one model
        await router.get("/slots?model=large-7b", **headers)
        assert launcher.names == ["small"]
        await router.get("/props?model=large", **headers)
        assert launcher.names == ["small", "large-7b"]
        form = b'--x\r\nContent-Disposition: form-data; name="model"\r\n\r\nsmall\r\n--x--\r\n'
        form_type = {"content-type": "multipart/form-data; boundary=x"}
        reply = await router.post("/tokenize", form, **{**headers, **form_type})
        assert reply.json()["body"] == form.decode()
        assert len(launcher.engines[0].calls) == 2
        # without a name: the first
        await router.post("/v1/completions", {"prompt": "x"}, **headers)
        assert len(launcher.engines[0].calls) == 3
        assert (await router.post("/v1/completions", raw)).status == 401


@pytest.mark.parametrize(
    ("path", "shape"),
    [
        ("/v1/chat/completions", ["error", "message"]),
        ("/v1/messages", ["error", "message"]),
        ("/api/chat", ["error"]),
    ],
)
@in_loop
async def test_an_unknown_model_is_told_with_all_names(path: str, shape: list[str]) -> None:
    launcher = FakeLauncher()
    async with routed(launcher, FIXED) as router:
        reply = await router.post(path, {"model": "nope", "messages": []})
        assert reply.status == 404
        value = reply.json()
        for key in shape:
            value = value[key]
        assert value == "model 'nope': no such model; available: small, large-7b"
        assert not launcher.engines


@pytest.mark.parametrize(
    ("body", "status"),
    [(b"{", 400), (b'{"model": 3}', 400), (b'{"model": "small", "model": "nope"}', 404)],
)
@in_loop
async def test_bodies_that_name_no_model(body: bytes, status: int) -> None:
    async with routed(FakeLauncher(), FIXED) as router:
        assert (await router.post("/v1/completions", body)).status == status


async def two_events(call: dict[str, Any], writer: Writer) -> None:
    await begin(writer)
    await chunk(writer, b'data: {"a": 1}\n\n')
    await chunk(writer, b"data: [DONE]\n\n")
    await chunk(writer, b"")


@in_loop
async def test_a_stream_has_keep_alives_while_the_model_is_loaded(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(forwarding, "PING_S", 0.005)
    launcher = FakeLauncher(automatic=False, answer=two_events)
    async with routed(launcher, FIXED) as router:
        client = router.call("POST", "/v1/chat/completions", {"model": "small", "stream": True})
        await until(lambda: client.reply.body.count(b": ping\n\n") > 1)
        assert client.reply.status == 200
        assert client.reply.headers["content-type"].startswith("text/event-stream")
        await launcher.engines[0].ready()
        reply = await client.whole()
        events = reply.body.replace(b": ping\n\n", b"")
        assert events == b'data: {"a": 1}\n\ndata: [DONE]\n\n'
        ollama = router.call("POST", "/api/chat", {"model": "large-7b", "messages": [{}]})
        await until(lambda: ollama.reply.body.count(b"\n") > 1 and len(launcher.engines) == 2)
        first = json.loads(ollama.reply.body.splitlines()[0])
        assert (first["message"]["content"], first["done"]) == ("", False)
        ollama.leave()
        await ollama.task
        await until(lambda: launcher.engines[1].signals == [signal.SIGKILL])


@pytest.mark.parametrize(
    ("path", "form"),
    [
        ("/v1/completions", b'data: {"error":'),
        ("/v1/messages", b'event: error\ndata: {"type":"error"'),
        ("/v1/responses", b'event: error\ndata: {"type":"error"'),
        ("/api/generate", b'{"error":"small cannot be loaded: no memory"}\n'),
    ],
)
@in_loop
async def test_a_load_that_fails_after_keep_alives_ends_the_stream_with_an_error(
    path: str, form: bytes, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(forwarding, "PING_S", 0.005)
    launcher = FakeLauncher(automatic=False)
    async with routed(launcher, FIXED) as router:
        body = {"model": "small", "stream": True, "prompt": "x"}
        client = router.call("POST", path, body)
        await until(lambda: client.reply.body)
        launcher.engines[0].report(failed="no memory")
        launcher.engines[0].end(1)
        reply = await client.whole()
        assert form in reply.body
        assert b"no memory" in reply.body


@in_loop
async def test_an_engines_refusal_after_keep_alives_is_an_event(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    async def refuse(call: dict[str, Any], writer: Writer) -> None:
        error = {"message": "n: wrong", "type": "invalid_request_error", "param": "n", "more": 7}
        await say(writer, {"error": error}, 400)

    monkeypatch.setattr(forwarding, "PING_S", 0.005)
    launcher = FakeLauncher(automatic=False, answer=refuse)
    async with routed(launcher, FIXED) as router:
        body = {"model": "small", "stream": True}
        client = router.call("POST", "/v1/completions", body)
        await until(lambda: client.reply.body)
        await launcher.engines[0].ready()
        reply = await client.whole()
        last = json.loads(reply.body.strip().splitlines()[-1].removeprefix(b"data: "))
        assert (last["error"]["message"], last["error"]["param"]) == ("n: wrong", "n")
        assert last["error"]["more"] == 7
        # without them it is the engine's own answer
        assert (await router.post("/v1/completions", body)).status == 400


@in_loop
async def test_who_leaves_ends_the_call_in_the_engine() -> None:
    async def endless(call: dict[str, Any], writer: Writer) -> None:
        await begin(writer)
        await chunk(writer, b"data: 1\n\n")
        await call["left"]

    launcher = FakeLauncher(answer=endless)
    async with routed(launcher, FIXED) as router:
        client = router.call("POST", "/v1/completions", {"model": "small", "stream": True})
        await until(lambda: client.reply.body)
        engine = router.service.pool.engine(FIXED[0])
        assert engine is not None
        assert engine.n_running == 1
        client.leave()
        await client.task
        await asyncio.wait_for(launcher.engines[0].calls[0]["left"], 60)
        assert engine.n_running == 0
        # while nothing was sent yet
        silent = asyncio.Event()

        async def wait(call: dict[str, Any], writer: Writer) -> None:
            silent.set()
            await call["left"]

        launcher.engines[0].answer = wait
        client = router.call("POST", "/v1/completions", {"model": "small"})
        await silent.wait()
        client.leave()
        await client.task
        assert engine.n_running == 0


@pytest.mark.parametrize("path", ["/v1/completions", "/api/generate"])
@in_loop
async def test_a_crash_under_a_text_is_told_in_the_stream(
    path: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(forwarding, "ENDING_S", 0.01)
    crash = asyncio.Event()

    async def half(call: dict[str, Any], writer: Writer) -> None:
        await begin(writer)
        await chunk(writer, b'{"half": ')
        await crash.wait()

    launcher = FakeLauncher(answer=half)
    async with routed(launcher, FIXED) as router:
        client = router.call("POST", path, {"model": "small", "stream": True, "prompt": "x"})
        await until(lambda: client.reply.body)
        launcher.engines[0].end(-9)
        crash.set()
        reply = await client.whole()
        lines = reply.body.strip().splitlines()
        assert lines[0] == b'{"half": '
        error = json.loads(lines[-1].removeprefix(b"data: "))["error"]
        assert "ended unexpectedly" in (error if path.startswith("/api") else error["message"])
        # the next call starts another; an answer that is no stream becomes a 502
        crash.clear()
        client = router.call("POST", path, {"model": "small", "stream": False, "prompt": "x"})
        await until(lambda: len(launcher.engines) == 2 and launcher.engines[1].calls)

        async def cut(call: dict[str, Any], writer: Writer) -> None:
            writer.write(b"HTTP/1.1 200 OK\r\ncontent-length: 100\r\n\r\n{")
            await writer.drain()

        launcher.engines[1].answer = cut
        launcher.engines[1].end(-9)
        crash.set()
        await client.whole()
        launcher.answer = cut
        reply = await router.post(path, {"model": "small", "stream": False, "prompt": "x"})
        assert reply.status == 502


@in_loop
async def test_an_engine_that_ended_before_the_call_is_replaced() -> None:
    launcher = FakeLauncher(answer=echo)
    async with routed(launcher, FIXED) as router:
        body = {"model": "small"}
        assert (await router.post("/v1/completions", body)).status == 200
        server = launcher.engines[0].server
        assert server is not None
        server.close()  # its socket is gone, its end is not known yet
        client = router.call("POST", "/v1/completions", body)
        await asyncio.sleep(0.01)
        launcher.engines[0].end(-9)
        assert (await client.whole()).status == 200
        assert launcher.names == ["small", "small"]


@in_loop
async def test_an_engine_that_says_it_cannot_go_on_is_replaced() -> None:
    """Its model's file has shrunk: ``/health`` of it is a 500 too."""

    async def broken(call: dict[str, Any], writer: Writer) -> None:
        await say(writer, {"error": {"message": "the file was changed"}}, 500)

    launcher = FakeLauncher(answer=broken)
    async with routed(launcher, FIXED) as router:
        assert (await router.post("/v1/completions", {"model": "small"})).status == 500
        await until(lambda: launcher.engines[0].signals)
        launcher.answer = echo
        assert (await router.post("/v1/completions", {"model": "small"})).status == 200


@in_loop
async def test_keep_alive_of_ollama() -> None:
    launcher = FakeLauncher(answer=echo)
    async with routed(launcher, FIXED) as router:
        pool = router.service.pool
        body: dict[str, Any] = {"model": "small", "prompt": "x", "stream": False}
        await router.post("/api/generate", {**body, "keep_alive": "10m"})
        engine = pool.engine(FIXED[0])
        assert engine is not None
        assert engine.idle_s == 600.0
        ps = (await router.get("/api/ps")).json()["models"]
        assert [each["name"] for each in ps] == ["small"]
        assert not ps[0]["expires_at"].startswith("9999")
        await router.post("/api/generate", {**body, "keep_alive": -1})
        assert engine.timer is None
        reply = await router.post("/api/generate", {**body, "keep_alive": 0})
        assert "keep_alive" not in json.loads(reply.json()["body"])
        await until(lambda: pool.state(FIXED[0]) == "sleeping")
        reply = await router.post("/api/generate", {**body, "keep_alive": "soon"})
        assert reply.status == 400
        # without a text: it is loaded, or unloaded
        await router.post("/api/chat", {"model": "small"})
        assert pool.state(FIXED[0]) == "loaded"
        reply = await router.post("/api/chat", {"model": "small", "keep_alive": 0})
        assert reply.json()["done_reason"] == "unload"
        await until(lambda: pool.state(FIXED[0]) == "unloaded")
        assert len(launcher.engines[1].calls) == 1


@in_loop
async def test_models_are_loaded_only_when_asked_if_so_wanted() -> None:
    launcher = FakeLauncher(answer=echo)
    async with routed(launcher, FIXED, own=RouterSettings(autoload=False)) as router:
        body = {"model": "small"}
        reply = await router.post("/v1/completions", body)
        assert reply.status == 400
        assert reply.json()["error"]["code"] == "model_not_loaded"
        assert (await router.post("/models/load", body)).json() == {"success": True}
        await until(lambda: router.service.pool.state(FIXED[0]) == "loaded")
        assert (await router.post("/v1/completions", body)).status == 200
        await router.post("/models/unload", body)
        await until(lambda: router.service.pool.state(FIXED[0]) == "unloaded")


@in_loop
async def test_speech_engines_keep_no_responses_and_streams() -> None:
    async def refuse(call: dict[str, Any], writer: Writer) -> None:
        await say(writer, {"error": {"message": "a speech model"}}, 400)

    launcher = FakeLauncher(answer=refuse, facts={"transcribes": True})
    async with routed(launcher, FIXED) as router:
        await router.post("/models/load", {"model": "small"})
        await until(lambda: router.service.pool.state(FIXED[0]) == "loaded")
        assert (await router.get("/v1/responses/resp_1")).status == 404
        assert (await router.get("/v1/stream?conv_id=talk")).status == 404
        assert (await router.call("DELETE", "/v1/stream?conv_id=talk").whole()).status == 204
        found = await router.post("/v1/streams/lookup", {"conversation_ids": ["talk"]})
        assert (found.status, found.json()) == (200, [])
    assert launcher.engines[0].calls == []


@in_loop
async def test_stored_responses_are_looked_up_in_all_engines() -> None:
    async def one_has_it(call: dict[str, Any], writer: Writer) -> None:
        known = call["headers"]["authorization"].endswith(launcher.engines[0].order.keys[0].lower())
        if call["method"] == "GET" and not known:
            await say(writer, {"error": {"message": "unknown"}}, 404)
        else:
            await say(writer, {"id": "resp_1"})

    launcher = FakeLauncher(answer=one_has_it)
    async with routed(launcher, FIXED) as router:
        assert (await router.get("/v1/responses/resp_1")).status == 404
        for name in ("small", "large-7b"):
            await router.post("/v1/responses", {"model": name})
        assert (await router.get("/v1/responses/resp_1")).json() == {"id": "resp_1"}
        await router.get("/v1/responses/resp%201?x=%20")  # as it was written
        assert launcher.engines[0].calls[-1]["target"] == "/v1/responses/resp%201?x=%20"


@in_loop
async def test_long_heads_and_large_bodies_pass() -> None:
    async def large(call: dict[str, Any], writer: Writer) -> None:
        assert len(call["body"]) > 1 << 20
        await say(writer, b"[" + b"1," * (1 << 20) + b"1]")

    launcher = FakeLauncher(answer=large)
    async with routed(launcher, FIXED) as router:
        body = {"model": "small", "prompt": "x" * (1 << 20)}
        reply = await router.post("/v1/completions", body)
        assert len(reply.body) == (2 << 20) + 3
        assert HEAD_BYTES > 1 << 16
