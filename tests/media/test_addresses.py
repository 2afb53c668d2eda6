"""Pictures from addresses: public hosts only, whatever names, redirects and answers say.

The resolver and the socket are faked: names have public addresses, and what is connected to those
reaches a server on this machine.
"""

from __future__ import annotations

import gzip
import socket
import ssl
import threading
import time
from collections.abc import Iterator
from contextlib import suppress
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

import pytest

from treadle.errors import FileError, TreadleError, UnsupportedError
from treadle.media import addresses
from treadle.media.address_policy import AddressPolicy, is_address
from treadle.media.addresses import fetch_media
from treadle.media.public_addresses import is_public
from treadle.media.source import read_picture, read_sound

CERTIFICATE = Path(__file__).parent / "pictures_example.pem"  # of pictures.example, until 2126
ON = AddressPolicy(enabled=True)
QUICK = AddressPolicy(enabled=True, max_seconds=1)
PUBLIC = "93.184.215.14"
CONTENT = b"a picture's bytes" * 999


class Handler(BaseHTTPRequestHandler):
    """Answers by path."""

    protocol_version = "HTTP/1.1"

    def do_GET(self) -> None:
        self.server.seen.append((self.path, dict(self.headers)))  # type: ignore[attr-defined]
        name = self.path.split("?")[0].strip("/").replace("-", "_")
        with suppress(OSError):  # the client may be gone
            getattr(self, f"answer_{name}", self.answer_content)()

    def log_message(self, format: str, *args: Any) -> None:
        pass

    def put(self, body: bytes, status: int = 200, **headers: str) -> None:
        self.send_response(status)
        for name, value in {"Content_Length": str(len(body)), **headers}.items():
            self.send_header(name.replace("_", "-"), value)
        self.end_headers()
        self.wfile.write(body)

    def answer_content(self) -> None:
        self.put(CONTENT)

    def answer_absent(self) -> None:
        self.put(b"no", 404)

    def answer_gzip(self) -> None:
        self.put(gzip.compress(bytes(1 << 20)), Content_Encoding="gzip")

    def answer_large(self) -> None:
        self.put(b"", Content_Length="99000000")

    def answer_larger_than_stated(self) -> None:
        self.send_response(200)
        self.send_header("Transfer-Encoding", "chunked")
        self.end_headers()
        for _ in range(2000):
            self.wfile.write(b"10000\r\n" + bytes(0x10000) + b"\r\n")

    def answer_chunked(self) -> None:
        self.send_response(200)
        self.send_header("Transfer-Encoding", "chunked")
        self.end_headers()
        for part in (CONTENT[:100], CONTENT[100:]):
            self.wfile.write(b"%x\r\n%s\r\n" % (len(part), part))
        self.wfile.write(b"0\r\n\r\n")

    def answer_until_closed(self) -> None:
        self.send_response(200)
        self.send_header("Connection", "close")
        self.end_headers()
        self.wfile.write(CONTENT)
        self.close_connection = True

    def answer_cut(self) -> None:
        self.put(CONTENT[:500], Content_Length="1000")
        self.close_connection = True

    def answer_slow_body(self) -> None:
        self.send_response(200)
        self.send_header("Content-Length", "1000")
        self.end_headers()
        self.drip(b"a" * 1000)

    def answer_slow_head(self) -> None:
        self.drip(b"HTTP/1.1 200 OK\r\n" + b"X: a\r\n" * 1000)

    def answer_slow_close(self) -> None:
        self.send_response(200)
        self.send_header("Connection", "close")
        self.end_headers()
        self.drip(b"a" * 1000)

    def answer_silence(self) -> None:
        time.sleep(3)

    def drip(self, data: bytes) -> None:
        """A byte every tenth of a second: no single read takes long."""
        for i in range(len(data)):
            self.wfile.write(data[i : i + 1])
            self.wfile.flush()
            time.sleep(0.1)

    def redirect(self, to: str, status: int = 302) -> None:
        self.put(b"", status, Location=to)

    def answer_redirect(self) -> None:
        self.redirect(self.path.partition("?")[2])

    def answer_circle(self) -> None:
        self.redirect("/circle")

    def answer_three(self) -> None:
        n = int(self.path.partition("?")[2])
        self.redirect(f"/three?{n - 1}" if n > 1 else "/content", (301, 307, 308)[n % 3])


class Network:
    """The names that resolve, the addresses that were connected to, and the requests seen."""

    def __init__(self, server: Any) -> None:
        self.names: dict[str, list[list[str]]] = {}
        self.resolved: list[str] = []
        self.connected: list[tuple[str, int]] = []
        self.seen: list[tuple[str, dict[str, str]]] = server.seen
        self._port = server.server_address[1]

    def resolve(self, host: str, port: int) -> list[str]:
        self.resolved.append(host)
        answers = self.names.get(host, [[PUBLIC]])
        return answers.pop(0) if len(answers) > 1 else answers[0]

    def open_socket(self, address: str, port: int, seconds: float) -> socket.socket:
        self.connected.append((address, port))
        assert is_public(address)
        return socket.create_connection(("127.0.0.1", self._port), timeout=seconds)


@pytest.fixture(scope="module")
def server() -> Iterator[Any]:
    made = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
    made.daemon_threads = True
    made.seen = []  # type: ignore[attr-defined]
    thread = threading.Thread(target=made.serve_forever, args=(0.01,))
    thread.start()
    yield made
    made.shutdown()
    thread.join()
    made.server_close()


@pytest.fixture
def network(server: Any, monkeypatch: pytest.MonkeyPatch) -> Network:
    server.seen.clear()
    made = Network(server)
    monkeypatch.setattr(addresses, "resolve", made.resolve)
    monkeypatch.setattr(addresses, "open_socket", made.open_socket)
    return made


# -- the policy ------------------------------------------------------------------------------------


def test_it_is_off_by_default(network: Network) -> None:
    for read in (read_picture, read_sound):
        with pytest.raises(UnsupportedError, match=r"^http://a\.example/content: .* is off"):
            read("http://a.example/content")
    with pytest.raises(UnsupportedError, match="is off"):
        fetch_media("http://a.example/", AddressPolicy())
    assert network.resolved == []


def test_the_defaults_are_those_documented() -> None:
    policy = AddressPolicy()
    assert (policy.enabled, policy.hosts, policy.max_bytes) == (False, (), 10_000_000)
    assert (policy.max_seconds, policy.max_redirects) == (10, 3)


def test_hosts_that_are_allowed(network: Network) -> None:
    policy = AddressPolicy(enabled=True, hosts=("a.example", ".B.example"))
    for host in ("a.example", "A.Example", "a.example.", "c.b.example", "d.c.b.example"):
        assert fetch_media(f"http://{host}/content", policy) == CONTENT
    network.connected.clear()
    for host in ("b.example", "ab.example", "a.example.evil.example", "c.a.example", PUBLIC):
        with pytest.raises(UnsupportedError, match="is not among the allowed ones"):
            fetch_media(f"http://{host}/content", policy)
    assert network.connected == []
    with pytest.raises(UnsupportedError, match=r"host evil\.example is not among the allowed ones"):
        fetch_media("http://a.example/redirect?http://evil.example/content", policy)


def test_allowed_hosts_are_public_too(network: Network) -> None:
    network.names["a.example"] = [["10.0.0.1"]]
    with pytest.raises(UnsupportedError, match="not on the public internet"):
        fetch_media("http://a.example/", AddressPolicy(enabled=True, hosts=("a.example",)))
    assert network.connected == []


# -- addresses -------------------------------------------------------------------------------------

PRIVATE = """
    0.0.0.0 0.1.2.3 10.0.0.1 10.255.255.255 100.64.0.1 100.100.100.200 100.127.255.255 127.0.0.1
    127.255.255.255 168.63.129.16 169.254.0.1 169.254.169.254 172.16.0.1 172.31.255.255
    192.0.0.1 192.0.2.1 192.88.99.1 192.168.0.1 192.168.255.255 198.18.0.1 198.19.255.255
    198.51.100.7 203.0.113.9 224.0.0.1 239.255.255.255 240.0.0.1 255.255.255.255 :: ::1 ::7f00:1
    ::ffff:127.0.0.1 ::ffff:10.0.0.1 ::ffff:93.184.215.14 64:ff9b::7f00:1 64:ff9b::a00:1
    64:ff9b:1::1 100::1 2001::1 2001:0:53aa:64c::1 2001:db8::1 2002:7f00:1:: 2002:a00:1::1
    3fff::1 5f00::1 fc00::1 fd00:ec2::254 fe80::1 fe80::1%eth0 febf::1 fec0::1 ff02::1
    2606:4700::1111%eth0
"""
OPEN = """
    1.1.1.1 8.8.8.8 9.255.255.255 11.0.0.0 93.184.215.14 100.63.255.255 100.128.0.0
    126.255.255.255 128.0.0.0 172.15.255.255 172.32.0.0 192.167.255.255 192.169.0.0
    198.17.255.255 198.20.0.0 223.255.255.255 2606:4700::1111 2001:4860:4860::8888
    2a00:1450:4001::1
"""


def test_which_addresses_are_public() -> None:
    assert [address for address in PRIVATE.split() if is_public(address)] == []
    assert [address for address in OPEN.split() if not is_public(address)] == []
    for text in ("", "a", "127.1", "0x7f.1", "2130706433", "1.1.1.1 ", "[::1]"):
        assert not is_public(text)


def test_private_addresses_are_not_connected_to(network: Network) -> None:
    for address in PRIVATE.split():
        for answer in ([address], [PUBLIC, address], [address, PUBLIC]):
            network.names["a.example"] = [answer]
            with pytest.raises(UnsupportedError, match=r"host a\.example is not on the") as caught:
                fetch_media("http://a.example/content", ON)
            assert address not in str(caught.value)  # nothing of this network's names
    assert network.connected == []


@pytest.mark.parametrize(
    "host",
    ["127.0.0.1", "localhost", "2130706433", "0x7f000001", "127.1", "0177.0.0.1", "0", "[::1]"],
)
def test_this_machine_by_its_own_resolver(host: str) -> None:
    """Nothing is faked: the system's resolver reads all of these."""
    for url in (f"http://{host}:9/", f"https://{host}:9/"):
        with pytest.raises((UnsupportedError, FileError), match=r"public internet|cannot be read"):
            fetch_media(url, ON)


def test_a_name_is_resolved_once(network: Network) -> None:
    """A second answer, for this network, is never asked for."""
    network.names["a.example"] = [[PUBLIC], ["127.0.0.1"]]
    assert fetch_media("http://a.example/content", ON) == CONTENT
    assert network.resolved == ["a.example"]
    assert network.connected == [(PUBLIC, 80)]
    with pytest.raises(UnsupportedError, match="not on the public internet"):
        fetch_media("http://a.example/content", ON)
    network.names["b.example"] = [[PUBLIC], ["127.0.0.1"]]
    with pytest.raises(UnsupportedError, match="not on the public internet"):
        fetch_media("http://b.example/redirect?http://b.example/content", ON)


def test_further_addresses_are_tried(network: Network, monkeypatch: pytest.MonkeyPatch) -> None:
    network.names["a.example"] = [["2606:4700::1111", PUBLIC]]
    opened = network.open_socket

    def open_socket(address: str, port: int, seconds: float) -> socket.socket:
        if ":" in address:
            raise OSError(101, "Network is unreachable")
        return opened(address, port, seconds)

    monkeypatch.setattr(addresses, "open_socket", open_socket)
    assert fetch_media("http://a.example/content", ON) == CONTENT
    network.names["a.example"] = [["2606:4700::1111"]]
    with pytest.raises(FileError, match=r"a\.example cannot be read: Network is unreachable"):
        fetch_media("http://a.example/content", ON)


def test_a_name_that_does_not_resolve(network: Network, monkeypatch: pytest.MonkeyPatch) -> None:
    def resolve(host: str, port: int) -> list[str]:
        raise socket.gaierror(-2, "Name or service not known")

    monkeypatch.setattr(addresses, "resolve", resolve)
    with pytest.raises(FileError, match="cannot be read: Name or service not known"):
        fetch_media("http://a.example/", ON)


def test_a_resolver_that_does_not_answer(network: Network, monkeypatch: pytest.MonkeyPatch) -> None:
    over = threading.Event()
    monkeypatch.setattr(addresses, "resolve", lambda host, port: over.wait(5) and [])
    with pytest.raises(FileError, match="not read within 1 s"):
        fetch_media("http://a.example/", QUICK)
    over.set()


# -- what is asked ---------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "url",
    [
        "ftp://a.example/",
        "file:///etc/passwd",
        "//a.example/",
        "http:/a.example",
        "http://",
        "http://:80/",
        "http://user@a.example/",
        "http://user:word@a.example/",
        "http://@a.example/",
        "http://a.example:99999/",
        "http://a.example:x/",
        "http://a.example/a b",
        "http://a.example/\r\nX: y",
        "http://a.example\\@b.example/",
        "http://a..example/",
        "http://[::1/",
        "http://" + "a" * 64 + ".example/",
    ],
)
def test_addresses_that_are_refused(network: Network, url: str) -> None:
    with pytest.raises(TreadleError, match=r"^message 1: "):
        fetch_media(url, ON, "message 1")
    assert network.resolved == []


def test_requests(network: Network, monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("http_proxy", "HTTP_PROXY", "all_proxy"):
        monkeypatch.setenv(name, "http://127.0.0.1:9/")
    network.names["2606:4700::1111"] = [["2606:4700::1111"]]
    for url, host, port, path in (
        ("http://a.example", "a.example", 80, "/"),
        (
            "HTTP://A.example:8080/b%20c?d=e&f=%C3%A9#g",
            "a.example:8080",
            8080,
            "/b%20c?d=e&f=%C3%A9",
        ),
        ('http://b\u00fccher.example/\u00e9"<', "xn--bcher-kva.example", 80, "/%C3%A9%22%3C"),
        ("http://a.example?b", "a.example", 80, "/?b"),
        ("http://[2606:4700::1111]:81/", "[2606:4700::1111]:81", 81, "/"),
    ):
        assert is_address(url)
        assert fetch_media(url, ON) == CONTENT
        assert network.connected[-1][1] == port
        seen, headers = network.seen[-1]
        assert seen == path
        assert headers["Host"] == host
        assert set(headers) == {"Host", "User-Agent", "Accept", "Accept-Encoding"}
        assert headers["Accept-Encoding"] == "identity"


def test_redirects(network: Network) -> None:
    for url in ("http://a.example/three?3", "http://a.example/redirect?//b.example/content"):
        assert fetch_media(url, ON) == CONTENT
    assert network.resolved == ["a.example"] * 5 + ["b.example"]
    for url in ("http://a.example/three?4", "http://a.example/circle"):
        with pytest.raises(FileError, match="more than 3 redirects"):
            fetch_media(url, ON)
    none = AddressPolicy(enabled=True, max_redirects=0)
    with pytest.raises(FileError, match="more than 0 redirects"):
        fetch_media("http://a.example/three?1", none)


def test_redirects_are_checked(network: Network) -> None:
    network.names["inside.example"] = [["169.254.169.254"]]
    network.names["127.0.0.1"] = [["127.0.0.1"]]
    for to, words in (
        ("http://127.0.0.1/content", "not on the public internet"),
        ("http://inside.example/content", "not on the public internet"),
        ("file:///etc/passwd", "expected an address of http"),
        ("http://user:word@a.example/content", "password are not fetched"),
    ):
        with pytest.raises(UnsupportedError, match=rf"^message 1: .*{words}"):
            fetch_media(f"http://a.example/redirect?{to}", ON, "message 1")
    assert {address for address, _ in network.connected} == {PUBLIC}


# -- what is answered ------------------------------------------------------------------------------


def test_answers(network: Network) -> None:
    for path in ("content", "chunked", "until-closed"):
        assert fetch_media(f"http://a.example/{path}", ON) == CONTENT
    exact = AddressPolicy(enabled=True, max_bytes=len(CONTENT))
    for path in ("content", "chunked", "until-closed"):
        assert fetch_media(f"http://a.example/{path}", exact) == CONTENT
    small = AddressPolicy(enabled=True, max_bytes=len(CONTENT) - 1)
    for path in ("content", "chunked", "until-closed"):
        with pytest.raises(FileError, match=r"more than 17\.0 kB, the limit"):
            fetch_media(f"http://a.example/{path}", small)


def test_answers_that_are_refused(network: Network) -> None:
    for path, words in (
        ("absent", "a.example answered HTTP status 404"),
        ("gzip", "sent a compressed answer .gzip."),
        ("large", r"more than 10\.0 MB, the limit"),
        ("larger-than-stated", r"more than 10\.0 MB, the limit"),
        ("cut", "the answer ended after 500 of 1000 bytes"),
    ):
        with pytest.raises(FileError, match=rf"^message 1: .*{words}"):
            fetch_media(f"http://a.example/{path}", ON, "message 1")


@pytest.mark.parametrize("path", ["slow-body", "slow-head", "slow-close", "silence"])
def test_slow_answers(network: Network, path: str) -> None:
    """The time is for the whole: each byte comes soon after the one before."""
    with pytest.raises(FileError, match=r"^message 1: not read within 1 s$"):
        fetch_media(f"http://a.example/{path}", QUICK, "message 1")


# -- TLS -------------------------------------------------------------------------------------------


@pytest.fixture
def secure(monkeypatch: pytest.MonkeyPatch) -> Iterator[Network]:
    """A server with the certificate of pictures.example, which is trusted here."""
    made = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
    made.daemon_threads = True
    made.seen = []  # type: ignore[attr-defined]
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    context.load_cert_chain(CERTIFICATE)
    made.socket = context.wrap_socket(made.socket, server_side=True, do_handshake_on_connect=False)
    made.handle_error = lambda *_: None  # type: ignore[method-assign]  # a client that refuses
    thread = threading.Thread(target=made.serve_forever, args=(0.01,))
    thread.start()
    network = Network(made)
    monkeypatch.setattr(addresses, "resolve", network.resolve)
    monkeypatch.setattr(addresses, "open_socket", network.open_socket)
    yield network
    made.shutdown()
    thread.join()
    made.server_close()


def trusting() -> ssl.SSLContext:
    return ssl.create_default_context(cafile=str(CERTIFICATE))


def test_tls_by_the_hosts_name(secure: Network, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(addresses, "tls_context", trusting)
    assert fetch_media("https://pictures.example/content", ON) == CONTENT
    assert secure.connected == [(PUBLIC, 443)]
    assert secure.seen[0][1]["Host"] == "pictures.example"
    with pytest.raises(FileError, match=r"other\.example cannot be read: .*certificate is not acc"):
        fetch_media("https://other.example/content", ON)
    with pytest.raises(FileError, match="not read within 1 s"):
        fetch_media("https://pictures.example/slow-body", QUICK)


def test_strangers_certificates(secure: Network) -> None:
    with pytest.raises(FileError, match=r"its certificate is not accepted: self.signed"):
        fetch_media("https://pictures.example/content", ON)
    assert secure.seen == []


def test_a_handshake_that_does_not_end(monkeypatch: pytest.MonkeyPatch) -> None:
    with socket.create_server(("127.0.0.1", 0)) as silent:
        port = silent.getsockname()[1]
        monkeypatch.setattr(addresses, "resolve", lambda host, port: [PUBLIC])
        monkeypatch.setattr(
            addresses,
            "open_socket",
            lambda address, _, seconds: socket.create_connection(("127.0.0.1", port), seconds),
        )
        with pytest.raises(FileError, match="not read within 1 s"):
            fetch_media("https://a.example/", QUICK)
