"""How a server is reached: addresses, UNIX sockets, TLS, a prefix; and what it tells of itself."""

from __future__ import annotations

import http.client
import json
import os
import signal
import socket
import ssl
import subprocess
from collections.abc import Callable
from contextlib import closing
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

import numpy as np
import pytest
from starlette.testclient import TestClient

import treadle
from tests.server.conftest import PATIENCE_S, Served, running, talking
from treadle.cli.commands.ps import ask_server
from treadle.errors import FileError, TreadleError
from treadle.server.http.listeners import Listeners, socket_path
from treadle.server.http.path_prefix import read_prefix
from treadle.server.http.tls import TlsFiles

# -- addresses ------------------------------------------------------------------------------------


@pytest.mark.every_case
@pytest.mark.parametrize(
    ("host", "path"),
    [
        ("127.0.0.1", None),
        ("box.example", None),
        ("unix:/run/x", "/run/x"),
        ("unix:///run/x", "/run/x"),
        ("unix:x", "x"),
        ("/run/x.sock", "/run/x.sock"),
    ],
)
def test_what_is_a_socket_file(host: str, path: str | None) -> None:
    assert socket_path(host) == path


def test_several_addresses_have_one_port(tmp_path: Path) -> None:
    file = tmp_path / "s"
    listeners = Listeners(("127.0.0.1", "127.0.0.2", f"unix:{file}"), 0)
    with closing(listeners):
        first, second, third = listeners.urls(tls=True, prefix="/x")
        assert first.startswith("https://127.0.0.1:")
        assert second == first.replace("127.0.0.1", "127.0.0.2")
        assert third == f"unix:{file}"
        assert file.stat().st_mode & 0o777 == 0o600
        with pytest.raises(TreadleError, match="another process does"):
            Listeners((f"unix:{file}",), 0)
        with pytest.raises(TreadleError, match=r"127\.0\.0\.2 port \d+: another process does"):
            Listeners(("127.0.0.2",), urlsplit(second).port or 0)
    assert not file.exists()


def test_socket_files_that_are_there(tmp_path: Path) -> None:
    """One that nobody listens to is replaced; no other file is touched."""
    file = tmp_path / "x.sock"
    with socket.socket(socket.AF_UNIX) as left:
        left.bind(str(file))
    with closing(Listeners((str(file),), 0)):
        with socket.socket(socket.AF_UNIX) as client:
            client.connect(str(file))
        file.unlink()
        file.write_text("another's")
    assert file.read_text() == "another's"
    with pytest.raises(FileError, match="no socket"):
        Listeners((str(file),), 0)
    with pytest.raises(TreadleError, match=r"cannot listen at the socket .*: No such file"):
        Listeners((f"unix:{tmp_path}/none/x",), 0)
    for address in ("http://127.0.0.1", "127.0.0.1:8080"):
        with pytest.raises(TreadleError, match=r"name or address of this machine alone: its port"):
            Listeners((address,), 0)


# -- TLS ------------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def pem(tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], Path]:
    """Files made by openssl: two pairs, an encrypted key, and one pair in one file."""
    folder = tmp_path_factory.mktemp("tls")

    def openssl(*words: str) -> None:
        subprocess.run(["openssl", *words], cwd=folder, check=True, capture_output=True)

    for name in ("a", "b"):
        curve = ("-pkeyopt", "ec_paramgen_curve:prime256v1")
        files = ("-keyout", f"{name}.key", "-out", f"{name}.crt", "-days", "2")
        names = ("-subj", "/CN=localhost", "-addext", "subjectAltName=DNS:localhost,IP:127.0.0.1")
        openssl("req", "-x509", "-newkey", "ec", *curve, "-nodes", *files, *names)
    openssl("pkey", "-in", "a.key", "-aes256", "-passout", "pass:x", "-out", "locked.key")
    texts = [(folder / name).read_text() for name in ("a.key", "a.crt")]
    (folder / "both.pem").write_text("".join(texts))
    (folder / "cut.crt").write_text(texts[1][:200])
    return lambda name: folder / name


@pytest.mark.every_case
@pytest.mark.parametrize(
    ("certificate", "key", "said"),
    [
        ("none.crt", "a.key", "none.crt: cannot be read: No such file"),
        ("a.crt", "none.key", "none.key: cannot be read: No such file"),
        ("a.crt", None, "a.crt: a private key was not found"),
        ("a.key", "a.key", "a.key: a certificate was not found"),
        ("a.crt", "b.key", "b.key: the private key does not belong to the certificate in "),
        ("a.crt", "locked.key", "locked.key: the private key is encrypted"),
        ("cut.crt", "a.key", "cut.crt: cannot be used for TLS"),
    ],
)
def test_files_that_are_no_pair(
    certificate: str, key: str | None, said: str, pem: Callable[[str], Path]
) -> None:
    with pytest.raises(FileError) as caught:
        TlsFiles(pem(certificate), None if key is None else pem(key))
    assert said in str(caught.value)


def served_by(tls: TlsFiles) -> str | None:
    """The certificate that a client of the context sees, as PEM."""
    ours, theirs = ssl.MemoryBIO(), ssl.MemoryBIO()
    trusting = ssl.create_default_context()
    trusting.check_hostname = False
    trusting.verify_mode = ssl.CERT_NONE
    server = tls.context.wrap_bio(ours, theirs, server_side=True)
    client = trusting.wrap_bio(theirs, ours)
    for _ in range(3):
        for each in (client, server):
            try:
                each.do_handshake()
            except ssl.SSLWantReadError:
                continue
    found = client.getpeercert(binary_form=True)
    return None if found is None else ssl.DER_cert_to_PEM_cert(found)


def test_a_certificate_is_renewed(pem: Callable[[str], Path], tmp_path: Path) -> None:
    certificate, key = tmp_path / "x.crt", tmp_path / "x.key"

    def take(name: str) -> str:
        key.write_bytes(pem(f"{name}.key").read_bytes())
        certificate.write_bytes(pem(f"{name}.crt").read_bytes())
        os.utime(certificate, (1, {"a": 1, "b": 2}[name]))
        return certificate.read_text()

    first = take("a")
    tls = TlsFiles(certificate, key)
    assert served_by(tls) == first
    key.write_text("-----BEGIN PRIVATE KEY-----")  # half a pair keeps the former one
    with pytest.raises(FileError):
        tls.refresh()
    assert served_by(tls) == first
    second = take("b")
    tls.refresh()
    assert served_by(tls) == second != first


@pytest.mark.slow
def test_a_server_with_a_door(process: Served, pem: Callable[[str], Path], tmp_path: Path) -> None:
    """TLS at two addresses, a UNIX socket without it, and a prefix."""
    file = tmp_path / "x.sock"
    hosts = ("--host", "127.0.0.1,127.0.0.2", "--host", str(file))
    server = process("--ssl-cert-file", str(pem("both.pem")), "--api-prefix", "/llm/", *hosts)
    assert server.popen.stdout is not None
    urls = [server.url, *(server.popen.stdout.readline().strip() for _ in range(2))]
    assert urls[2] == f"unix:{file}"
    context = ssl.create_default_context(cafile=pem("a.crt"))
    context.check_hostname = False  # the certificate has one of the addresses

    def get(url: str, path: str) -> tuple[int, bytes]:
        connection = http.client.HTTPSConnection(
            urlsplit(url).netloc, timeout=PATIENCE_S, context=context
        )
        with closing(connection):
            connection.request("GET", path)
            answer = connection.getresponse()
            return answer.status, answer.read()

    for url in urls[:2]:
        assert url.startswith("https://")
        assert url.endswith("/llm")
        assert get(url, "/llm/health") == (200, b'{"status":"ok"}')
        assert get(url, "/health")[0] == 404
    with socket.socket(socket.AF_UNIX) as raw:
        raw.connect(str(file))
        raw.sendall(b"GET /llm/health HTTP/1.1\r\nHost: any.example\r\n\r\n")
        assert raw.recv(1000).startswith(b"HTTP/1.1 200")
    with pytest.raises(TreadleError, match="HTTP status 404"):  # its paths have the prefix
        ask_server(f"unix:{file}", None)
    server.popen.send_signal(signal.SIGTERM)
    assert server.end()[0] == 0
    assert not file.exists()


# -- a prefix -------------------------------------------------------------------------------------


@pytest.mark.every_case
@pytest.mark.parametrize("text", ["x", "//x", "/a//b", "/a b", "/a?b", "/..", "/a/../b", "/%41"])
def test_what_is_no_prefix(text: str) -> None:
    with pytest.raises(ValueError, match="expected /NAME"):
        read_prefix(text)


def test_paths_below_a_prefix(model: treadle.Model) -> None:
    assert read_prefix("/a.b/c/") == "/a.b/c"
    assert read_prefix("/") == ""
    with running(model, api_prefix="/a/b") as service, talking(service) as client:
        assert client.get("/a/b/health").status_code == 200
        assert client.get("/a/b/v1/models").json()["data"]
        moved = client.get("/a/b", follow_redirects=False)
        assert (moved.status_code, moved.headers["location"]) == (308, "/a/b/")
        page = client.get("/a/b/", headers={"accept": "text/html"}).text
        assert 'src="page/app.js"' in page
        assert client.get("/a/b/page/app.js").status_code == 200
        for path in ("/health", "/", "/a", "/a/bc/health", "/a/b/a/b/health"):
            assert client.get(path).status_code == 404
        assert "/a/b" in client.get("/api/tags").json()["error"]


# -- what it tells, and what may be changed -------------------------------------------------------


def test_facts_of_the_server(client: TestClient, model: treadle.Model) -> None:
    assert client.get("/version").json() == {"version": treadle.__version__}
    facts = client.get("/tokenizer_info").json()
    assert facts["vocab_size"] == model.tokenizer.n_vocab
    assert facts["chat_template"] == model.template.source
    added = facts["added_tokens_decoder"]
    end = model.tokenizer.eos
    assert end is not None
    assert added[str(end)] == {"content": facts["eos_token"], "special": True}


def test_scores_of_vectors(client: TestClient) -> None:
    texts = ["def f(", "return 1", "def f("]
    rows = client.post("/v1/embeddings", json={"input": texts}).json()
    vectors = np.array([row["embedding"] for row in rows["data"]])
    expected = vectors[0] @ vectors[1:].T

    def scores(body: dict[str, Any]) -> list[float]:
        answer = client.post("/score", json=body)
        assert answer.status_code == 200, answer.text
        data = answer.json()["data"]
        assert [row["index"] for row in data] == list(range(len(data)))
        return [row["score"] for row in data]

    for names in (("text_1", "text_2"), ("queries", "documents"), ("data_1", "data_2")):
        assert scores(dict(zip(names, (texts[0], texts[1:]), strict=True))) == pytest.approx(
            expected, abs=1e-5
        )
    pairs = scores({"text_1": texts[:2], "text_2": texts[1:]})
    assert pairs == pytest.approx([expected[0], vectors[1] @ vectors[2]], abs=1e-5)
    usage = client.post("/score", json={"text_1": "a", "text_2": "a"}).json()["usage"]
    assert usage["prompt_tokens"] == usage["total_tokens"] > 1
    for body, at in (
        ({"text_1": ["a", "b"], "text_2": ["a"] * 3}, "text_1: 2 texts for 3 in text_2"),
        ({"text_1": "a"}, "text_2: expected a string"),
        ({"queries": "a", "documents": ["b", 1]}, "documents[1]: expected a string"),
        ({"text_1": "a", "text_2": ["b", "a " * 900]}, "text_2[1]: prompt is too long"),
    ):
        answer = client.post("/score", json=body)
        assert answer.status_code == 400
        assert answer.json()["error"]["message"].startswith(at)


def test_defaults_that_clients_may_change(model: treadle.Model) -> None:
    new: dict[str, Any] = {
        "default_generation_settings": {"params": {"temperature": 0, "top_k": 3}}
    }
    with running(model) as service, talking(service) as client:
        answer = client.post("/props", json=new)
        assert (answer.status_code, "--props" in answer.text) == (501, True)
    with running(model, props=True) as service, talking(service) as client:
        before = client.get("/props").json()
        assert before["endpoint_props"] is True
        params = before["default_generation_settings"]["params"]
        assert client.post("/props", json={}).json() == {"success": True}
        assert client.post("/props", json=new).json() == {"success": True}
        after = client.get("/props").json()["default_generation_settings"]["params"]
        assert after == params | {"temperature": 0.0, "top_k": 3}
        body = {"prompt": "def f(", "n_predict": 1}
        settings = client.post("/completion", json=body).json()["generation_settings"]
        assert (settings["temperature"], settings["top_k"]) == (0.0, 3)
        whole = json.loads(json.dumps(before["default_generation_settings"]["params"]))
        back = {"default_generation_settings": {"params": whole}}
        assert client.post("/props", json=back).json() == {"success": True}
        assert client.get("/props").json() == before
        for wrong, param in (
            ({"chat_template": "x"}, "chat_template"),
            ({"default_generation_settings": {"n_ctx": 5}}, "default_generation_settings.n_ctx"),
            (
                {"default_generation_settings": {"params": {"temprature": 5}}},
                "default_generation_settings.params.temprature",
            ),
            ({"default_generation_settings": {"params": {"top_k": "x"}}}, "top_k"),
        ):
            answer = client.post("/props", json=wrong)
            assert (answer.status_code, answer.json()["error"]["param"]) == (400, param)
