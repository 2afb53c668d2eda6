"""More calls than can be served now: places, progress, bounds, and time that is over."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import AsyncIterator, Iterable
from typing import Any

import pytest
from starlette.testclient import TestClient

import treadle
from tests.server.conftest import PATIENCE_S, events, running, talking, until
from tests.server.test_openai import post
from treadle.server.protocols.openai import completions
from treadle.server.requests.http_responses import StreamedResponse
from treadle.server.requests.service import Service


@pytest.fixture
def in_small_parts(service: Service, monkeypatch: pytest.MonkeyPatch) -> None:
    """A step reads 96 tokens of prompts, and waits until the last progress was told."""
    shares = service.engine.scheduler._builder._shares
    turns = service.engine.stepper
    split = shares.split
    step = turns.step

    def few(wanted: Iterable[Any], budget: int) -> Any:
        return split(wanted, min(budget, 96))

    def told() -> bool:
        outputs = list(service.engine.outputs.values())
        return all(output.progress() in (None, output.last_progress) for output in outputs)

    def wait(*given: Any) -> Any:
        service.engine._wake_streams()  # else it would be while the step runs
        until(told)
        return step(*given)

    monkeypatch.setattr(shares, "split", few)
    monkeypatch.setattr(turns, "step", wait)


@pytest.mark.parametrize("path", ["/v1/completions", "/v1/chat/completions", "/completion"])
def test_a_stream_tells_how_far_its_prompt_is(
    path: str, in_small_parts: None, client: TestClient, model: treadle.Model
) -> None:
    model.engine.cache.forget()
    text = "def text_of_its_own(" * 30
    said: dict[str, Any] = {"prompt": text, "messages": [{"role": "user", "content": text}]}
    body = {**said, "max_tokens": 3, "stream": True, "return_progress": True}
    found = [event for event in events(client.post(path, json=body).text) if event != "[DONE]"]
    told = [event["prompt_progress"] for event in found if "prompt_progress" in event]
    n = told[0]["total"]
    assert n > 200
    assert [one["processed"] for one in told] == [*range(96, n, 96), n]
    assert all(one["cache"] == one["queue"] == 0 for one in told)
    assert [one["time_ms"] for one in told] == sorted(one["time_ms"] for one in told)
    quiet = client.post(path, json={**body, "return_progress": False})
    assert "prompt_progress" not in quiet.text


def test_no_more_seconds_of_reading_than_stated(model: treadle.Model) -> None:
    with running(model, max_queue_s=1e-6) as service, talking(service) as client:
        body: dict[str, Any] = {"prompt": "def f(" * 20, "max_tokens": 2}
        assert post(client, "/v1/completions", **body)  # so it is known what reading takes
        release = threading.Event()
        service.engine.submit(lambda: release.wait(PATIENCE_S))
        answers: list[int] = []
        first = threading.Thread(
            target=lambda: answers.append(client.post("/v1/completions", json=body).status_code)
        )
        first.start()
        until(lambda: service.engine.outputs)
        assert service.engine.queued_s() > 0
        full = client.post("/v1/completions", json=body)
        assert full.status_code == 503
        assert int(full.headers["retry-after"]) >= 1
        assert "s of prompt processing are queued" in full.json()["error"]["message"]
        release.set()
        first.join(PATIENCE_S)
        assert answers == [200]
        assert service.engine.queued_s() == 0


@pytest.mark.parametrize("way", ["header", "body"])
def test_time_counts_from_the_call_on(
    way: str, service: Service, client: TestClient, monkeypatch: pytest.MonkeyPatch
) -> None:
    """To make a prompt ready takes of it."""
    release = threading.Event()

    def slow(*_: object) -> list[int]:
        release.wait(PATIENCE_S if way == "header" else 0.05)
        return [5]

    monkeypatch.setattr(completions, "read_prompt", slow)
    n_steps = service.stats.n_steps
    body: dict[str, Any] = {"prompt": "x", "max_tokens": 400, "ignore_eos": True}
    headers = {"x-request-timeout": "0.05"} if way == "header" else {}
    body |= {"timeout": 0.05} if way == "body" else {}
    answer = client.post("/v1/completions", json=body, headers=headers)
    assert (answer.status_code, answer.json()["error"]["code"]) == (504, "timeout")
    assert service.stats.n_steps - n_steps < 400
    release.set()


def test_who_has_left_before_the_headers_is_forgotten() -> None:
    """A stream whose first message cannot be sent ends its call."""
    ended: list[str] = []

    class Left:
        kept = None

        def close(self) -> None:
            ended.append("closed")

    async def parts() -> AsyncIterator[bytes]:
        yield b""

    async def send(message: Any) -> None:
        raise OSError("the socket is gone")

    async def receive() -> Any:
        await asyncio.sleep(60)

    left: Any = Left()
    with pytest.raises(OSError, match="gone"):
        asyncio.run(StreamedResponse(left, parts(), lambda error: b"")({}, receive, send))
    assert ended == ["closed"]


@pytest.mark.slow
def test_places_in_the_queue_go_down(
    service: Service, client: TestClient, monkeypatch: pytest.MonkeyPatch
) -> None:
    """More whole contexts than there is room for: those that wait have places."""
    places: list[int] = []
    step = service.engine.scheduler.step

    def watch(*args: Any, **settings: Any) -> Any:
        found = step(*args, **settings)
        waiting = service.engine.scheduler.queue.waiting
        places.extend(request.queue_position for request in waiting)
        return found

    monkeypatch.setattr(service.engine.scheduler, "step", watch)
    prompts = [[5 + i] * 300 for i in range(12)]
    post(client, "/v1/completions", prompt=prompts, max_tokens=40, ignore_eos=True)
    assert places
    assert min(places) == 1
