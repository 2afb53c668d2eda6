"""Streams that outlive their connection: read again, stopped, replaced, forgotten."""

from __future__ import annotations

import http.client
import json
from collections.abc import Iterator
from contextlib import closing
from typing import Any
from urllib.parse import quote, urlsplit

import pytest

import treadle
from tests.server.conftest import PATIENCE_S, at_socket, events, held, running, until
from treadle.server.requests import kept_streams
from treadle.server.requests.kept_streams import KeptStreams
from treadle.server.requests.service import Service

ID = "talk/1::some model"
BODY = {"prompt": "def f(", "max_tokens": 40, "ignore_eos": True, "temperature": 0, "stream": True}


class Caller:
    """A client at a socket; each call has a connection of its own."""

    def __init__(self, url: str) -> None:
        self._place = urlsplit(url).netloc

    def begin(
        self, method: str, path: str, body: Any = None, **headers: str
    ) -> tuple[http.client.HTTPConnection, http.client.HTTPResponse]:
        connection = http.client.HTTPConnection(self._place, timeout=PATIENCE_S)
        headers = {name.replace("_", "-"): value for name, value in headers.items()}
        connection.request(method, path, None if body is None else json.dumps(body), headers)
        return connection, connection.getresponse()

    def call(self, method: str, path: str, body: Any = None, **headers: str) -> tuple[int, bytes]:
        connection, answer = self.begin(method, path, body, **headers)
        with closing(connection):
            return answer.status, answer.read()

    def leave(self, body: Any, name: str = ID, path: str = "/v1/completions") -> bytes:
        """Begin a stream, and leave behind its first piece of text, which is returned."""
        connection, answer = self.begin("POST", path, body, x_conversation_id=name)
        with closing(connection):
            first = answer.readline()
            answer.close()
        return first

    def look_up(self, *names: str) -> Any:
        status, text = self.call("POST", "/v1/streams/lookup", {"conversation_ids": names})
        assert status == 200
        return json.loads(text)


def where(name: str = ID, start: int | str = 0) -> str:
    return f"/v1/stream?conv_id={quote(name, safe='')}&from={start}"


@pytest.fixture(scope="module")
def service(model: treadle.Model) -> Iterator[Service]:
    with running(model) as service:
        yield service


@pytest.fixture(scope="module")
def caller(service: Service) -> Iterator[Caller]:
    with at_socket(service) as url:
        yield Caller(url)


def text_of(stream: bytes) -> str:
    found = events(stream.decode())
    assert found[-1] == "[DONE]"
    return "".join(each["choices"][0]["text"] for each in found[:-1] if each["choices"])


def test_a_stream_goes_on_without_its_client(service: Service, caller: Caller) -> None:
    status, whole = caller.call("POST", "/v1/completions", BODY)
    assert status == 200
    with held(service):
        first = caller.leave(BODY)
        assert first.startswith(b"data: ")
        (state,) = caller.look_up("talk/1", "other")
        assert (state["conversation_id"], state["is_done"]) == (ID, False)
        connection, answer = caller.begin("GET", where())
        assert answer.headers["content-type"].startswith("text/event-stream")
        assert answer.readline() == first  # while it is being written
    with closing(connection):
        rest = answer.read()
    again = first + rest
    assert text_of(again) == text_of(whole)
    until(lambda: caller.look_up(ID)[0]["is_done"])
    (state,) = caller.look_up(ID)
    assert state["total_bytes"] == len(again)
    assert state["completed_at"] >= state["started_at"] > 0
    assert caller.call("GET", where(start=len(again) - 14)) == (200, b"data: [DONE]\n\n")
    assert caller.call("GET", where(start=len(again))) == (200, b"")
    for start in (len(again) + 1, "x", -1):
        status, said = caller.call("GET", where(start=start))
        assert (status, json.loads(said)["error"]["param"]) == (400, "from")


def test_a_stream_that_its_client_reads_to_the_end(caller: Caller) -> None:
    status, whole = caller.call("POST", "/v1/completions", BODY, x_conversation_id="read")
    assert status == 200
    assert text_of(whole)
    assert caller.call("GET", where("read")) == (200, whole)


def test_a_stream_that_is_stopped_or_replaced(service: Service, caller: Caller) -> None:
    with held(service):
        caller.leave({**BODY, "max_tokens": 400})
        assert caller.call("DELETE", where())[0] == 204
        until(lambda: not service.streams)
        assert caller.call("DELETE", where())[0] == 204  # it may be asked for again
        status, said = caller.call("GET", where())
        assert (status, json.loads(said)["error"]["param"]) == (404, "conv_id")
        caller.leave({**BODY, "max_tokens": 400})
        caller.leave(BODY)
        until(lambda: len(service.streams) == 1)
    _, answer = caller.call("GET", where())
    assert text_of(answer)


def test_calls_that_keep_nothing(caller: Caller) -> None:
    for body, status in (({**BODY, "stream": False}, 200), ({**BODY, "prompt": 1.5}, 400)):
        asked = caller.call("POST", "/v1/completions", body, x_conversation_id="none")
        assert asked[0] == status
        assert caller.look_up("none") == []
    assert caller.call("POST", "/v1/completions", BODY, x_conversation_id="x" * 300)[0] == 400
    assert caller.call("GET", "/v1/stream")[0] == 400
    assert caller.call("POST", "/v1/streams/lookup", {"conversation_ids": "x"})[0] == 400


def test_other_keys_see_nothing(model: treadle.Model) -> None:
    with running(model, api_keys=("one", "two")) as service, at_socket(service) as url:
        caller = Caller(url)
        headers = {"x_conversation_id": "mine"}
        caller.call("POST", "/v1/chat/completions", CHAT, x_api_key="one", **headers)
        assert caller.call("GET", where("mine"), x_api_key="one")[0] == 200
        assert caller.call("GET", where("mine"), x_api_key="two")[0] == 404
        assert caller.call("GET", where("mine"))[0] == 401


CHAT = {"messages": [{"role": "user", "content": "x"}], "max_tokens": 2, "stream": True}


def test_a_client_that_leaves_still_counts_for_its_key(
    model: treadle.Model, tmp_path_factory: pytest.TempPathFactory
) -> None:
    file = tmp_path_factory.mktemp("keys") / "keys"
    file.write_text("a requests=1")
    with running(model, api_key_file=file) as service, at_socket(service) as url:
        caller = Caller(url)
        headers = {"x_api_key": "a", "x_conversation_id": "mine"}
        with held(service):
            connection, answer = caller.begin("POST", "/v1/completions", BODY, **headers)
            with closing(connection):
                assert answer.readline()
                answer.close()
            until(lambda: service.n_open == 1)  # what is written
            status, _ = caller.call("POST", "/v1/completions", BODY, x_api_key="a")
            assert status == 429
        assert caller.call("GET", where("mine"), x_api_key="a")[0] == 200
        until(lambda: not service.streams)
        status, _ = caller.call("POST", "/v1/completions", BODY, x_api_key="a")
        assert status == 200


def test_what_is_kept_is_bounded(
    service: Service, caller: Caller, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(kept_streams, "MAX_BYTES", 1000)
    caller.call("POST", "/v1/completions", BODY, x_conversation_id="long")
    until(lambda: caller.look_up("long")[0]["is_done"])
    total = caller.look_up("long")[0]["total_bytes"]
    assert total > 2000
    status, said = caller.call("GET", where("long"))
    error = json.loads(said)["error"]
    assert (status, error["code"]) == (400, "offset_lost")
    status, rest = caller.call("GET", where("long", total - 1000))
    assert (status, len(rest)) == (200, 1000)
    assert rest.endswith(b"data: [DONE]\n\n")

    monkeypatch.setattr(kept_streams, "MOST_KEPT", 2)
    service.kept_streams._kept.clear()
    with held(service):
        caller.leave({**BODY, "max_tokens": 400}, "1")
        caller.leave({**BODY, "max_tokens": 400}, "2")
        status, _ = caller.call("POST", "/v1/completions", BODY, x_conversation_id="3")
        assert status == 503
        caller.call("DELETE", where("2"))
    caller.call("POST", "/v1/completions", BODY, x_conversation_id="2")
    until(lambda: caller.look_up("2")[0]["is_done"])
    caller.call("POST", "/v1/completions", BODY, x_conversation_id="3")  # in place of an ended one
    assert len(caller.look_up("1", "2", "3")) == 2
    caller.call("DELETE", where("1"))


def test_what_nobody_reads_ends(
    service: Service, caller: Caller, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(kept_streams, "UNREAD_S", 0.01)
    with held(service):
        caller.leave({**BODY, "max_tokens": 400}, "left")
        until(lambda: not service.streams)
    monkeypatch.setattr(kept_streams, "KEPT_S", 0.01)
    caller.call("POST", "/v1/completions", BODY, x_conversation_id="old")
    until(lambda: not caller.look_up("old"))


def test_names_of_conversations() -> None:
    assert kept_streams.conversation_id(None) is None
    assert kept_streams.conversation_id("") is None
    assert KeptStreams().of_conversation("", "x") == []
