"""Requests of an HTTP client in process: answers are the server's, and nothing is left behind."""

from __future__ import annotations

import asyncio
import gc
import json
import re
import subprocess
import sys
import threading
from collections.abc import Iterator
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any

import httpx2
import pytest
from starlette.testclient import TestClient

import treadle
from tests.chat.tools.families import HERMES_TEMPLATE
from tests.server.conftest import running, talking
from treadle.openai import client
from treadle.openai.in_process import LOOK_AHEAD, InProcessServer
from treadle.openai.transport import transport_types
from treadle.server.requests import generation_request

TYPES = transport_types(httpx2)
HI = [{"role": "user", "content": "hi"}]
WEATHER = {
    "type": "function",
    "function": {
        "name": "weather",
        "parameters": {"type": "object", "properties": {"place": {"enum": ["Oslo", "Rome"]}}},
    },
}
COLOUR = {
    "type": "json_schema",
    "json_schema": {"name": "colour", "schema": {"enum": ["red", "green"]}},
}
CHAT = {"model": "any", "messages": HI, "temperature": 0, "max_tokens": 6, "cache_prompt": False}
TEXT = {"model": "any", "prompt": "import ", "temperature": 0, "max_tokens": 6}
TEXT["cache_prompt"] = False
REPLY = {"input": "hi", "temperature": 0, "max_output_tokens": 6, "cache_prompt": False}
REQUESTS: dict[str, tuple[str, str, Any]] = {
    "chat": ("POST", "/v1/chat/completions", CHAT),
    "several": ("POST", "/v1/chat/completions", {**CHAT, "n": 2, "logprobs": True, "stop": "\n"}),
    "schema": ("POST", "/v1/chat/completions", {**CHAT, "response_format": COLOUR}),
    "tools": (
        "POST",
        "/v1/chat/completions",
        {**CHAT, "max_tokens": 60, "tools": [WEATHER], "tool_choice": "required"},
    ),
    "stream": (
        "POST",
        "/v1/chat/completions",
        {**CHAT, "stream": True, "stream_options": {"include_usage": True}},
    ),
    "completion": ("POST", "/v1/completions", {**TEXT, "echo": True, "logprobs": 2}),
    "prompts": ("POST", "/v1/completions", {**TEXT, "prompt": ["a", "b"], "stream": True}),
    "response": ("POST", "/v1/responses", REPLY),
    "events": ("POST", "/v1/responses", {**REPLY, "stream": True}),
    "count": ("POST", "/v1/responses/input_tokens", REPLY),
    "vectors": ("POST", "/v1/embeddings", {"input": ["a", "bc"], "encoding_format": "base64"}),
    "models": ("GET", "/v1/models", None),
    "one model": ("GET", "/v1/models/any/name", None),
    "wrong field": ("POST", "/v1/chat/completions", {**CHAT, "temperature": "hot"}),
    "too long": ("POST", "/v1/completions", {**TEXT, "prompt": "word " * 600}),
    "not JSON": ("POST", "/v1/completions", b"{"),
    "no response": ("GET", "/v1/responses/none", None),
    "wrong method": ("DELETE", "/v1/completions", None),
    "wrong path": ("GET", "/v1/none", None),
}
# Of each answer, and times.
OWN = re.compile(
    r'"(?:\w+_)?id":"[^"]*"|"(?:created|created_at|completed_at)":\d+|"modified_at":"[^"]*"|'
    r'"timings":\{[^}]*\{[^}]*\}\}|'
    r'"timings":\{[^}]*\}|(?:chatcmpl|cmpl|resp|msg|call)[-_]\w+|unknown path|'
    r"not an endpoint of treadle.openai"
)


@pytest.fixture(scope="module")
def model(one_kernel_cache: Path) -> Iterator[treadle.Model]:
    with treadle.load(
        threads=2, context=512, n_sequences=4, deterministic=True, chat_template=HERMES_TEMPLATE
    ) as model:
        yield model


@pytest.fixture(scope="module")
def served(model: treadle.Model) -> Iterator[TestClient]:
    with running(model) as service, talking(service) as client:
        yield client


@pytest.fixture
def local(model: treadle.Model) -> Iterator[httpx2.Client]:
    transport = TYPES.plain(model, owned=False)
    with httpx2.Client(transport=transport, base_url="http://x", timeout=None) as local:
        yield local
        assert settled(transport._server) == (0, 0)


def settled(server: InProcessServer) -> tuple[int, int]:
    """How many streams and outputs are left when what runs on the event loop is over."""

    async def over() -> tuple[int, int]:
        await asyncio.gather(*server.exchanges.values(), return_exceptions=True)
        return len(server.service.streams), len(server.service.engine.outputs)

    return server.submit(over()).result(60)


def plain(text: str) -> list[str]:
    """An answer's lines, but for names and times; events of a stream that only continue a text are
    joined, as how they are cut is a matter of time.
    """
    lines = [OWN.sub("*", line) for line in text.splitlines() if line and line != ": ping"]
    return [line for line in lines if not line.startswith("data: {") or '"delta"' not in line]


def written(text: str) -> str:
    """The text that a stream's events have together."""
    events = [json.loads(line[6:]) for line in text.splitlines() if line.startswith("data: {")]
    out = ""
    for event in events:
        if isinstance(event.get("delta"), str):
            out += event["delta"]
        for choice in event.get("choices", ()):
            out += f"{choice['index']}" if len(event["choices"]) > 1 else ""
            out += choice.get("text") or (choice.get("delta") or {}).get("content") or ""
    return out


@pytest.mark.every_case
@pytest.mark.parametrize("name", REQUESTS)
def test_answers_are_the_servers(name: str, local: httpx2.Client, served: TestClient) -> None:
    method, path, body = REQUESTS[name]
    given: dict[str, Any] = {"content": body} if isinstance(body, bytes) else {"json": body}
    if body is None:
        given = {}
    ours = local.request(method, path, **given)
    theirs = served.request(method, path, **given)
    assert ours.status_code == theirs.status_code
    assert ours.headers["content-type"] == theirs.headers["content-type"]
    if name in ("stream", "prompts", "events"):
        assert ours.text.count("data: ") > 3
        assert sorted(written(ours.text)) == sorted(written(theirs.text)) != []
        kinds = {
            name: set(re.findall(r"event: (\S+)", each.text))
            for name, each in (("ours", ours), ("theirs", theirs))
        }
        assert kinds["ours"] == kinds["theirs"]
    else:
        assert plain(ours.text) == plain(theirs.text) != []


def test_responses_are_stored(local: httpx2.Client) -> None:
    made = local.post("/v1/responses", json=REPLY).json()
    kept = local.get(f"/v1/responses/{made['id']}").json()
    assert kept["output"] == made["output"]
    items = local.get(f"/v1/responses/{made['id']}/input_items", params={"order": "asc"}).json()
    assert items["data"][0]["content"][0]["text"] == "hi"
    assert local.delete(f"/v1/responses/{made['id']}").status_code == 200
    assert local.get(f"/v1/responses/{made['id']}").status_code == 404


def test_an_unread_stream_waits_and_ends(local: httpx2.Client) -> None:
    """Its request is paused while another text is written, and cancelled when it is closed."""
    long = {**TEXT, "max_tokens": 400, "ignore_eos": True}
    with local.stream("POST", "/v1/completions", json={**long, "stream": True}) as response:
        chunks = response.iter_raw()  # kept: the end of an iterator ends its request
        next(chunks)
        server: InProcessServer = local._transport._server  # type: ignore[attr-defined]
        (output,) = server.service.engine.outputs.values()
        assert local.post("/v1/completions", json=long).status_code == 200
        most = (LOOK_AHEAD + 2) * generation_request.LOOK_AHEAD
        assert 0 < len(output.answer.ids) <= most + 8 < 400
    assert settled(server) == (0, 0)
    assert not output.answer.done


def test_time_limit(local: httpx2.Client) -> None:
    with pytest.raises(httpx2.ReadTimeout, match="no answer in time"):
        local.post("/v1/completions", json={**TEXT, "max_tokens": 300}, timeout=1e-4)


def test_an_error_of_ours_is_raised(local: httpx2.Client, monkeypatch: pytest.MonkeyPatch) -> None:
    def broken(*_: Any) -> None:
        raise ZeroDivisionError("a fault")

    server: InProcessServer = local._transport._server  # type: ignore[attr-defined]
    monkeypatch.setattr(server.service, "check_ready", broken)
    with pytest.raises(ZeroDivisionError, match="a fault"):
        local.post("/v1/completions", json=TEXT)


def test_a_forked_child_is_told(local: httpx2.Client, monkeypatch: pytest.MonkeyPatch) -> None:
    server: InProcessServer = local._transport._server  # type: ignore[attr-defined]
    with monkeypatch.context() as patch:
        patch.setattr(server, "_pid", -1)
        with pytest.raises(treadle.ForkedError, match="make one in the child"):
            local.get("/v1/models")


def test_clients_share_a_service(model: treadle.Model) -> None:
    first = TYPES.plain(model, owned=False)
    second = TYPES.asynchronous(model, owned=False)
    server = first._server
    assert second._server is server
    first.close()
    first.close()
    assert server.n_clients == 1
    request = httpx2.Request("GET", "http://x/v1/models")
    assert asyncio.run(second.handle_async_request(request)).status_code == 200
    asyncio.run(second.aclose())
    assert not server._thread.is_alive()
    with pytest.raises(treadle.TreadleError, match="the client is closed"):
        asyncio.run(second.handle_async_request(request))
    assert model.generate("import ", max_tokens=1).finish()  # the model is its owner's


def test_closed_while_it_is_read(model: treadle.Model) -> None:
    local = httpx2.Client(transport=TYPES.plain(model, owned=False), base_url="http://x")
    endless = {**TEXT, "max_tokens": 450, "ignore_eos": True}
    begun = threading.Event()
    errors: list[Exception] = []

    def read() -> None:
        try:
            with local.stream("POST", "/v1/completions", json={**endless, "stream": True}) as got:
                for _ in got.iter_raw():
                    begun.set()
        except treadle.TreadleError as error:
            errors.append(error)

    reader = threading.Thread(target=read)
    reader.start()
    assert begun.wait(60)
    local._transport.close()
    reader.join(60)
    assert not reader.is_alive()
    assert [str(error) for error in errors] in (
        ["the client was closed during this request"],
        ["the client is closed"],
    )


def test_no_request_begins_while_the_client_closes(
    model: treadle.Model, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It would wait for an event loop that has ended."""
    local = httpx2.Client(transport=TYPES.plain(model, owned=False), base_url="http://x")
    server: InProcessServer = local._transport._server  # type: ignore[attr-defined]
    assert local.get("/v1/models").status_code == 200
    close = server.service.close
    refused = []

    def closing() -> None:
        with pytest.raises(treadle.TreadleError, match="the client is closed"):
            local.get("/v1/models")
        refused.append(True)
        close()

    monkeypatch.setattr(server.service, "close", closing)
    local._transport.close()
    assert refused


def test_a_forgotten_client_ends(model: treadle.Model) -> None:
    transport = TYPES.plain(model, owned=False)
    thread = transport._server._thread
    del transport
    gc.collect()
    for each in threading.enumerate():
        if each.name == "treadle-openai-end":
            each.join(60)
    assert not thread.is_alive()


def test_a_model_of_the_clients_own_is_closed(one_kernel_cache: Path) -> None:
    client = httpx2.Client(transport=TYPES.plain(treadle.load(context=64), owned=True))
    model = client._transport._server.service.model  # type: ignore[attr-defined]
    assert client.get("http://x/v1/models").json()["data"][0]["id"] == "demo"
    client.close()
    with pytest.raises(treadle.TreadleError, match="closed"):
        model.logits([1])


def test_many_coroutines(model: treadle.Model) -> None:
    """They share batches; one that is cancelled leaves the others alone."""

    async def main() -> list[Any]:
        transport = TYPES.asynchronous(model, owned=False)
        async with httpx2.AsyncClient(transport=transport, base_url="http://x") as client:
            prompts = ["a", "b", "c"]
            posts = [
                client.post("/v1/completions", json={**TEXT, "prompt": prompt})
                for prompt in prompts
            ]
            endless = {**TEXT, "max_tokens": 450, "ignore_eos": True, "stream": True}
            async with client.stream("POST", "/v1/completions", json=endless) as response:
                parts = response.aiter_raw()
                await anext(parts)
                made = await asyncio.gather(*posts)
            cancelled = asyncio.ensure_future(client.post("/v1/completions", json=TEXT))
            await asyncio.sleep(0)
            cancelled.cancel()
            with pytest.raises(asyncio.CancelledError):
                await cancelled
            with pytest.raises(httpx2.ReadTimeout):
                await client.post("/v1/completions", json=TEXT, timeout=1e-4)
            assert await asyncio.to_thread(settled, transport._server) == (0, 0)
            return [each.json()["choices"][0]["text"] for each in made]

    made = [model.generate(p, max_tokens=6, temperature=0).finish() for p in ("a", "b", "c")]
    assert asyncio.run(main()) == made


def test_what_is_no_model(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("treadle.openai.client._http_package", lambda: httpx2)
    with pytest.raises(TypeError, match=r"model is int: expected a treadle\.Model or a path"):
        client.http_client(3)  # type: ignore[arg-type]
    with pytest.raises(treadle.FileError, match=r"none\.gguf"):
        client.http_client("none.gguf")


def test_clients_without_the_package(
    one_kernel_cache: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A class like the package's gets our HTTP client; without the package there is advice."""

    class FakePackage(ModuleType):
        class DefaultHttpxClient(httpx2.Client):
            pass

        OpenAI = AsyncOpenAI = SimpleNamespace

    monkeypatch.setitem(sys.modules, "openai", FakePackage("openai"))
    client._http_package.cache_clear()
    made: Any = client.OpenAI(max_retries=0)
    assert made.timeout is None
    assert made.max_retries == 0
    assert made.http_client.post("/v1/embeddings", json={"input": "a"}).status_code == 200
    made.http_client.close()
    with_own: Any = client.AsyncOpenAI(timeout=3.0, api_key="mine")
    assert (with_own.timeout, with_own.api_key) == (3.0, "mine")
    asyncio.run(with_own.http_client.aclose())

    monkeypatch.setitem(sys.modules, "openai", None)
    client._http_package.cache_clear()
    with pytest.raises(ModuleNotFoundError, match=r'pip install "treadle\[openai\]"'):
        client.OpenAI()
    client._http_package.cache_clear()


def test_nothing_of_the_server_is_needed() -> None:
    """Neither web framework nor the clients' package is imported before it is used."""
    code = (
        "import sys, treadle.openai; treadle.openai.OpenAI\n"
        "found = {name.partition('.')[0] for name in sys.modules}\n"
        "print(sorted(found & {'starlette', 'uvicorn', 'h11', 'openai', 'httpx2', 'pydantic'}))"
    )
    ran = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert ran.stdout == "[]\n"
