"""The addresses of a server: TCP hosts and UNIX sockets."""

from __future__ import annotations

import errno
import os
import socket
import stat
from collections.abc import Sequence
from contextlib import suppress

from treadle.errors import FileError, TreadleError
from treadle.system import SYSTEM

BACKLOG = 2048  # connections that wait to be accepted
UNIX = "unix:"
ALL_INTERFACES = {"0.0.0.0": "127.0.0.1", "::": "::1"}  # and this machine's own address


def socket_path(host: str) -> str | None:
    """Return the path of a UNIX socket if ``host`` is ``unix:PATH`` or a path that ends in
    ``.sock`` (llama.cpp's form); None for a TCP host.
    """
    if host.startswith(UNIX):
        path = host.removeprefix(UNIX)
        return path[2:] if path.startswith("//") else path  # unix:///run/x.sock
    return host if host.endswith(".sock") else None


class Listeners:
    """The listening sockets of a server, at ``hosts``. Call ``close`` at the end.

    With port 0 the first TCP host takes any free port, and the others take the same one. Raises
    TreadleError if one of ``hosts`` cannot be listened on; none is then left open.
    """

    def __init__(self, hosts: Sequence[str], port: int) -> None:
        self.tcp: list[socket.socket] = []
        self.unix: list[socket.socket] = []
        self._files: list[tuple[str, os.stat_result]] = []  # of the UNIX sockets
        try:
            for host in hosts:
                self._open(host, port)
        except BaseException:
            self.close()
            raise

    def _open(self, host: str, port: int) -> None:
        path = socket_path(host)
        if path is None:
            same = self.tcp[0].getsockname()[1] if self.tcp else port
            self.tcp.append(listen(host, same))
        else:
            self.unix.append(listen_at_file(path))
            self._files.append((os.path.abspath(path), os.stat(path)))

    def urls(self, *, tls: bool, prefix: str = "") -> list[str]:
        """Return the addresses for clients, TCP first: ``http://HOST:PORT`` (``https`` with
        ``tls``) followed by ``prefix``, then ``unix:PATH``.
        """
        tcp = [address_of(each, "https" if tls else "http") + prefix for each in self.tcp]
        return [*tcp, *(f"{UNIX}{path}" for path, _ in self._files)]

    def close(self) -> None:
        """Close all sockets, and remove the files of UNIX sockets that are still this server's."""
        for each in (*self.tcp, *self.unix):
            each.close()
        for path, made in self._files:
            with suppress(OSError):
                if os.path.samestat(os.stat(path), made):
                    os.unlink(path)
        self._files = []


def listen(host: str, port: int) -> socket.socket:
    """Return a listening TCP socket at ``host``; port 0 means any free port. Raises TreadleError if
    the address cannot be listened on.
    """
    try:
        found = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM, flags=socket.AI_PASSIVE)
        family, _, _, _, address = found[0]
        return socket.create_server(address, family=family, backlog=BACKLOG)
    except OSError as error:
        why = error.strerror or str(error)
        if error.errno == errno.EADDRINUSE:
            why = "another process does: choose another one with --port, or 0 for any free one"
        elif "/" in host or (isinstance(error, socket.gaierror) and ":" in host):
            why = "expected the name or address of this machine alone: its port is --port"
        raise TreadleError(f"cannot listen on {host} port {port}: {why}") from error


def listen_at_file(path: str) -> socket.socket:
    """Return a listening UNIX socket at ``path`` that only this user may open. A socket file that
    no process listens to any more is replaced. Raises TreadleError if the path is in use or cannot
    be created.
    """
    try:
        with suppress(FileNotFoundError):
            _remove_stale(path)
        return SYSTEM.unix_listener(path, BACKLOG)
    except OSError as error:
        why = error.strerror or error
        raise TreadleError(f"cannot listen at the socket {path}: {why}") from error


def _remove_stale(path: str) -> None:
    if not stat.S_ISSOCK(os.lstat(path).st_mode):
        raise FileError(
            "there is a file that is no socket: name another path, or remove it", path=path
        )
    try:
        SYSTEM.connect_unix(path).close()
    except ConnectionRefusedError:
        os.unlink(path)
    else:
        raise TreadleError(f"cannot listen at the socket {path}: another process does")


def address_of(listener: socket.socket, scheme: str = "http") -> str:
    """Return the URL, with ``scheme``, at which clients on this machine reach the TCP socket
    ``listener``: loopback for a socket on all interfaces.
    """
    host, port = listener.getsockname()[:2]
    host = ALL_INTERFACES.get(host, host)
    return f"{scheme}://[{host}]:{port}" if ":" in host else f"{scheme}://{host}:{port}"
