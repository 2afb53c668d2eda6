"""Calls that ask for more than others should wait for, and how little of the machine they get."""

from __future__ import annotations

import asyncio
import gc
import json
import threading
from contextlib import suppress
from typing import Any

import pytest
from starlette.testclient import TestClient

import treadle
from tests.server.test_openai import post
from treadle.server.http import http_io, json_pieces
from treadle.server.http.api_errors import ApiError
from treadle.server.http.http_io import Bodies, encode, encode_large, is_large, parse_any
from treadle.server.protocols.openai import completions
from treadle.server.requests import http_responses
from treadle.server.requests.generation_request import read_generation
from treadle.server.requests.service import Service

HI = [{"role": "user", "content": "hi"}]
COMPLETIONS = "/v1/completions"


def test_large_bodies_share_a_bound(monkeypatch: pytest.MonkeyPatch) -> None:
    """Else many slow writers would fill the memory. A small one is never kept out."""
    monkeypatch.setattr(http_io, "LARGE", 10)
    monkeypatch.setattr(http_io, "MAX_BODIES", 100)
    bodies = Bodies()
    with bodies.weighing() as first:
        for n in (5, 40, 60):
            first(n)
        assert bodies.n_bytes == 60
        with bodies.weighing() as second:
            second(40)
            with pytest.raises(ApiError) as caught:
                second(41)
            assert caught.value.status == 503
            assert caught.value.headers["Retry-After"]
            with bodies.weighing() as small:
                small(10)
        assert bodies.n_bytes == 60
    assert not bodies.n_bytes


def test_a_body_that_finds_no_room(client: TestClient, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(http_io, "LARGE", 100)
    monkeypatch.setattr(http_io, "MAX_BODIES", 200)
    for length, status in ((300, 503), (120, 200), (50, 200)):
        body = json.dumps({"prompt": "x", "max_tokens": 1}).encode().ljust(length)
        assert client.post(COMPLETIONS, content=body).status_code == status


def test_large_calls_leave_threads_to_others(service: Service) -> None:
    """Four of them took all threads that prepare calls. A client that leaves gives none back before
    the work that it left is done.
    """
    n_began, go = [0], threading.Event()

    def work() -> None:
        n_began[0] += 1
        assert go.wait(60)

    async def large() -> None:
        is_large.set(True)
        await service.prepare(work)

    async def short() -> int:
        return await asyncio.wait_for(service.prepare(lambda: 5), 30)

    async def calls() -> None:
        tasks = [asyncio.create_task(large()) for _ in range(6)]
        await asyncio.sleep(0)
        assert await short() == 5
        for task in tasks[:2]:
            task.cancel()
        await asyncio.wait(tasks[:2])
        assert await short() == 5
        assert n_began == [2]
        go.set()
        await asyncio.gather(*tasks[2:])
        assert n_began == [6]

    asyncio.run(calls())


def test_which_calls_are_large(service: Service, client: TestClient) -> None:
    found: list[bool] = []
    usual = service.prepare

    async def prepare(work: Any, *args: Any) -> Any:
        found.append(is_large.get())
        return await usual(work, *args)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(service, "prepare", prepare)
        for length in (100, http_io.LARGE + 1, 100):
            for path in ("/embedding", "/tokenize", "/completion"):
                body = json.dumps({"content": "x", "prompt": "x", "n_predict": 1})
                answer = client.post(path, content=body.encode().ljust(length))
                assert answer.status_code == 200
    assert found == [False] * 3 + [True] * 3 + [False] * 3


@pytest.mark.parametrize(
    ("path", "body", "param"),
    [
        (COMPLETIONS, {"prompt": "x", "samplers": ["top_k"] * 65}, "samplers"),
        (COMPLETIONS, {"prompt": "x", "samplers": "k" * 65}, "samplers"),
        (
            COMPLETIONS,
            {"prompt": "x", "dry_sequence_breakers": ["a"] * 65},
            "dry_sequence_breakers",
        ),
        ("/completion", {"prompt": "x", "response_fields": ["a"] * 257}, "response_fields"),
    ],
)
def test_names_are_bounded(path: str, body: dict[str, Any], param: str, client: TestClient) -> None:
    """They were looked at for each token, or for each of the vocabulary's: for minutes."""
    error = post(client, path, 400, max_tokens=1, **body)["error"]
    assert error["param"] == param
    assert "at most" in error["message"]


def test_texts_that_are_no_prompt_are_not_tokenized_either(
    client: TestClient, model: treadle.Model
) -> None:
    long = "x " * (512 * model.n_ctx)
    with pytest.raises(ApiError, match="at least"):
        read_generation({"logit_bias": [[long, 1]]}, model, model.sampling)
    tool = {"type": "function", "function": {"name": "f", "description": long}}
    error = post(client, "/v1/chat/completions", 400, messages=HI, tools=[tool])["error"]
    assert "at least" in error["message"]


def test_prompts_that_are_told_with_log_probabilities(
    client: TestClient, monkeypatch: pytest.MonkeyPatch
) -> None:
    body: dict[str, Any] = {"prompt": "def f(x)", "max_tokens": 0, "echo": True, "n": 2}
    monkeypatch.setattr(completions, "MOST_ECHOED", 40)
    assert post(client, COMPLETIONS, logprobs=1, **body)["choices"][1]["logprobs"]["tokens"]
    error = post(client, COMPLETIONS, 400, logprobs=20, **body)["error"]
    assert error["param"] == "logprobs"


@pytest.mark.parametrize("path", [COMPLETIONS, "/completion", "/v1/chat/completions"])
def test_an_answer_of_many_numbers_is_made_beside_the_others(
    path: str, client: TestClient, monkeypatch: pytest.MonkeyPatch
) -> None:
    body: dict[str, Any] = {"max_tokens": 4, "temperature": 0, "n": 2, "n_probs": 3}
    body |= {"messages": HI} if "chat" in path else {"prompt": "def f("}
    body |= {"logprobs": True, "top_logprobs": 3} if "chat" in path else {"logprobs": 3}
    made: list[int] = []

    def noted(value: Any, depth: int = 5) -> bytes:
        made.append(depth)
        return encode_large(value, depth)

    kept = ("index", "text", "content", "message", "logprobs", "completion_probabilities")
    answers = []
    for many in (1 << 30, 1):
        monkeypatch.setattr(http_responses, "MANY", many)
        monkeypatch.setattr(http_responses, "encode_large", noted)
        answer = post(client, path, **body)
        choices = answer["choices"] if isinstance(answer, dict) else answer
        answers.append([{name: c.get(name) for name in kept} for c in choices])
    assert answers[0] == answers[1]
    assert made


@pytest.mark.parametrize(
    "value", [{}, [], "ä", {"a": [1, {"b": [[[[[{"c": None}]]]]]}], "ü": {"d": 1.5}}, [{"x": {}}]]
)
def test_json_in_parts_is_the_same(value: Any) -> None:
    assert encode_large(value) == encode(value)


@pytest.mark.parametrize("path", ["/v1/embeddings", "/embedding", "/api/embed"])
def test_vectors_have_their_time_too(path: str, client: TestClient) -> None:
    """As texts have: it was ignored."""
    body = {"input": ["x"] * 8}
    for seconds, status in (("1e-9", 504), ("no", 400), ("60", 200)):
        headers = {"X-Request-Timeout": seconds}
        assert client.post(path, json=body, headers=headers).status_code == status


@pytest.mark.parametrize("body", [b"[]", b"["])
def test_json_is_read_without_a_search_for_garbage(
    body: bytes, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It would take three quarters of the time, in which no other thread runs."""
    read = json.loads
    searched = []

    def loads(*args: Any, **given: Any) -> Any:
        searched.append(gc.isenabled())
        return read(*args, **given)

    monkeypatch.setattr(json, "loads", loads)
    with suppress(ApiError):
        parse_any(body)
    assert (searched, gc.isenabled()) == ([False], True)


@pytest.mark.parametrize(
    "text",
    [
        '{"a": [1, -2.5e3, "x\\u00e9\\n", null, true], "b": {"c": [[], {}]}, "a": 2}',
        ' [[[["deep"]]], 123456789012345678901] ',
        "[1, 2",
        '{"a" 1}',
        "[1,]",
        "",
        "[NaN]",
        '["\x01"]',
        "[1] 2",
        '{"a": 1,}',
    ],
)
def test_many_values_are_read_alike(text: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """By code that lets other threads run, with the same result and errors."""

    def read() -> Any:
        try:
            return parse_any(text.encode())
        except ApiError as error:
            return error.status, str(error)

    expected = read()
    monkeypatch.setattr(json_pieces, "MANY", 0)
    with monkeypatch.context() as patch:
        patch.setattr(json, "loads", None)
        found = read()
    assert found == expected


def test_a_schema_of_mebibytes(client: TestClient) -> None:
    """Its grammar took 25 s to be refused."""
    names = {f"w{i}": {"type": "string"} for i in range(40_000)}
    schema = {"type": "object", "properties": names}
    body = {
        "messages": HI,
        "response_format": {"type": "json_schema", "json_schema": {"name": "x", "schema": schema}},
        "max_tokens": 1,
    }
    answer = client.post("/v1/chat/completions", json=body)
    assert answer.status_code == 400
    assert "too large: " in answer.json()["error"]["message"]
    assert "bytes of JSON (at most 1048576)" in answer.json()["error"]["message"]
