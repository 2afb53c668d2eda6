"""API keys: the file, its limits, and the answers to callers who exceed them."""

from __future__ import annotations

import json
import os
from pathlib import Path
from typing import Any

import pytest

import treadle
from tests.server.conftest import running, talking
from treadle.errors import FileError
from treadle.server.http.api_errors import ApiError
from treadle.server.http.api_keys import ApiKey, ApiKeyStore, read_keys


@pytest.fixture
def file(tmp_path: Path) -> Path:
    return tmp_path / "keys"


class Clock:
    now = 100.0

    def __call__(self) -> float:
        return self.now


def refused(ring: ApiKeyStore, key: ApiKey) -> str:
    """Retry-After of a request that may not begin."""
    with pytest.raises(ApiError) as caught:
        ring.begin(key)
    assert caught.value.status == 429
    return caught.value.headers["Retry-After"]


def test_a_file_of_keys(file: Path) -> None:
    file.write_text(
        "# ours\n\nplain==\r\n"
        "other name=alice requests=2 requests_per_minute=3 Tokens-Per-Minute=4 models=a,b\n"
    )
    plain, other = read_keys(file)
    assert plain == ApiKey(b"plain==", "line-3")
    assert other == ApiKey(b"other", "alice", 2, 3, 4, ("a", "b"))
    assert other.may_use("b")
    assert not other.may_use("c")
    assert plain.may_use("c")


@pytest.mark.every_case
@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("secret request=3", "line 1: unknown field 'request': did you mean requests?"),
        ("secret zzz=3", "expected one of name, requests, "),
        ("secret requests=0", "requests: expected a whole number from 1, found '0'"),
        ("secret models=,", "models: expected names"),
        ("secret name=", "name: expected a name of letters"),
        ("secret name=Zo\u00eb", "name: expected a name of letters"),
        ("secret half", "line 1: word 2 has no '='"),
        ("name=alice secret", "begins with a field"),
        ("secret\nsecret", "line 2: the key of line 1 stands here again"),
        ("secret name=a\nother name=a", "line 2: the name of line 1"),
        ("# secret", "there is no key in it"),
    ],
)
def test_a_wrong_file_of_keys(text: str, said: str, file: Path) -> None:
    """The line is named, and no key is shown."""
    file.write_text(text, "utf-8")
    with pytest.raises(FileError) as caught:
        read_keys(file)
    assert said in str(caught.value)
    assert "secret" not in str(caught.value)


def test_files_that_are_none(file: Path) -> None:
    with pytest.raises(FileError, match="No such file"):
        read_keys(file)
    file.write_bytes(b"a\n\xff")
    with pytest.raises(FileError, match="byte 2: not UTF-8"):
        read_keys(file)
    file.write_bytes(b"a" * (1 << 21))
    with pytest.raises(FileError, match="larger than 1 MiB"):
        read_keys(file)


def test_limits_of_a_key(file: Path) -> None:
    file.write_text("a requests=2\nb requests-per-minute=2\nc tokens-per-minute=60\n")
    clock = Clock()
    ring = ApiKeyStore((), file, clock=clock)
    at_once, rate, tokens = ring

    leases = [ring.begin(at_once), ring.begin(at_once)]
    refused(ring, at_once)
    leases[0].end()
    leases[0].end()  # counted once
    leases[0] = ring.begin(at_once)
    refused(ring, at_once)

    ring.begin(rate)
    ring.begin(rate)
    assert refused(ring, rate) == "30"
    clock.now += 29.0
    assert refused(ring, rate) == "1"
    clock.now += 1.0
    ring.begin(rate)

    ring.begin(tokens)
    ring.charge(tokens, 90)  # known when the text has ended
    assert refused(ring, tokens) == "31"  # 30 below nothing, and one to begin with
    clock.now += 31.0
    ring.begin(tokens)


def test_a_file_that_changes(file: Path) -> None:
    file.write_text("a requests=1\n")
    clock = Clock()
    told: list[str] = []
    ring = ApiKeyStore(["option"], file, told.append, clock)
    assert [key.name for key in ring] == ["key-1", "line-1"]
    found = ring.find({"authorization": "Bearer a"})
    assert found is not None
    ring.begin(found)

    def change(text: str) -> None:
        file.write_text(text)
        clock.now += 2.0

    change("b name=bob\na requests=1\n")
    bob = ring.find({"x-api-key": "b"})
    assert bob is not None
    assert bob.name == "bob"
    again = ring.find({"x-api-key": "a"})
    assert again is not None
    refused(ring, again)  # what it uses is not forgotten
    assert (ring.fairness_number(again), ring.fairness_number(bob)) == (1, 2)
    for broken in ("", "c requests=x\n"):
        change(broken)
        assert ring.find({"x-api-key": "b"}) is bob
        assert told.pop().endswith("the former keys stay in use")
    file.unlink()
    clock.now += 2.0
    assert ring.find({"x-api-key": "b"}) is bob
    assert not told


def test_callers_are_told_in_their_own_protocol(
    model: treadle.Model, file: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    file.write_text("secret name=alice requests-per-minute=1\nother models=else\n")
    with running(model, api_key_file=file, log=True) as service, talking(service) as client:
        body = {"max_tokens": 1, "messages": [{"role": "user", "content": "x"}]}
        headers = {"x-api-key": "secret"}

        def ask(path: str, **headers: str) -> Any:
            return client.post(path, json=body, headers=headers)

        assert ask("/v1/chat/completions", **headers).status_code == 200
        found = [ask(path, **headers) for path in ("/v1/chat/completions", "/v1/messages")]
        found.append(ask("/api/chat", **headers))
        for answer in found:
            assert answer.status_code == 429
            assert 50 <= int(answer.headers["retry-after"]) <= 60
        openai, anthropic, ollama = (answer.json() for answer in found)
        assert openai["error"]["code"] == "rate_limit_exceeded"
        assert anthropic["error"]["type"] == "rate_limit_error"
        assert "1 requests per minute" in ollama["error"]
        assert client.get("/v1/models", headers=headers).status_code == 200  # is not counted
        other = client.get("/v1/models", headers={"x-api-key": "other"})
        assert (other.status_code, other.json()["error"]["code"]) == (403, "model_not_allowed")
        assert client.get("/v1/models").status_code == 401
    err = capsys.readouterr().err
    assert "secret" not in err
    lines = [json.loads(line) for line in err.splitlines()]
    assert [line.get("key") for line in lines] == ["alice"] * 5 + ["line-2", None]


def test_tokens_are_counted(
    model: treadle.Model, file: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Those that are read and written; what is cached is free."""
    file.write_text("a tokens-per-minute=1000\n")
    with running(model, api_key_file=file) as service, talking(service) as client:
        charged: list[int] = []
        monkeypatch.setattr(service.keys, "charge", lambda key, n: charged.append(n))
        headers = {"x-api-key": "a"}
        for n_read in (9, 1):
            body = {"prompt": [5, 6, 7, 8, 9, 10, 11, 12, 13], "max_tokens": 4, "ignore_eos": True}
            answer = client.post("/v1/completions", json=body, headers=headers).json()
            details = answer["usage"]["prompt_tokens_details"]
            assert details["cached_tokens"] == 9 - n_read
            assert charged.pop() == n_read + 4
        answer = client.post("/v1/embeddings", json={"input": [[5, 6, 7]]}, headers=headers)
        assert answer.status_code == 200
        assert charged == [3]


def test_a_file_seen_twice_is_read_once(file: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    file.write_text("a\n")
    clock = Clock()
    ring = ApiKeyStore((), file, clock=clock)
    looks: list[object] = []
    stat = os.stat

    def looked(path: Any) -> os.stat_result:
        looks.append(path)
        return stat(path)

    monkeypatch.setattr(os, "stat", looked)
    for _ in range(5):
        ring.find({"x-api-key": "a"})
    assert looks == []
    clock.now += 1.0
    for _ in range(5):
        ring.find({"x-api-key": "a"})
    assert looks == [file]
