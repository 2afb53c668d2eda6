"""Streams: many at once, whole characters, readers that are slow, and readers that leave."""

from __future__ import annotations

import asyncio
import json
import threading
import time
from collections.abc import AsyncIterator, Awaitable, Callable
from typing import Any

import pytest
from starlette.applications import Starlette
from starlette.testclient import TestClient

import treadle
from tests.server.conftest import PATIENCE_S, events, held, running, talking, until
from tests.server.test_openai import post
from treadle.server.app import build_app
from treadle.server.http import http_io
from treadle.server.requests import http_responses
from treadle.server.requests.generation_request import LOOK_AHEAD
from treadle.server.requests.request_stream import Wakeup
from treadle.server.requests.service import Service

Message = dict[str, Any]
ENDLESS = {"max_tokens": 400, "ignore_eos": True, "seed": 1}


@pytest.mark.slow
def test_32_at_once_are_the_same_as_alone(client: TestClient, service: Service) -> None:
    """Streams and whole answers, more than have room at a time."""
    bodies: list[Message] = [
        {"prompt": f"def text_{i}(", "max_tokens": 12, "seed": i, "stream": bool(i % 2)}
        for i in range(32)
    ]
    alone = [
        post(client, "/v1/completions", **{**body, "stream": False})["choices"][0]["text"]
        for body in bodies
    ]
    steps = service.stats.n_steps
    fed = service.stats.n_fed
    found: dict[int, str] = {}
    ready = threading.Barrier(len(bodies))

    def ask(i: int) -> None:
        ready.wait()
        answer = client.post("/v1/completions", json=bodies[i])
        if bodies[i]["stream"]:
            chunks = events(answer.text)[:-1]
            found[i] = "".join(chunk["choices"][0]["text"] for chunk in chunks)
        else:
            found[i] = answer.json()["choices"][0]["text"]

    threads = [threading.Thread(target=ask, args=(i,)) for i in range(len(bodies))]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(120)
    assert [found[i] for i in range(len(bodies))] == alone
    assert service.stats.n_fed - fed > service.stats.n_steps - steps  # they shared batches


@pytest.mark.slow
@pytest.mark.usefixtures("each_piece")
@pytest.mark.parametrize("path", ["/v1/completions", "/completion", "/v1/chat/completions"])
def test_characters_are_never_torn(path: str, client: TestClient) -> None:
    """Of several bytes, each a token of its own in this vocabulary."""
    said = "naïve 猫と犬 🎉 ok"
    body = {
        "prompt": "x",
        "messages": [{"role": "user", "content": "x"}],
        "stream": True,
        "grammar": f'root ::= "{said}"',
        "stop": ["ok!", "🎊"],
    }
    with client.stream("POST", path, json=body) as answer:
        raw = list(answer.iter_raw())
    for part in raw:
        part.decode("utf-8")  # every chunk is whole by itself
    texts = []
    for event in events(b"".join(raw).decode()):
        if event != "[DONE]":
            choice = event["choices"][0] if "choices" in event else event
            delta = choice.get("delta", choice)
            texts.append(delta.get("content") or delta.get("text") or "")
    assert "".join(texts) == said
    assert not any("\ufffd" in output for output in texts)
    assert len([output for output in texts if output]) > 3


# -- a client as ASGI sees it ------------------------------------------------------------------


class Client:
    """One call: what was sent to it, and when it leaves. ``slow`` is awaited at every part."""

    def __init__(
        self, app: Starlette, path: str, body: Message, slow: Callable[[], Awaitable[None]]
    ) -> None:
        self._app = app
        self._slow = slow
        self.parts: list[bytes] = []
        self.status = 0
        self.left = asyncio.Event()
        self._body: bytes | None = http_io.encode(body)
        self._scope = {
            "type": "http",
            "method": "POST",
            "path": path,
            "raw_path": path.encode(),
            "query_string": b"",
            "root_path": "",
            "scheme": "http",
            "http_version": "1.1",
            "headers": [(b"host", b"localhost")],
            "server": ("localhost", 80),
        }

    async def _receive(self) -> Message:
        if self._body is not None:
            body = self._body
            self._body = None
            return {"type": "http.request", "body": body, "more_body": False}
        await self.left.wait()
        return {"type": "http.disconnect"}

    async def _send(self, message: Any) -> None:
        if message["type"] == "http.response.start":
            self.status = message["status"]
        else:
            self.parts.append(message["body"])
            await self._slow()

    async def call(self) -> None:
        await self._app(self._scope, self._receive, self._send)


async def quick() -> None:
    await asyncio.sleep(0)


async def soon(true: Callable[[], object]) -> None:
    """Wait for what another thread does, and let this one's loop go on."""
    end = time.monotonic() + PATIENCE_S
    while not true():
        assert time.monotonic() < end
        await asyncio.sleep(0.001)


@pytest.mark.parametrize("stream", [True, False])
@pytest.mark.parametrize("path", ["/v1/completions", "/v1/chat/completions", "/completion"])
def test_who_leaves_is_computed_no_further(path: str, stream: bool, service: Service) -> None:
    messages = [{"role": "user", "content": "x"}]
    body = {"prompt": "x", "messages": messages, "stream": stream, "n": 3, **ENDLESS}
    cancelled = service.stats.n_cancelled
    if path == "/completion":
        body["n_cmpl"] = 3

    async def leave() -> list[int]:
        client = Client(build_app(service), path, body, quick)
        task = asyncio.ensure_future(client.call())
        await soon(lambda: any(t.answer.ids for t in service.engine.outputs.values()))
        answers = [output.answer for output in service.engine.outputs.values()]
        client.left.set()
        await task
        return [len(answer.ids) for answer in answers]

    with held(service):
        written = asyncio.run(leave())
    assert len(written) == 3
    assert max(written) < 400
    assert not service.engine.outputs
    assert service.stats.n_cancelled == cancelled + 3
    until(lambda: service.engine.scheduler.idle)
    steps = service.stats.n_steps
    time.sleep(0.05)
    assert service.stats.n_steps == steps  # the engine sleeps


@pytest.mark.slow
def test_who_leaves_while_waiting_is_forgotten(
    model: treadle.Model, capsys: pytest.CaptureFixture[str]
) -> None:
    """One text has all the room; the one behind it leaves before it begins."""
    with running(model, log=True) as service:

        async def leave() -> None:
            app = build_app(service)
            first = Client(app, "/v1/completions", {"prompt": "x", **ENDLESS}, quick)
            tasks = [asyncio.ensure_future(first.call())]
            with held(service):
                await soon(lambda: service.engine.outputs)
                second = Client(app, "/v1/completions", {"prompt": [5] * 500, **ENDLESS}, quick)
                tasks.append(asyncio.ensure_future(second.call()))
                await soon(lambda: len(service.engine.outputs) == 2)
                second.left.set()
                await tasks[1]
                assert len(service.engine.outputs) == 1
            await tasks[0]
            assert first.status == 200

        asyncio.run(leave())
        assert service.stats.n_cancelled == 1
    lines = [json.loads(line) for line in capsys.readouterr().err.splitlines()]
    assert [line["finish"] for line in lines] == [["abort"], ["length"]]


@pytest.mark.slow
def test_a_slow_reader_pauses_its_own_text_alone(service: Service) -> None:
    gate: dict[str, asyncio.Event] = {}

    async def stuck() -> None:
        await gate["open"].wait()

    async def read() -> None:
        gate["open"] = asyncio.Event()
        app = build_app(service)
        body = {"prompt": "x", "stream": True, **ENDLESS}
        slow = Client(app, "/v1/completions", body, stuck)
        task = asyncio.ensure_future(slow.call())
        await soon(lambda: any(t.request.paused for t in service.engine.outputs.values()))
        (output,) = service.engine.outputs.values()
        n = len(output.answer.ids)
        assert LOOK_AHEAD <= len(output.answer.pieces) <= LOOK_AHEAD + 2
        other = Client(app, "/v1/completions", {**body, "max_tokens": 100}, quick)
        await other.call()
        assert events(b"".join(other.parts).decode())[-1] == "[DONE]"
        assert len(output.answer.ids) == n < 400
        await soon(lambda: service.engine.scheduler.idle)  # the engine sleeps meanwhile
        gate["open"].set()
        await task
        assert output.answer.finish_reason == "length"
        assert len(output.answer.ids) == 400

    asyncio.run(read())


def test_a_text_that_fails_ends_its_stream_with_an_error(
    service: Service, monkeypatch: pytest.MonkeyPatch
) -> None:
    def fails(*_: object) -> int:
        raise ZeroDivisionError("a secret")

    build_request = service.model.build_request
    broken: list[Any] = []

    def breaking(*args: Any, **settings: Any) -> Any:
        request = build_request(*args, **settings)
        if not broken:
            broken.append(request)
            monkeypatch.setattr(request, "choose", fails)
        return request

    monkeypatch.setattr(service.model, "build_request", breaking)
    with talking(service, raise_server_exceptions=False) as client:
        body = {"prompt": "x", "max_tokens": 5, "stream": True}
        answer = client.post("/v1/completions", json=body)
        assert answer.status_code == 200
        (last,) = events(answer.text)
        assert last["error"]["type"] == "server_error"
        assert "secret" not in answer.text
        assert len(events(client.post("/v1/completions", json=body).text)) > 1


def test_a_stream_that_waits_shows_that_it_is_alive(
    service: Service, monkeypatch: pytest.MonkeyPatch
) -> None:
    """While the engine is busy elsewhere, a comment goes out each second."""
    monkeypatch.setattr(http_responses, "PING_S", 0.01)
    release = threading.Event()
    job = service.engine.submit(lambda: release.wait(PATIENCE_S))

    async def read() -> list[bytes]:
        body = {"prompt": "x", "max_tokens": 2, "stream": True}

        async def look() -> None:
            if client.parts.count(http_responses.PING) == 3:
                release.set()

        client = Client(build_app(service), "/v1/completions", body, look)
        await client.call()
        return client.parts

    parts = asyncio.run(read())
    assert parts[:3] == [http_responses.PING] * 3
    assert job.result(PATIENCE_S) is True
    assert events(b"".join(parts).decode())[-1] == "[DONE]"


def test_a_body_that_does_not_come(service: Service, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(http_io, "BODY_S", 0.02)

    async def call() -> Client:
        client = Client(build_app(service), "/v1/completions", {}, quick)
        client._body = None
        await client.call()
        return client

    assert asyncio.run(call()).status == 408


def test_a_body_that_never_ends(service: Service, monkeypatch: pytest.MonkeyPatch) -> None:
    """A byte now and then does not keep a call open."""
    monkeypatch.setattr(http_io, "WHOLE_BODY_S", 0.05)

    async def call() -> Client:
        client = Client(build_app(service), "/v1/completions", {}, quick)

        async def drip() -> Message:
            await asyncio.sleep(0.001)
            return {"type": "http.request", "body": b" ", "more_body": True}

        monkeypatch.setattr(client, "_receive", drip)
        await client.call()
        return client

    assert asyncio.run(call()).status == 408


def test_nothing_of_one_call_is_in_another(
    model: treadle.Model, capsys: pytest.CaptureFixture[str]
) -> None:
    """Not in answers, metrics, the state or the log."""
    secret = "xyzzy plugh swordfish"
    with running(model, metrics=True, log=True) as service, talking(service) as client:
        kept = post(client, "/v1/responses", input=secret, max_output_tokens=4, user=secret)
        post(client, "/v1/completions", prompt=secret, max_tokens=4, stop=[secret])
        client.post("/v1/completions", json={"prompt": [secret, None], "model": secret})
        told = [
            client.get(path).text
            for path in ("/metrics", "/slots", "/props", "/v1/models", "/api/ps", "/health")
        ]
        for path, body in (
            ("/v1/completions", {"prompt": "def f(", "max_tokens": 40, "echo": True}),
            ("/v1/responses", {"input": "hi", "max_output_tokens": 20}),
            ("/v1/responses", {"input": "hi", "previous_response_id": kept["id"] + "0"}),
        ):
            told.append(client.post(path, json=body).text)
    told.append(capsys.readouterr().err)
    assert all(told)
    for text in told:
        assert not any(word in text for word in secret.split())


def test_embeddings_of_one_who_left_are_not_run(service: Service) -> None:
    release = threading.Event()
    busy = service.engine.submit(lambda: release.wait(PATIENCE_S))
    before = service.stats.n_embedded

    async def call() -> None:
        client = Client(build_app(service), "/v1/embeddings", {"input": ["x"] * 3}, quick)
        task = asyncio.ensure_future(client.call())
        await soon(lambda: service.engine._jobs)
        client.left.set()
        await task

    asyncio.run(call())
    release.set()
    assert busy.result(PATIENCE_S)
    until(lambda: not service.engine._jobs)
    assert service.stats.n_embedded == before


def test_no_more_than_the_stated_number_of_texts(model: treadle.Model) -> None:
    with running(model, max_requests=4) as service, talking(service) as client:
        error = client.post("/v1/completions", json={"prompt": "x", "n": 5})
        assert error.status_code == 400
        release = threading.Event()
        service.engine.submit(lambda: release.wait(PATIENCE_S))
        answers: list[int] = []
        body = {"prompt": "x", "n": 3, "max_tokens": 2}
        first = threading.Thread(
            target=lambda: answers.append(client.post("/v1/completions", json=body).status_code)
        )
        first.start()
        until(lambda: len(service.engine.outputs) == 3)
        full = client.post("/v1/completions", json={"prompt": "x", "n": 2})
        assert full.status_code == 503
        assert int(full.headers["retry-after"]) > 0
        assert full.json()["error"]["code"] == "overloaded"
        release.set()
        first.join(PATIENCE_S)
        assert answers == [200]


def test_a_bell_keeps_a_ring_that_nobody_waits_for() -> None:
    async def listen() -> AsyncIterator[bool]:
        bell = Wakeup(asyncio.get_running_loop())
        bell.notify()
        bell.notify()
        yield await bell.wait(60)
        yield await bell.wait(0.001)
        asyncio.get_running_loop().call_soon(bell.notify)
        yield await bell.wait(60)

    async def collect() -> list[bool]:
        return [rung async for rung in listen()]

    assert asyncio.run(collect()) == [True, False, True]


MESSAGES = {"messages": [{"role": "user", "content": "x"}]}
CUT: dict[str, tuple[dict[str, Any], str, str]] = {  # a body, its limit, and what a text's keys are
    "/v1/completions": ({"prompt": "x"}, "max_tokens", "text"),
    "/completion": ({"prompt": "x"}, "n_predict", "content"),
    "/v1/chat/completions": (MESSAGES, "max_tokens", "content"),
    "/v1/messages": (MESSAGES, "max_tokens", "text"),
    "/v1/responses": ({"input": "x"}, "max_output_tokens", "text"),
    "/api/chat": (MESSAGES, "num_predict", "content"),
    "/api/generate": ({"prompt": "x"}, "num_predict", "response"),
}


def texts_of(value: Any, key: str) -> list[str]:
    """The texts that lie anywhere in a value under ``key``."""
    if isinstance(value, list):
        return [text for each in value for text in texts_of(each, key)]
    if not isinstance(value, dict):
        return []
    own = [value[key]] if isinstance(value.get(key), str) else []
    return own + [text for each in value.values() for text in texts_of(each, key)]


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize("path", CUT)
def test_a_limit_within_a_character(path: str, stream: bool, client: TestClient) -> None:
    """The text ends at its last whole character."""
    body, limit, key = CUT[path]
    for n, said in ((2, "é"), (3, "é"), (5, "é"), (6, "é🎉")):
        own: dict[str, Any] = {limit: n, "grammar": 'root ::= "é🎉é🎉"'}
        own = {"options": own} if path.startswith("/api") else own
        answer = client.post(path, json={**body, **own, "stream": stream})
        assert answer.status_code == 200, answer.text
        if not stream:
            assert "".join(texts_of(answer.json(), key)) == said
            continue
        lines = [line.removeprefix("data: ") for line in answer.text.splitlines()]
        found = [json.loads(line) for line in lines if line.startswith("{")]
        if path == "/v1/responses":
            found = [each for each in found if each["type"].endswith("text.delta")]
            key = "delta"
        assert "".join(text for each in found for text in texts_of(each, key)) == said
