"""Fetches pictures and sounds from http(s) addresses: off by default, and from public hosts only.

A server that fetches addresses given by clients can be made to read its own private network. So a
host's name is resolved once, all of its addresses must be public, the socket is connected to one of
these addresses and not to the name, and each redirect is checked like the first address.
"""

from __future__ import annotations

import http.client
import socket
import ssl
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from urllib.parse import SplitResult, quote, urljoin, urlsplit

from treadle.base.fast_classes import dataclass
from treadle.base.humanize import scaled
from treadle.errors import FileError, UnsupportedError, why
from treadle.media.address_policy import AddressPolicy
from treadle.media.public_addresses import is_public

PORTS = {"http": 80, "https": 443}
REDIRECTS = (301, 302, 303, 307, 308)
_HEADERS = {"User-Agent": "treadle", "Accept": "image/*, audio/*", "Accept-Encoding": "identity"}
_PART = 1 << 16  # bytes of one read


def fetch_media(url: str, policy: AddressPolicy, place: str | None = None) -> bytes:
    """Return the bytes at an http or https address. ``place``: name of the address in errors; None:
    the address itself.

    No proxy, cookie or credential is used, and a compressed answer is refused. Raises
    UnsupportedError if ``policy`` forbids the address, FileError if the host cannot be reached or
    its answer is not a file within the limits.
    """
    place = place or url[:200]
    if not policy.enabled:
        raise UnsupportedError(
            f"{place}: fetching of addresses is off: send the file itself, or turn it on"
        )
    deadline = _Deadline(policy.max_seconds, place)
    with deadline:
        for _ in range(policy.max_redirects + 1):
            target = _Target(url, policy, place)
            content = _fetch(target, policy, deadline)
            if isinstance(content, bytes):
                return content
            url = urljoin(url, content.location)
    raise FileError(f"more than {policy.max_redirects} redirects", path=place)


class _Target:
    """A checked address: host, port, and path with query. ``named``: value of the Host header;
    ``place``: name of the address in errors. Raises FileError for a malformed address,
    UnsupportedError for a host that the policy does not allow.
    """

    def __init__(self, url: str, policy: AddressPolicy, place: str) -> None:
        parts = _split(url, place)
        self.place = place
        self.secure = parts.scheme == "https"
        self.host = _host(parts, place)
        usual = PORTS[parts.scheme]
        self.port = usual if parts.port is None else parts.port
        shown = f"[{self.host}]" if ":" in self.host else self.host
        self.named = shown if self.port == usual else f"{shown}:{self.port}"
        query = f"?{parts.query}" if parts.query else ""
        self.path = quote((parts.path or "/") + query, safe="/?&=%:;,+@!$'()*~-._[]|")
        if not policy.allows(self.host):
            raise UnsupportedError(f"{place}: host {self.host} is not among the allowed ones")


def _split(url: str, place: str) -> SplitResult:
    """Return the parts of an address; ``place``: its name in errors. Raises FileError for one that
    is malformed, UnsupportedError for another scheme than http(s) or one with a user name or
    password.
    """
    # urlsplit removes some of these characters silently.
    if not all("!" <= c != "\x7f" for c in url) or "\\" in url:
        raise FileError("the address has spaces, backslashes or control characters", path=place)
    try:
        parts = urlsplit(url)
        _ = parts.port  # raises where it is no number below 65,536
    except ValueError as error:
        raise FileError(f"not an address: {error}", path=place) from None
    if parts.scheme not in PORTS or not parts.hostname:
        raise UnsupportedError(f"{place}: expected an address of http:// or https://")
    if parts.username is not None or parts.password is not None:
        raise UnsupportedError(f"{place}: addresses with a user name or password are not fetched")
    return parts


def _host(parts: SplitResult, place: str) -> str:
    """Return the host's name of an address in lower case, encoded as ASCII (IDNA), without a dot at
    its end.
    """
    name = (parts.hostname or "").rstrip(".")
    try:
        return name.encode("idna").decode("ascii").lower()
    except UnicodeError:
        raise FileError(f"{name!r:.80} is not a host's name", path=place) from None


@dataclass(frozen=True)
class _Redirect:
    """The ``Location`` header of an answer that redirects."""

    location: str


def _fetch(target: _Target, policy: AddressPolicy, deadline: _Deadline) -> bytes | _Redirect:
    """Send one request to ``target``; return the answer's content or its redirect."""
    with _plain_errors(target, deadline):
        connection = http.client.HTTPConnection(target.host, target.port)
        connection.sock = _connect(target, deadline)
        try:
            connection.request("GET", target.path, headers={"Host": target.named, **_HEADERS})
            with connection.getresponse() as answer:
                return _read(answer, target, policy)
        finally:
            connection.close()


def _read(
    answer: http.client.HTTPResponse, target: _Target, policy: AddressPolicy
) -> bytes | _Redirect:
    """Return an answer's content or redirect. Raises FileError for another status than 200, and for
    content that is compressed, cut or larger than the limit.
    """
    if answer.status in REDIRECTS and (location := answer.headers["Location"]):
        return _Redirect(location)
    if answer.status != 200:
        raise FileError(f"{target.host} answered HTTP status {answer.status}", path=target.place)
    coding = (answer.headers["Content-Encoding"] or "identity").strip().lower()
    if coding != "identity":
        raise FileError(f"{target.host} sent a compressed answer ({coding:.20})", path=target.place)
    declared = answer.length
    content = bytearray()
    if (declared or 0) <= policy.max_bytes:
        while len(content) <= policy.max_bytes and (part := answer.read(_PART)):
            content += part
    if max(declared or 0, len(content)) > policy.max_bytes:
        raise FileError(
            f"the answer has more than {scaled(policy.max_bytes, 'B')}, the limit",
            path=target.place,
        )
    if declared is not None and len(content) < declared:
        raise FileError(
            f"the answer ended after {len(content)} of {declared} bytes", path=target.place
        )
    return bytes(content)


@contextmanager
def _plain_errors(target: _Target, deadline: _Deadline) -> Iterator[None]:
    """Convert network errors in a ``with`` block to FileError; raise FileError too if the deadline
    has passed at its end.
    """
    try:
        yield
    except FileError:
        deadline.check()  # a socket that was shut down looks like an answer that was cut
        raise
    except (OSError, http.client.HTTPException) as error:
        deadline.check()
        if isinstance(error, ssl.SSLCertVerificationError):
            reason = f"its certificate is not accepted: {error.verify_message}"
        else:
            reason = (why(error) if isinstance(error, OSError) else "") or repr(error)
        raise FileError(f"{target.host} cannot be read: {reason:.200}", path=target.place) from None
    deadline.check()


# -- the socket -----------------------------------------------------------------------------------


def _connect(target: _Target, deadline: _Deadline) -> socket.socket:
    """Return a socket connected to one of the host's addresses; for https with TLS, which verifies
    the host's name.
    """
    failed: OSError | None = None
    for address in _public_addresses(target, deadline):
        try:
            plain = open_socket(address, target.port, deadline.left())
            break
        except OSError as error:
            failed = error
    else:
        raise failed or OSError("no address")
    deadline.watch(plain)
    if not target.secure:
        return plain
    try:
        secure = tls_context().wrap_socket(
            plain, server_hostname=target.host, do_handshake_on_connect=False
        )
    except BaseException:
        plain.close()
        raise
    deadline.watch(secure)
    try:
        secure.do_handshake()
    except BaseException:
        secure.close()
        raise
    return secure


def _public_addresses(target: _Target, deadline: _Deadline) -> list[str]:
    """Return the host's IP addresses. Raises UnsupportedError unless all of them are public."""
    found = list[str]()
    failed = list[OSError]()

    def ask() -> None:
        try:
            found.extend(resolve(target.host, target.port))
        except OSError as error:
            failed.append(error)

    # The system's resolver cannot be interrupted.
    thread = threading.Thread(target=ask, name="treadle-resolve", daemon=True)
    thread.start()
    thread.join(deadline.left())
    if failed:
        raise failed[0]
    deadline.check()
    # The message omits the address: it would reveal names inside this network.
    if not found or not all(map(is_public, found)):
        raise UnsupportedError(f"{target.place}: host {target.host} is not on the public internet")
    return found


def resolve(host: str, port: int) -> list[str]:
    """Return the IP addresses of a host, as the system's resolver gives them. Raises OSError."""
    try:
        rows = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM)
    except UnicodeError as error:
        raise OSError(str(error)) from None
    return list(dict.fromkeys(str(row[4][0]) for row in rows))


def open_socket(address: str, port: int, seconds: float) -> socket.socket:
    """Return a socket connected to a numeric IP address, with a timeout of ``seconds``. Raises
    OSError.
    """
    return socket.create_connection((address, port), timeout=seconds)


def tls_context() -> ssl.SSLContext:
    """Return TLS settings with the system's certificate authorities, and verification of host
    names.
    """
    return ssl.create_default_context()


class _Deadline:
    """Time limit of one fetch, with all redirects, as a context manager. When it passes, the socket
    given to ``watch`` is shut down.

    A socket's own timeout counts from the last byte: a host that sends one byte a second would
    never reach it.
    """

    def __init__(self, seconds: float, place: str) -> None:
        self._seconds = seconds
        self._place = place
        self._end = time.monotonic() + seconds
        self._lock = threading.Lock()
        self._socket: socket.socket | None = None
        self._timer = threading.Timer(seconds, self._shut_down)
        self._timer.daemon = True

    def __enter__(self) -> None:
        self._timer.start()

    def __exit__(self, *_: object) -> None:
        self._timer.cancel()

    def left(self) -> float:
        """Return the seconds left. Raises FileError if there are none."""
        self.check()
        return max(self._end - time.monotonic(), 0.001)

    def check(self) -> None:
        """Raise FileError if the deadline has passed."""
        if time.monotonic() >= self._end:
            raise FileError(f"not read within {self._seconds:g} s", path=self._place)

    def watch(self, connected: socket.socket) -> None:
        """Shut the socket ``connected`` down at the deadline, instead of the one watched before;
        also give it the time left as its timeout.
        """
        connected.settimeout(self.left())
        with self._lock:
            self._socket = connected

    def _shut_down(self) -> None:
        with self._lock:
            if self._socket is not None:
                with suppress(OSError):  # it is closed, or no longer connected
                    # Not SSLSocket's own method, which drops its TLS state under a reader.
                    socket.socket.shutdown(self._socket, socket.SHUT_RDWR)
