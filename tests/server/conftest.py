"""Fixtures of the server: the packaged model behind the app, without a socket; and a process."""

from __future__ import annotations

import asyncio
import json
import os
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Generator, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
import uvicorn
from starlette.testclient import TestClient

import treadle
from tests.chat.tools.families import HERMES_TEMPLATE
from tests.conftest import stored_plans
from tests.scheduler.fake_engine import check_scheduler
from treadle.chat.template.template import ChatTemplate
from treadle.server.app import build_app
from treadle.server.http.connection import Connection
from treadle.server.http.listeners import address_of, listen
from treadle.server.requests.service import ServerSettings, Service

ROOT = Path(__file__).resolve().parents[2]
N_CTX = 512
PATIENCE_S = 120  # a machine may be busy; nothing waits so long that is not broken
Served = Callable[..., Any]


@pytest.fixture(scope="session")
def model(
    one_kernel_cache: Path, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[treadle.Model]:
    """Deterministic: a text is the one that it would be alone. With ``python -m
    tests.devices.cuda`` a small one on an emulated card.
    """
    if os.environ.get("TREADLE_TEST_GPU") == "all":
        from tests.devices.cuda.cards import cards
        from tests.devices.cuda.served import served_on, write_demo

        with cards(), served_on("cuda", write_demo(tmp_path_factory.mktemp("served"))) as model:
            yield model
        return
    with treadle.load(threads=2, context=N_CTX, n_sequences=4, deterministic=True) as model:
        yield model


def no_plans() -> Generator[Callable[[], object], None, None]:
    """In place of ``EngineThread._warmings``."""
    yield from ()


@contextmanager
def running(model: treadle.Model, *, warm: bool = True, **settings: Any) -> Iterator[Service]:
    """A service whose plans are compiled; at its end nothing may be held. Without ``warm`` a plan
    is compiled when a request needs it: of a model that no other test serves, most are never run.
    """
    service = Service(model, ServerSettings(**{"log": False, **settings}))
    if not warm:
        service.engine._compiles_ahead = False
        service.engine._warmings = no_plans  # type: ignore[method-assign]
    service.engine.start()
    service.engine.warmed.result(300)
    try:
        yield service
        assert not service.engine.outputs
        assert not service.streams
    finally:
        service.close()
    check_scheduler(service.engine.scheduler)
    assert not service.engine.scheduler.queue.running
    assert not service.engine.scheduler.queue.waiting


@contextmanager
def talking(service: Service, **settings: Any) -> Iterator[TestClient]:
    with TestClient(build_app(service), base_url="http://localhost", **settings) as client:
        yield client


def with_template(model: treadle.Model, source: str) -> treadle.Model:
    """The same engine behind another chat template. The model itself stays as it is: fixtures of
    several modules share it, and in a random order their lives overlap.
    """
    other = object.__new__(type(model))
    other.__dict__.update(model.__dict__, template=ChatTemplate(source))
    return other


@pytest.fixture(scope="module")
def agent(model: treadle.Model) -> Iterator[TestClient]:
    """A server of a model whose template has tools and reasoning."""
    own = with_template(model, HERMES_TEMPLATE + "{# </think> #}")
    with running(own) as service, talking(service) as client:
        yield client


@pytest.fixture(scope="module")
def service(model: treadle.Model) -> Iterator[Service]:
    with running(model, metrics=True) as service:
        yield service


@pytest.fixture(scope="module")
def client(service: Service) -> Iterator[TestClient]:
    with talking(service) as client:
        yield client


@pytest.fixture
def each_piece(service: Service, monkeypatch: pytest.MonkeyPatch) -> None:
    """The engine waits before a step until the pieces of all streams are taken: so each is sent by
    itself, however busy the machine.
    """
    step = service.engine.stepper.step

    def wait(*given: Any) -> Any:
        until(lambda: not any(t.answer.pieces for t in list(service.engine.outputs.values())))
        return step(*given)

    monkeypatch.setattr(service.engine.stepper, "step", wait)


@contextmanager
def held(service: Service) -> Iterator[None]:
    """Texts that have begun go on only when a text comes or leaves, and behind this: so none ends
    meanwhile, however slow its reader.
    """
    turns = service.engine.stepper
    inbox = service.engine.scheduler.queue.inbox
    step, over = turns.step, threading.Event()

    def begun() -> bool:
        return any(len(output.answer.ids) > 2 for output in list(service.engine.outputs.values()))

    def wait(*given: Any) -> Any:
        until(lambda: over.is_set() or inbox or not begun())
        return step(*given)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(turns, "step", wait)
        try:
            yield
        finally:
            over.set()


def until(true: Callable[[], object], seconds: float = PATIENCE_S) -> None:
    """Wait for what another thread does."""
    end = time.monotonic() + seconds
    while not true():
        assert time.monotonic() < end
        time.sleep(0.001)


def events(text: str) -> list[Any]:
    """The data of a stream's events, in order; comments are left out."""
    found: list[Any] = []
    for block in text.split("\n\n"):
        for line in block.splitlines():
            if line.startswith("data: "):
                data = line.removeprefix("data: ")
                found.append(data if data == "[DONE]" else json.loads(data))
    return found


class Process:
    """``treadle serve`` as it is started by a person; it writes slowly while ``slow``, if that is
    given, is there (``paced``).
    """

    def __init__(self, *options: str, slow: Path | None = None) -> None:
        module = ["treadle"] if slow is None else ["tests.server.paced", str(slow)]
        command = [sys.executable, "-m", *module, "serve", "--port", "0", "-t", "2", *options]
        self.popen = subprocess.Popen(
            command,
            cwd=ROOT,
            env=stored_plans(),
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
        )
        assert self.popen.stdout is not None
        self.url = self.popen.stdout.readline().strip()

    def end(self) -> tuple[int, str]:
        """Its exit code, and what it wrote to standard error."""
        _, err = self.popen.communicate(timeout=PATIENCE_S)
        return self.popen.returncode, err


@pytest.fixture
def process(one_kernel_cache: Path) -> Iterator[Served]:
    started: list[Process] = []

    def start(*options: str, slow: Path | None = None) -> Process:
        started.append(Process(*options, slow=slow))
        return started[-1]

    yield start
    for each in started:
        if each.popen.poll() is None:
            each.popen.kill()
        each.popen.communicate()


@contextmanager
def at_socket(service: Service) -> Iterator[str]:
    """The address of the app at a socket of this machine, served by a thread."""
    listener = listen("127.0.0.1", 0)
    config = uvicorn.Config(
        build_app(service),
        log_config=None,
        access_log=False,
        lifespan="off",
        ws="none",
        http=Connection,
        timeout_graceful_shutdown=1,
    )
    server = uvicorn.Server(config)
    thread = threading.Thread(target=lambda: asyncio.run(server.serve([listener])))
    thread.start()
    try:
        yield address_of(listener)
    finally:
        server.should_exit = True
        thread.join(PATIENCE_S)
        listener.close()
