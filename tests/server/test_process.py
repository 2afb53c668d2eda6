"""``treadle serve`` as a process: the ready line, sockets, signals."""

from __future__ import annotations

import http.client
import json
import os
import resource
import signal
import socket
import subprocess
import sys
from contextlib import closing
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

import pytest

from tests.server.conftest import PATIENCE_S, ROOT, Process, Served, events, until
from treadle.cli import main

ENDLESS = {"prompt": "def f(", "max_tokens": 900, "ignore_eos": True}


def connect(url: str) -> http.client.HTTPConnection:
    return http.client.HTTPConnection(urlsplit(url).netloc, timeout=PATIENCE_S)


def ask(url: str, path: str, body: Any = None, **headers: str) -> tuple[int, str]:
    connection = connect(url)
    raw = None if body is None else json.dumps(body)
    connection.request("GET" if body is None else "POST", path, raw, headers)
    answer = connection.getresponse()
    found = answer.status, answer.read().decode()
    connection.close()
    return found


def running(url: str) -> float:
    """Texts in hand."""
    _, text = ask(url, "/metrics")
    return float(text.partition("\nllamacpp:requests_processing ")[2].split()[0])


@pytest.fixture
def slow(tmp_path: Path) -> Path:
    """A server writes slowly until this file is gone: no text ends by itself before a test is done
    with it.
    """
    file = tmp_path / "slow"
    file.touch()
    return file


def begin(url: str, body: Any) -> tuple[http.client.HTTPConnection, http.client.HTTPResponse]:
    """A stream whose first part is there."""
    connection = connect(url)
    connection.request("POST", "/v1/completions", json.dumps({**body, "stream": True}))
    answer = connection.getresponse()
    assert answer.readline().startswith(b"data: ")
    return connection, answer


def read_until(server: Process, said: str) -> None:
    """What the server says on standard error, up to a line with ``said``."""
    assert server.popen.stderr is not None
    assert any(said in line for line in server.popen.stderr)


@pytest.mark.slow
def test_a_server_from_its_ready_line_to_its_end(process: Served, slow: Path) -> None:
    server = process("--metrics", "--alias", "mine", slow=slow)
    assert server.url.startswith("http://127.0.0.1:")
    assert ask(server.url, "/health") == (200, '{"status":"ok"}')
    status, text = ask(server.url, "/v1/models")
    assert (status, json.loads(text)["data"][0]["id"]) == (200, "mine")
    status, text = ask(server.url, "/v1/completions", {"prompt": "x", "max_tokens": 3})
    assert status == 200

    # One who leaves: nothing is computed for him any more.
    connection, answer = begin(server.url, ENDLESS)
    assert running(server.url) == 1
    answer.close()
    connection.close()
    until(lambda: not running(server.url))
    _, text = ask(server.url, "/metrics")
    assert "treadle:cancelled_total 1.0" in text

    with socket.create_connection(("127.0.0.1", urlsplit(server.url).port), PATIENCE_S) as raw:
        raw.sendall(b"nonsense\r\n\r\n")
        assert raw.recv(100).startswith(b"HTTP/1.1 400")

    server.popen.send_signal(signal.SIGTERM)
    code, err = server.end()
    assert code == 0
    assert "demo.gguf is ready" in err
    lines = [json.loads(line) for line in err.splitlines() if line.startswith("{")]
    assert {"path": "/v1/completions", "status": 200}.items() <= lines[2].items()
    said = [line["message"] for line in lines if line.get("level") == "warning"]
    assert said == ["Invalid HTTP request received."]
    assert "Traceback" not in err


@pytest.mark.slow
@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT])
def test_what_is_being_written_may_end(number: signal.Signals, process: Served, slow: Path) -> None:
    """And nothing new is taken."""
    server = process("--grace", "120", "--no-log", slow=slow)
    connection, answer = begin(server.url, {**ENDLESS, "max_tokens": 150})  # 75 s while it is slow
    server.popen.send_signal(number)
    read_until(server, "1 requests have 120 s to finish")
    slow.unlink()
    found = events("data: {}\n\n" + answer.read().decode())
    assert found[-1] == "[DONE]"
    assert found[-2]["choices"][0]["finish_reason"] == "length"
    connection.close()
    assert server.end()[0] == 0


@pytest.mark.slow
def test_what_does_not_end_in_time_is_told_so(process: Served, slow: Path) -> None:
    server = process("--grace", "0", "--no-log", slow=slow)
    connection, answer = begin(server.url, ENDLESS)
    server.popen.send_signal(signal.SIGTERM)
    last = events(answer.read().decode())[-1]
    assert last["error"]["code"] == "overloaded"
    assert "stopping" in last["error"]["message"]
    connection.close()
    assert server.end()[0] == 0


@pytest.mark.slow
def test_who_calls_while_it_stops_is_told_so(process: Served) -> None:
    """It waits for a call whose body is not whole; others are told 503 meanwhile."""
    server = process("--grace", "100", "--no-log")
    with closing(connect(server.url)) as slow:
        slow.putrequest("POST", "/v1/completions")
        slow.putheader("content-length", "15")
        slow.putheader("expect", "100-continue")
        slow.endheaders()
        assert slow.sock.recv(100).startswith(b"HTTP/1.1 100")  # it waits for the body
        slow.send(b'{"prompt"')
        server.popen.send_signal(signal.SIGTERM)
        until(lambda: ask(server.url, "/health")[0] != 200)
        assert ask(server.url, "/health")[0] == 503
        status, text = ask(server.url, "/v1/completions", {"prompt": "x"})
        assert (status, "stopping" in text) == (503, True)
        slow.send(b': "x" ')
    # The rest will not come: that call is over.
    assert server.end()[0] == 0


@pytest.mark.slow
def test_a_second_signal_ends_it_at_once(process: Served, slow: Path) -> None:
    server = process("--grace", "600", "--no-log", slow=slow)
    connection, _ = begin(server.url, ENDLESS)
    server.popen.send_signal(signal.SIGINT)
    read_until(server, "a second signal")
    server.popen.send_signal(signal.SIGINT)
    assert server.end()[0] == 130
    connection.close()


@pytest.mark.slow
def test_a_key_from_the_environment_and_a_bound_on_memory(
    process: Served, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("TREADLE_API_KEY", "secret")
    server = process("--no-log", "--n-ctx", "1000", "--kv-mib", "1")
    assert ask(server.url, "/v1/models")[0] == 401
    status, text = ask(server.url, "/v1/models", authorization="Bearer secret")
    assert status == 200
    assert json.loads(text)["data"][0]["meta"]["n_ctx"] < 1000  # what 1 MiB holds
    assert ask(server.url, "/health")[0] == 200


def send_garbage(url: str, address: tuple[str, int]) -> None:
    """Bytes that are no request, and a header that no client may send, among idle connections."""
    idle = [socket.create_connection(address) for _ in range(50)]
    for garbage in (
        b"\x16\x03\x01" * 50,
        b"GET / HTTP/9.9\r\n\r\n",
        b"POST /v1/completions HTTP/1.1\r\n",
    ):
        idle[0].sendall(garbage)
        idle.append(idle.pop(0))
    smuggled = b"GET /health HTTP/1.1\r\nHost: localhost\r\nX-A: a\x00b\r\n\r\n"
    idle[3].sendall(smuggled)
    assert idle[3].recv(100).startswith(b"HTTP/1.1 400")
    assert ask(url, "/health")[0] == 200  # while they are open
    for each in idle:
        each.close()


@pytest.mark.slow
def test_garbage_and_thousands_of_open_connections_harm_nobody(process: Served) -> None:
    """10,000, where this process may have as many."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    n = min(10_000, hard - 500)
    resource.setrlimit(resource.RLIMIT_NOFILE, (max(soft, n + 400), hard))
    server = process("--no-log")
    there = urlsplit(server.url)
    assert there.hostname
    assert there.port
    address = there.hostname, there.port
    send_garbage(server.url, address)
    idle: list[socket.socket] = []
    try:
        for i in range(n):
            idle.append(socket.create_connection(address, timeout=60))
            if i % 3 == 0:
                idle[-1].sendall(b"POST /v1/completions HTTP/1.1\r\nHost: local")
        assert ask(server.url, "/health")[0] == 200
        body = {"prompt": "def f(", "max_tokens": 3}
        assert ask(server.url, "/v1/completions", body)[0] == 200
    finally:
        for each in idle:
            each.close()
        resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))
    server.popen.send_signal(signal.SIGTERM)
    assert server.end()[0] == 0


def test_a_port_that_is_taken(capsys: pytest.CaptureFixture[str]) -> None:
    with socket.create_server(("127.0.0.1", 0)) as taken:
        code = main(["serve", "--port", str(taken.getsockname()[1])])
    assert code == 1
    said = capsys.readouterr().err
    assert "cannot listen on 127.0.0.1 port" in said
    assert "another process does: choose another one with --port" in said


@pytest.mark.slow
def test_the_folder_of_saved_slots_is_made(
    tmp_path: Path, process: Served, capsys: pytest.CaptureFixture[str]
) -> None:
    folder = tmp_path / "a" / "b"
    server = process("--slot-save-path", str(folder))
    assert folder.is_dir()
    status, _ = ask(server.url, "/completion", {"prompt": "x", "n_predict": 2, "id_slot": 0})
    assert status == 200
    assert ask(server.url, "/slots/0?action=save", {"filename": "mine"})[0] == 200
    assert (folder / "mine").is_file()
    beneath = str(folder / "mine" / "c")
    assert main(["serve", "--port", "0", "--slot-save-path", beneath]) == 1
    assert "--slot-save-path: " in capsys.readouterr().err


@pytest.mark.parametrize("key", ["", " "])
def test_a_key_of_nothing(key: str, capsys: pytest.CaptureFixture[str]) -> None:
    """``--api-key "$UNSET"`` must not let everybody in."""
    assert main(["serve", "--port", "0", "--api-key", key]) == 2
    assert "--api-key: the key is empty" in capsys.readouterr().err


@pytest.mark.slow
def test_a_model_that_cannot_be_compiled_is_no_ready_server() -> None:
    """It says why, and ends."""
    environment = {**os.environ, "TREADLE_NO_COMPILE": "1", "TREADLE_CACHE": os.devnull + "/none"}
    ended = subprocess.run(
        [sys.executable, "-m", "treadle", "serve", "--port", "0"],
        cwd=ROOT,
        env=environment,
        capture_output=True,
        text=True,
        timeout=120,
    )
    assert (ended.returncode, ended.stdout) == (1, "")
    assert "treadle: error:" in ended.stderr
    assert "Traceback" not in ended.stderr


def test_without_the_extra_it_says_what_to_install(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr("treadle.cli.commands.serve.find_spec", lambda name: None)
    assert main(["serve"]) == 1
    assert "pip install 'treadle[serve]'" in capsys.readouterr().err
