"""The front server, its replicas and the router, on a fake of Ray."""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncIterator, Callable, Iterator, Set
from concurrent.futures import Future
from contextlib import contextmanager
from importlib import import_module
from types import SimpleNamespace
from typing import Any

import pytest

from tests.distributed.cluster.fake_ray import FakeRay, FakeRouter, RayActorError
from treadle.distributed.cluster.affinity import beginning
from treadle.distributed.cluster.plan import ReplicaPlan
from treadle.errors import TreadleError
from treadle.server.requests.service import ServerSettings


class FakeService:
    """A service whose engine is ready as soon as it is started."""

    def __init__(self, model: Any, settings: Any) -> None:
        self.model = model
        self.settings = settings
        self.closed = False
        warmed: Future[None] = Future()
        warmed.set_result(None)
        self.started = False
        self.engine = SimpleNamespace(state="ready", why="", warmed=warmed, start=self.start)

    def start(self) -> None:
        self.started = True

    def close(self) -> None:
        self.closed = True


class FakeModel:
    """A model that is loaded or closed."""

    closed = False

    def close(self) -> None:
        self.closed = True


async def echo(scope: Any, receive: Any, send: Any) -> None:
    """An application that answers with its request; at /wait it waits for the client's end."""
    first = await receive()
    told = {"path": scope["path"], "body": first["body"].decode(), "keys": sorted(scope)}
    headers = [(b"x-own", b"1"), (b"x-own", b"2"), (b"content-type", b"application/json")]
    await send({"type": "http.response.start", "status": 207, "headers": headers})
    if scope["path"] == "/wait":
        await send({"type": "http.response.body", "body": b"begun", "more_body": True})
        scope["ended"].append((await receive())["type"])
        return
    half = json.dumps(told).encode()
    for part, more in ((half[:5], True), (half[5:], True), (b"", False)):
        await send({"type": "http.response.body", "body": part, "more_body": more})


@pytest.fixture
def serving(fake_ray: FakeRay, monkeypatch: pytest.MonkeyPatch) -> Any:
    module: Any = import_module("treadle.distributed.cluster.serving")
    monkeypatch.setattr(module, "Service", FakeService)
    monkeypatch.setattr(module, "build_app", lambda service: echo)
    return module


@pytest.fixture
def replica(serving: Any) -> Any:
    return serving.Replica(SimpleNamespace(open=FakeModel, settings="settings"))


class Handle:
    """A deployment's handle: streams of calls of one replica, whose process may have ended."""

    def __init__(self, replica: Any, *, dead: bool = False) -> None:
        self.replica = replica
        self.dead = dead
        self.calls: list[tuple[list[str], dict[str, Any], bytes]] = []
        self.n_cancelled = 0

    def options(self, *, stream: bool) -> Any:
        assert stream
        return SimpleNamespace(call=SimpleNamespace(remote=self.remote))

    def remote(self, *args: Any) -> Any:
        self.calls.append(args)
        return Stream(self, self.replica.call(*args))


class Stream:
    """The messages of one call."""

    def __init__(self, handle: Handle, messages: AsyncIterator[Any]) -> None:
        self.handle = handle
        self.messages = messages

    def __aiter__(self) -> Stream:
        return self

    async def __anext__(self) -> Any:
        if self.handle.dead:
            raise RayActorError
        return await self.messages.__anext__()

    def cancel(self) -> None:
        self.handle.n_cancelled += 1


@contextmanager
def client(serving: Any, handle: Handle, max_body: int = 1 << 20) -> Iterator[Any]:
    from starlette.applications import Starlette
    from starlette.routing import Route
    from starlette.testclient import TestClient

    front = serving.FrontServer(handle, max_body)
    app = Starlette(routes=[Route("/{path:path}", front.__call__, methods=["GET", "POST"])])
    with TestClient(app) as found:
        yield found


def test_an_answer_passes_through_as_the_replica_made_it(serving: Any, replica: Any) -> None:
    handle = Handle(replica)
    body = {"prompt": "once upon a time " * 60, "seed": 1}
    with client(serving, handle) as front:
        answer = front.post("/v1/completions?a=b", json=body)
    assert answer.status_code == 207
    assert answer.headers.get_list("x-own") == ["1", "2"]
    told = answer.json()
    assert (told["path"], json.loads(told["body"])) == ("/v1/completions", body)
    assert set(told["keys"]) <= set(serving.KEPT)  # all else cannot be sent to another process
    assert {"method", "query_string", "headers", "client"} <= set(told["keys"])
    ((names, scope, _),) = handle.calls
    assert names == beginning(body)
    assert len(names) > 3
    assert scope["query_string"] == b"a=b"
    assert handle.n_cancelled == 1  # of a call that has ended, as Ray allows


@pytest.mark.parametrize("body", [b"", b"{", b"[1]"])
def test_a_body_that_is_no_object_is_the_replicas_to_refuse(
    body: bytes, serving: Any, replica: Any
) -> None:
    handle = Handle(replica)
    with client(serving, handle) as front:
        answer = front.post("/x", content=body)
    assert answer.json()["body"].encode() == body
    assert [call[0] for call in handle.calls] == [[]]


def test_a_body_that_is_too_large_never_leaves(serving: Any, replica: Any) -> None:
    handle = Handle(replica)
    with client(serving, handle) as front:
        answer = front.post("/x", content=bytes((1 << 20) + 1))
        assert front.post("/x", content=b" " * (1 << 20)).status_code == 207
    assert answer.status_code == 413
    assert "larger than 1 MiB" in answer.json()["error"]["message"]
    assert len(handle.calls) == 1


def test_a_replica_that_died_is_an_error_object(serving: Any, replica: Any) -> None:
    with client(serving, Handle(replica, dead=True)) as front:
        answer = front.post("/x", json={"prompt": "x"})
    assert answer.status_code == 500
    assert answer.json()["error"]["type"] == "server_error"
    assert "retry" in answer.json()["error"]["message"]


def test_a_client_that_leaves_ends_the_call(serving: Any, replica: Any) -> None:
    """The front cancels it, and the application sees the end of its client."""
    ended: list[str] = []

    async def leave() -> None:
        messages = replica.call([], {"path": "/wait", "ended": ended}, b"")
        assert (await messages.__anext__())["status"] == 207
        assert (await messages.__anext__())["body"] == b"begun"
        assert not ended
        await messages.aclose()

    asyncio.run(leave())
    assert ended == ["http.disconnect"]
    handle = Handle(replica)

    async def cancel() -> None:
        parts = serving._parts(handle.remote([], {"path": "/wait", "ended": ended}, b""))
        assert await parts.__anext__() == b"begun"
        await parts.aclose()

    asyncio.run(cancel())
    assert handle.n_cancelled == 1


def test_a_replica_starts_checks_and_closes_its_model(serving: Any, replica: Any) -> None:
    service = replica._service
    model = replica._model
    assert service.started
    assert (service.model, service.settings) == (model, "settings")
    replica.check_health()
    service.engine.state = "error"
    service.engine.why = "the file has shrunk"
    with pytest.raises(TreadleError, match="the file has shrunk"):
        replica.check_health()
    replica.__del__()
    assert service.closed
    assert model.closed
    serving.Replica.__new__(serving.Replica).__del__()  # whose model did not load


@pytest.mark.parametrize(
    ("host", "address"),
    [
        ("0.0.0.0", "http://127.0.0.1:8080"),
        ("::", "http://[::1]:8080"),
        ("10.1.2.3", "http://10.1.2.3:8080"),
    ],
)
def test_what_ray_serve_is_told(host: str, address: str, serving: Any, fake_ray: FakeRay) -> None:
    told: list[str] = []
    plan = ReplicaPlan(None, 3, load={"threads": 4}, settings=ServerSettings(log=False))
    serving.run(plan, host, 8080, told.append)
    assert told == [address]
    calls = dict(fake_ray.serve_calls)
    assert calls["start"] == {"http_options": {"host": host, "port": 8080}}
    replica = calls["Replica"]
    assert (replica["num_replicas"], replica["ray_actor_options"]) == (3, {"num_cpus": 4})
    assert replica["request_router_config"].request_router_class.__name__ == "PrefixRouter"
    front = calls["FrontServer"]
    assert front["max_ongoing_requests"] > replica["max_ongoing_requests"]
    assert calls["run"]["bound"] == ("FrontServer", ("Replica", plan), plan.max_body)


# -- the router ------------------------------------------------------------------------------------


def chosen(
    names: list[str] | None, lengths: dict[str, int], full: Set[str] = frozenset()
) -> Callable[[], list[list[str]]]:
    """The ranks of replicas for requests with these names, one after the other."""
    module: Any = import_module("treadle.distributed.cluster.router")
    router = module.PrefixRouter(full, lengths)
    router.initialize_state()
    replicas = [SimpleNamespace(replica_id=name) for name in lengths]

    def rank() -> list[list[str]]:
        request = None if names is None else SimpleNamespace(args=[names] if names else [])
        ranks = asyncio.run(router.choose_replicas(replicas, request))
        return [[each.replica_id for each in rank] for rank in ranks]

    return rank


def test_a_prefix_goes_where_it_is_cached_and_the_others_follow(fake_ray: FakeRay) -> None:
    lengths = {"a": 0, "b": 0, "c": 0}
    rank = chosen(["p1", "p2"], lengths)
    (first,), others = rank()
    assert sorted([first, *others]) == ["a", "b", "c"]
    lengths[first] = 3
    assert rank()[0] == [first]  # a little busy: still the one
    lengths[first] = 9
    assert rank()[0] != [first]


def test_a_full_replica_is_skipped_unless_all_are(fake_ray: FakeRay) -> None:
    lengths = {"a": 0, "b": 7}
    assert chosen(["p"], lengths, {"a"})() == [["b"]]
    assert chosen(["p"], lengths, {"a", "b"})() == [["a"], ["b"]]


def test_requests_without_a_prefix(fake_ray: FakeRay) -> None:
    assert chosen(None, {"a": 0, "b": 0})() == [["a", "b"]]
    assert chosen([], {"a": 1, "b": 0})() == [["b"], ["a"]]
    assert chosen(["p"], {})() == []
    assert issubclass(import_module("treadle.distributed.cluster.router").PrefixRouter, FakeRouter)
