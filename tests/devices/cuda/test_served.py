"""The server on an emulated card: the texts of the CPU, and some of the server's own tests;
``python -m tests.devices.cuda`` has all of them there.
"""

from __future__ import annotations

import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from starlette.testclient import TestClient

import treadle
from tests.devices.cuda.cards import cards
from tests.devices.cuda.emulated import EmulatedDriver
from tests.devices.cuda.served import served_on, write_demo
from tests.server.conftest import PATIENCE_S, running, talking, until
from tests.server.conftest import client as client
from tests.server.conftest import service as service
from tests.server.test_engine_thread import (
    test_every_plan_is_there_before_it_is_healthy as test_every_plan_is_there_before_it_is_healthy,
)
from tests.server.test_engine_thread import (
    test_jobs_and_texts_take_turns as test_jobs_and_texts_take_turns,
)
from tests.server.test_engine_thread import (
    test_metrics_count_what_was_done as test_metrics_count_what_was_done,
)
from tests.server.test_openai import CHAT, HI, post
from tests.server.test_openai import test_a_chat_is_the_librarys as test_a_chat_is_the_librarys
from tests.server.test_openai import test_a_schema_is_kept as test_a_schema_is_kept
from tests.server.test_openai import (
    test_completions_of_several_prompts as test_completions_of_several_prompts,
)
from tests.server.test_openai import test_embeddings as test_embeddings
from tests.server.test_openai import test_logprobs as test_logprobs
from tests.server.test_openai import (
    test_several_texts_have_seeds_of_their_own as test_several_texts_have_seeds_of_their_own,
)
from tests.server.test_openai import (
    test_the_order_of_a_streams_events as test_the_order_of_a_streams_events,
)
from tests.server.test_streams import (
    test_who_leaves_is_computed_no_further as test_who_leaves_is_computed_no_further,
)
from treadle.server.requests.service import ServerSettings, Service

pytestmark = pytest.mark.slow  # whole models on an emulated card

PROMPTS = ["def f(", "One day, a small dog", "x"]


@pytest.fixture(scope="module")
def file(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_demo(tmp_path_factory.mktemp("served"))


@pytest.fixture(scope="module")
def drivers() -> Iterator[list[EmulatedDriver]]:
    with cards() as made:
        yield made


@pytest.fixture(scope="module")
def model(drivers: list[EmulatedDriver], file: Path) -> Iterator[treadle.Model]:
    with served_on("cuda", file) as model:
        yield model


def completed(client: TestClient, prompt: str) -> str:
    made = post(client, "/v1/completions", prompt=prompt, max_tokens=12, temperature=0)
    text: str = made["choices"][0]["text"]
    return text


@pytest.fixture(scope="module")
def expected(file: Path) -> list[str]:
    """The texts of PROMPTS on the CPU."""
    with served_on("cpu", file) as model, running(model) as service, talking(service) as client:
        return [completed(client, prompt) for prompt in PROMPTS]


def test_calls_at_once_have_the_texts_of_the_cpu(
    client: TestClient, service: Service, expected: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Together in batches: no step is made until all have come."""
    turns = service.engine.stepper
    found = dict.fromkeys(PROMPTS, "")
    step, come = turns.step, threading.Event()

    def wait(*given: Any) -> Any:
        until(lambda: come.is_set() or len(service.engine.outputs) == len(PROMPTS))
        come.set()
        return step(*given)

    def ask(prompt: str) -> None:
        found[prompt] = completed(client, prompt)

    monkeypatch.setattr(turns, "step", wait)
    steps = service.stats.n_steps
    fed = service.stats.n_fed
    threads = [threading.Thread(target=ask, args=(prompt,)) for prompt in PROMPTS]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(PATIENCE_S)
    assert list(found.values()) == expected
    assert len(set(expected)) == len(PROMPTS)
    assert service.stats.n_fed - fed > 2 * (service.stats.n_steps - steps)


def test_it_is_healthy_when_all_is_compiled(
    model: treadle.Model, drivers: list[EmulatedDriver]
) -> None:
    """And nothing is uploaded or compiled while somebody waits."""
    (driver,) = drivers
    service = Service(model, ServerSettings(log=False))
    with talking(service) as client:
        assert client.get("/health").status_code == 503
        service.engine.start()
        service.engine.warmed.result(PATIENCE_S)
        driver.calls.clear()
        assert client.get("/health").status_code == 200
        post(client, CHAT, messages=HI, max_tokens=2)
    service.close()
    assert {"start", "read"} <= set(driver.calls)
    assert not {"code", "load", "alloc", "write"} & set(driver.calls)
