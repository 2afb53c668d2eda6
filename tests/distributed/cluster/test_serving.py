"""Several models behind one address, and a batch file, on a Ray of this machine."""

from __future__ import annotations

import asyncio
import json
import os
import signal
import socket
import subprocess
import sys
import time
import urllib.error
import urllib.request
from collections.abc import AsyncIterator, Iterator
from pathlib import Path
from typing import Any

import pytest

from tests.cli.test_batch import DIES_S, requests, told

LOAD: dict[str, Any] = {"threads": 1, "context": 256, "n_sequences": 4, "deterministic": True}


@pytest.fixture(scope="module")
def address(cluster: Any) -> Iterator[str]:
    """Two models behind one address."""
    from ray import serve

    from treadle.distributed.cluster.plan import ReplicaPlan
    from treadle.distributed.cluster.serving import run
    from treadle.server.requests.service import ServerSettings

    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    found: list[str] = []
    run(
        ReplicaPlan(None, 2, load=LOAD, settings=ServerSettings(log=False)),
        "127.0.0.1",
        port,
        found.append,
    )
    yield found[0]
    shutdown: Any = serve.shutdown
    shutdown()


def post(address: str, path: str, body: Any) -> tuple[int, bytes]:
    raw = body if isinstance(body, bytes) else json.dumps(body).encode()
    request = urllib.request.Request(address + path, raw, {"content-type": "application/json"})
    try:
        with urllib.request.urlopen(request, timeout=120) as found:
            return found.status, found.read()
    except urllib.error.HTTPError as error:
        return error.code, error.read()


def complete(address: str, prompt: str, **more: Any) -> Any:
    body = {"prompt": prompt, "max_tokens": 6, "temperature": 0, **more}
    status, found = post(address, "/v1/completions", body)
    assert status == 200, found
    return json.loads(found)


class FakeReplica:
    """Records the calls that the front server makes, and answers each with 200."""

    def __init__(self) -> None:
        self.calls: list[tuple[list[str], bytes]] = []

    def options(self, *, stream: bool) -> FakeReplica:
        assert stream
        return self

    @property
    def call(self) -> FakeReplica:
        return self

    def remote(self, names: list[str], scope: dict[str, Any], body: bytes) -> Any:
        self.calls.append((names, body))

        async def messages() -> AsyncIterator[dict[str, Any]]:
            yield {"type": "http.response.start", "status": 200, "headers": []}

        return messages()


def sent(front: Any, body: bytes, part: int = 1 << 20) -> Any:
    """The front server's response to a body that comes in parts."""
    from starlette.requests import Request

    parts = [body[at : at + part] for at in range(0, len(body), part)] or [b""]

    async def receive() -> dict[str, Any]:
        each = parts.pop(0)
        return {"type": "http.request", "body": each, "more_body": bool(parts)}

    scope = {"type": "http", "method": "POST", "path": "/v1/chat/completions", "headers": []}
    return asyncio.run(front(Request(scope, receive)))


def test_the_front_takes_bodies_as_large_as_its_replicas_do() -> None:
    """Of pictures: 64 MiB. A replica whose model reads text only refuses more than 16 itself."""
    pytest.importorskip("ray")
    from treadle.distributed.cluster.affinity import beginning
    from treadle.distributed.cluster.serving import FrontServer

    replica = FakeReplica()
    picture = {"type": "image_url", "image_url": {"url": "data:," + "A" * (17 << 20)}}
    body = {"messages": [{"role": "user", "content": [picture]}]}
    raw = json.dumps(body).encode()
    assert sent(FrontServer(replica, 64 << 20), raw).status_code == 200
    assert replica.calls == [(beginning(body), raw)]
    refused = sent(FrontServer(replica, 16 << 20), raw)
    assert refused.status_code == 413
    assert b"16 MiB" in refused.body
    assert sent(FrontServer(replica, 64), b"{").status_code == 200  # the replica's error to make
    assert replica.calls[1:] == [([], b"{")]


@pytest.mark.whole_cluster
def test_one_address_answers_as_one_server(address: str) -> None:
    whole = complete(address, "def add(a, b):")["choices"][0]["text"]
    body = {"prompt": "def add(a, b):", "max_tokens": 6, "temperature": 0, "stream": True}
    status, stream = post(address, "/v1/completions", body)
    assert status == 200
    events = [line[6:] for line in stream.decode().splitlines() if line.startswith("data: ")]
    assert events.pop() == "[DONE]"
    assert "".join(json.loads(e)["choices"][0]["text"] for e in events) == whole
    status, found = post(address, "/v1/completions", {"prompt": 3})
    assert (status, json.loads(found)["error"]["param"]) == (400, "prompt")
    assert post(address, "/v1/completions", b"{")[0] == 400
    assert post(address, "/v1/nothing", {})[0] == 404
    with urllib.request.urlopen(f"{address}/health", timeout=60) as health:
        assert health.status == 200


@pytest.mark.whole_cluster
def test_the_same_beginning_goes_to_the_model_that_has_read_it(address: str) -> None:
    for name in "abcdef":
        begins = f"{name} = 1\n" * 60
        cached = [
            complete(address, f"{begins}{i}")["usage"]["prompt_tokens_details"]["cached_tokens"]
            for i in range(3)
        ]
        assert cached[0] < 32
        assert min(cached[1:]) > 150


def pid_of_a_replica() -> int:
    """A child of this process's Ray; workers call themselves by what they run."""
    listed = ["ps", "-eo", "pid=,ppid=,args="]
    shown = subprocess.run(listed, capture_output=True, text=True, check=True).stdout
    rows = [line.split(None, 2) for line in shown.splitlines()]
    parents = {int(pid): int(parent) for pid, parent, *_ in rows}

    def is_ours(pid: int) -> bool:
        while pid in parents and pid != os.getpid():
            pid = parents[pid]
        return pid == os.getpid()

    name = "ray::ServeReplica:treadle:Replica"
    found = [int(row[0]) for row in rows if row[-1].startswith(name) and is_ours(int(row[0]))]
    assert found, shown
    return found[0]


@pytest.mark.whole_cluster
def test_a_model_whose_process_is_killed_is_replaced(address: str, cluster: Any) -> None:
    expected = complete(address, "import os\n")["choices"][0]["text"]
    os.kill(pid_of_a_replica(), signal.SIGKILL)
    end = time.monotonic() + 120
    good = 0
    while good < 8:  # some calls may meet the dead one
        assert time.monotonic() < end
        body = {"prompt": "import os\n", "max_tokens": 6, "temperature": 0}
        status, found = post(address, "/v1/completions", body)
        if status == 200:
            assert json.loads(found)["choices"][0]["text"] == expected
            good += 1
        else:
            assert status >= 500
            time.sleep(0.5)


@pytest.mark.whole_cluster  # to import Ray Serve takes seconds
def test_a_call_whose_model_died_gets_an_error_object() -> None:
    """Without a Ray: its exception comes where the head of the answer would."""
    from ray.exceptions import ActorDiedError
    from starlette.applications import Starlette
    from starlette.routing import Route
    from starlette.testclient import TestClient

    from treadle.distributed.cluster.serving import FrontServer

    class Dead:
        def options(self, **_: Any) -> Dead:
            return self

        @property
        def call(self) -> Dead:
            return self

        async def remote(self, *_: Any) -> AsyncIterator[Any]:
            raise ActorDiedError
            yield

    app = Starlette(
        routes=[Route("/v1/completions", FrontServer(Dead(), 1 << 20).__call__, methods=["POST"])]
    )
    with TestClient(app, raise_server_exceptions=False) as client:
        answer = client.post("/v1/completions", json={"prompt": "x"})
    assert answer.status_code == 500
    assert answer.json()["error"]["type"] == "server_error"


@pytest.mark.whole_cluster
def test_a_batch_file_is_the_same_from_two_models(cluster: Any, tmp_path: Path) -> None:
    from treadle.distributed.cluster.data import answers
    from treadle.distributed.cluster.plan import ReplicaPlan
    from treadle.server.batch_file.lines import read_lines
    from treadle.server.requests.service import ServerSettings

    source, here, there = (tmp_path / name for name in ("in.jsonl", "here.jsonl", "there.jsonl"))
    source.write_text(requests(150))
    args = ["--deterministic", "--temp", "0", "-t", "1", "-c", "256"]
    command = [sys.executable, "-m", "treadle", "batch", str(source), str(here), *args]
    subprocess.run(command, check=True, timeout=DIES_S, capture_output=True)
    with source.open("rb") as file:
        plan = ReplicaPlan(None, 2, load=LOAD, settings=ServerSettings(log=False))
        found = list(answers(read_lines(file), plan, {"temperature": 0}))
    there.write_bytes(b"".join(one.data for one in found))
    assert told(there) == told(here)
    assert sum(one.failed for one in found) == 50
