"""What every call goes through: keys, hosts, origins, bodies, errors, the log."""

from __future__ import annotations

import gzip
import json
from dataclasses import replace
from typing import Any

import pytest
from starlette.testclient import TestClient

import treadle
from tests.server.conftest import running, talking
from treadle.errors import ContextFullError, FileError, NoRoomError, SamplingError
from treadle.scheduler.request import Request
from treadle.server.app import GET, NOT_YET, POST, is_known, paths
from treadle.server.http import http_io
from treadle.server.http.api_errors import problem_of
from treadle.server.requests.service import Service


def error_of(answer: Any) -> dict[str, Any]:
    """Every error has the same keys."""
    found: dict[str, Any] = answer.json()["error"]
    assert {"message", "type", "param", "code"} <= set(found)
    return found


@pytest.mark.parametrize("path", ["/health", "/models", "/props", "/slots", "/metrics"])
def test_paths_are_there_with_and_without_v1(path: str, client: TestClient) -> None:
    assert client.get(path).status_code == 200
    assert client.get(f"/v1{path}").status_code == 200


def test_every_handler_has_two_paths() -> None:
    assert paths("/v1/models") == ("/v1/models", "/models")
    assert paths("/props") == ("/props", "/v1/props")
    for table in (GET, POST):
        every = [each for path in table for each in paths(path)]
        assert len(every) == len(set(every))


@pytest.mark.parametrize("path", NOT_YET)
def test_what_is_not_built_says_so(path: str, client: TestClient) -> None:
    answer = client.post(path, json={})
    assert answer.status_code == 501
    error = answer.json()["error"]
    assert path in (error if path.startswith("/api/") else error["message"])


def test_paths_and_methods_that_do_not_exist(client: TestClient) -> None:
    assert client.get("/nothing").status_code == 404
    assert "/nothing" in error_of(client.get("/nothing"))["message"]
    said = error_of(client.post("/v1/chat/completion", json={}))["message"]
    assert said.endswith("unknown path; did you mean /v1/chat/completions?")
    wrong = client.get("/v1/completions")
    assert wrong.status_code == 405
    assert error_of(wrong)["type"] == "invalid_request_error"
    assert client.get("/../../etc/passwd").status_code == 404


@pytest.mark.parametrize(
    ("body", "status", "said"),
    [
        (b"", 400, "not valid JSON"),
        (b"{", 400, "not valid JSON"),
        (b"[]", 400, "expected a JSON object"),
        (b"\xff", 400, "not UTF-8: byte 0"),
        (b'{"prompt": NaN}', 400, "NaN"),
        (b'{"a":' * 100_000, 400, "deep"),
        (b'{"n":' + b"9" * 5000 + b"}", 400, "not valid JSON"),
        (b"x" * (http_io.MAX_BODY + 1), 413, "16 MiB"),
        (b'{"prompt": ' + b" " * http_io.LARGE + b'"x"', 400, "not valid JSON"),
    ],
    ids=["empty", "cut", "list", "bytes", "nan", "deep", "digits", "large", "in-a-thread"],
)
def test_bad_bodies(body: bytes, status: int, said: str, client: TestClient) -> None:
    answer = client.post("/v1/completions", content=body)
    assert answer.status_code == status
    assert said in error_of(answer)["message"]


def test_a_body_that_grows_behind_its_beginning(
    client: TestClient, service: Service, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(service.bodies, "most", 100)
    answer = client.post("/v1/completions", content=(b"x" * 60 for _ in range(3)))
    assert answer.status_code == 413


def test_a_byte_order_mark_is_no_content(client: TestClient) -> None:
    body = b'\xef\xbb\xbf{"prompt": "x", "max_tokens": 1}'
    assert client.post("/v1/completions", content=body).status_code == 200


def test_a_packed_body_is_told_so(client: TestClient) -> None:
    body = gzip.compress(b'{"prompt": "x"}')
    headers = {"content-encoding": "gzip"}
    answer = client.post("/v1/completions", content=body, headers=headers)
    assert answer.status_code == 415
    assert "'gzip'" in error_of(answer)["message"]


def test_unknown_fields_are_ignored(client: TestClient) -> None:
    body = {"prompt": "def f(", "max_tokens": 2, "frobnicate": {"a": [1]}, "model": "gpt-9"}
    assert client.post("/v1/completions", json=body).status_code == 200


def test_lone_surrogates_do_not_break_an_answer(client: TestClient) -> None:
    body = b'{"prompt": "\\ud800", "echo": true, "max_tokens": 1}'
    answer = client.post("/v1/completions", content=body)
    assert answer.status_code == 200
    answer.content.decode("utf-8")


# -- who may call -------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("host", "known"),
    [
        ("localhost", True),
        ("localhost:8080", True),
        ("LocalHost", True),
        ("a.localhost", True),
        ("127.0.0.1:1", True),
        ("[::1]:8080", True),
        ("192.168.0.7", True),
        ("box", True),
        ("evil.example", False),
        ("localhost.evil.example", False),
        ("", False),
        ("[", False),
        ("127.0.0.1.evil.example", False),
        ("evil.example:127", False),
    ],
)
def test_hosts(host: str, known: bool) -> None:
    assert is_known(host, frozenset({"localhost", "box"})) is known


def test_a_foreign_host_is_refused(client: TestClient) -> None:
    answer = client.get("/v1/models", headers={"host": "evil.example"})
    assert answer.status_code == 403
    assert error_of(answer)["code"] == "unknown_host"


@pytest.mark.parametrize(
    ("origin", "status"),
    [
        ("http://localhost", 200),
        ("vscode-webview://abc", 200),
        ("https://evil.example", 403),
        ("http://localhost:3000", 403),
        ("null", 403),
    ],
)
def test_pages_of_elsewhere_are_refused(origin: str, status: int, client: TestClient) -> None:
    answer = client.get("/v1/models", headers={"origin": origin})
    assert answer.status_code == status
    assert "access-control-allow-origin" not in answer.headers


def test_pages_and_names_that_are_allowed(model: treadle.Model) -> None:
    page = "https://page.example"
    with (
        running(model, allow_origins=(page,), allow_hosts=("Box.Example",)) as service,
        talking(service) as client,
    ):
        headers = {"origin": page, "host": "box.example"}
        answer = client.get("/v1/models", headers=headers)
        assert answer.status_code == 200
        assert answer.headers["access-control-allow-origin"] == page
        asked = {"access-control-request-method": "POST", **headers}
        assert client.options("/v1/completions", headers=asked).status_code == 200
        asked_to_delete = {**asked, "access-control-request-method": "DELETE"}
        assert client.options("/v1/responses/x", headers=asked_to_delete).status_code == 200
        private = {"access-control-request-private-network": "true"}  # as Chrome asks
        answer = client.options("/v1/completions", headers={**asked, **private})
        assert answer.status_code == 200
        assert answer.headers["access-control-allow-private-network"] == "true"


def test_keys(model: treadle.Model) -> None:
    with running(model, api_keys=("one", "zwö")) as service, talking(service) as client:
        assert client.get("/health").status_code == 200
        for headers in (
            {},
            {"authorization": "Bearer on"},
            {"x-api-key": "onex"},
            {"x-api-key": ""},
        ):
            answer = client.get("/v1/models", headers=headers)
            assert answer.status_code == 401
            assert error_of(answer)["code"] == "invalid_api_key"
        for good in (
            {"authorization": "Bearer one"},
            {"authorization": "bearer one"},
            {"x-api-key": "one", "host": "any.example", "origin": "https://any.example"},
        ):
            assert client.get("/v1/models", headers=good).status_code == 200
        other = client.get("/v1/models", headers={b"x-api-key": "zwö".encode()})
        assert other.status_code == 200


# -- errors and the log ---------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("error", "status"),
    [
        (NoRoomError("x"), 503),
        (ContextFullError("x"), 400),
        (SamplingError("x"), 400),
        (FileError("x", path="m"), 500),
        (ZeroDivisionError("a secret"), 500),
    ],
)
def test_errors_of_the_library(error: Exception, status: int) -> None:
    found = problem_of(error)
    assert found.status == status
    assert "secret" not in str(found.as_dict())
    assert ("Retry-After" in found.headers) == (status == 503)


def test_a_bug_of_ours_is_a_500_without_detail(
    service: Service, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def breaks(*_: object) -> None:
        raise ZeroDivisionError("a secret")

    monkeypatch.setattr(service.model, "tokenize", breaks)
    monkeypatch.setattr(service, "settings", replace(service.settings, log=True))
    with talking(service, raise_server_exceptions=False) as client:
        given = {"x-request-id": "my-1"}
        answer = client.post("/v1/completions", json={"prompt": "x"}, headers=given)
    assert answer.status_code == 500
    assert answer.headers["x-request-id"] == "my-1"
    assert answer.headers["connection"] == "close"  # or the next call on it would be reset
    assert error_of(answer)["type"] == "server_error"
    assert "secret" not in answer.text
    assert json.loads(capsys.readouterr().err)["status"] == 500


def test_a_line_for_each_call_and_nothing_of_what_was_said(
    model: treadle.Model, capsys: pytest.CaptureFixture[str]
) -> None:
    with running(model, log=True) as service, talking(service) as client:
        body = {"prompt": "swordfish", "max_tokens": 3}
        given = {"x-request-id": "my-1"}
        answer = client.post("/v1/completions", json=body, headers=given)
        assert answer.headers["x-request-id"] == "my-1"
        odd = client.get("/health", headers={"x-request-id": "\x1b[31m"})
        assert "\x1b" not in odd.headers["x-request-id"]
        client.get("/nothing%1b")
    err = capsys.readouterr().err
    assert "swordfish" not in err
    assert "\x1b" not in err
    first, second, third = map(json.loads, err.splitlines())
    assert (first["id"], first["status"], first["path"]) == ("my-1", 200, "/v1/completions")
    assert (first["n_written"], first["finish"]) == (3, ["length"])
    assert (second["status"], third["status"]) == (200, 404)


def test_a_log_with_texts_for_who_asks(
    model: treadle.Model, capsys: pytest.CaptureFixture[str]
) -> None:
    with running(model, log=True, log_text=True) as service, talking(service) as client:
        made = client.post("/v1/completions", json={"prompt": "swordfish", "max_tokens": 3})
    line = json.loads(capsys.readouterr().err)
    assert line["prompts"] == ["swordfish"]
    assert line["written"] == [made.json()["choices"][0]["text"]]
    assert 0 <= line["queue_s"] <= line["first_token_s"] <= line["seconds"]


def test_health_while_loading_and_when_the_model_is_broken(model: treadle.Model) -> None:
    service = Service(model)
    with talking(service) as client:
        for path in ("/health", "/v1/completions"):
            answer = client.request(
                "GET" if path == "/health" else "POST", path, json={"prompt": "x"}
            )
            assert answer.status_code == 503
            assert answer.headers["retry-after"] == "1"
        assert client.get("/v1/models").status_code == 200
        service.engine.state = "error"
        service.engine.why = "the file shrank"
        assert client.get("/health").status_code == 500
        answer = client.post("/v1/completions", json={"prompt": "x"})
        assert answer.status_code == 500
        assert "shrank" in error_of(answer)["message"]
    service.close()


def test_calls_of_several_keys_take_turns_by_key(
    model: treadle.Model, monkeypatch: pytest.MonkeyPatch
) -> None:
    for keys, found in ((("a", "b"), [0, 1]), (("a",), [None])):
        with running(model, api_keys=keys) as service, talking(service) as client:
            told = list[int | None]()
            add = service.engine.scheduler.add

            def noted(request: Request, add: Any = add, told: list[int | None] = told) -> None:
                told.append(request.key)  # type: ignore[arg-type]
                add(request)

            monkeypatch.setattr(service.engine.scheduler, "add", noted)
            for key in keys:
                headers = {"x-api-key": key}
                body = {"prompt": "x", "max_tokens": 1, "user": "same"}
                assert client.post("/v1/completions", json=body, headers=headers).is_success
            assert told == found
            monkeypatch.undo()
