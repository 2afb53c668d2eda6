"""GET requests to a running server, for ``ps`` and ``launch``."""

from __future__ import annotations

import json
from collections.abc import Mapping
from typing import Any

import click

from treadle.errors import TreadleError

ADDRESS = "http://127.0.0.1:8080"  # the default of `treadle serve`
UNIX = "unix:"  # an address that is a UNIX socket, as `treadle serve` prints it
TIMEOUT_S = 5.0
MAX_BODY = 1 << 22  # bytes of an answer

API_KEY = click.option(
    "--api-key",
    metavar="KEY",
    envvar="TREADLE_API_KEY",
    help="API key of the server. The variable TREADLE_API_KEY keeps it out of the list of "
    "processes.",
)


class StatusError(TreadleError):
    """The server answered a request with an HTTP error; ``status``: its HTTP status."""

    def __init__(self, message: str, *, status: int) -> None:
        super().__init__(message)
        self.status = status


def get(base: str, path: str, api_key: str | None) -> Any:
    """Return the JSON that the server at ``base`` (``http://HOST:PORT`` or ``unix:PATH``) answers
    for ``path``. Raises StatusError for an HTTP error, TreadleError if no server or no JSON
    answers, click.UsageError for another form of ``base``.
    """
    from http.client import HTTPException
    from urllib.error import HTTPError, URLError

    headers = {"Authorization": f"Bearer {api_key}"} if api_key else {}
    try:
        if base.startswith(UNIX):
            return json.loads(get_unix(base.removeprefix(UNIX), path, headers))
        if not base.startswith(("http://", "https://")):
            raise click.UsageError(f"--url {base}: expected http://HOST:PORT, or unix:PATH")
        return json.loads(get_tcp(base + path, headers))
    except HTTPError as error:
        if error.code == 401:
            message = f"{base}: the server wants an API key: --api-key KEY"
        else:
            message = f"{base}{path}: the server answered HTTP status {error.code}"
        raise StatusError(message, status=error.code) from error
    except (URLError, OSError) as error:
        reason = getattr(error, "reason", None) or error
        raise TreadleError(
            f"no server answers at {base} ({reason}): start one with `treadle serve MODEL`, or "
            "name another with --url"
        ) from error
    except (ValueError, HTTPException) as error:
        raise TreadleError(
            f"{base}{path}: the answer is no JSON over HTTP: is it a server of models?"
        ) from error


def get_tcp(url: str, headers: Mapping[str, str]) -> bytes:
    """Return the body of the answer to a GET request, at most MAX_BODY bytes. Proxies are not used.
    Raises HTTPError for an HTTP error; URLError and OSError if no server answers.
    """
    from urllib.request import ProxyHandler, Request, build_opener

    opener = build_opener(ProxyHandler({}))
    with opener.open(Request(url, headers=dict(headers)), timeout=TIMEOUT_S) as answer:
        body: bytes = answer.read(MAX_BODY)
        return body


def get_unix(file: str, path: str, headers: Mapping[str, str]) -> bytes:
    """Return the body of the answer of the server at the UNIX socket ``file`` to a GET request, at
    most MAX_BODY bytes. Raises HTTPError for an HTTP error, OSError if no server answers.
    """
    from http.client import HTTPConnection
    from urllib.error import HTTPError

    from treadle.system import SYSTEM

    connection = HTTPConnection("localhost", timeout=TIMEOUT_S)
    connection.sock = SYSTEM.connect_unix(file[2:] if file.startswith("//") else file)
    connection.sock.settimeout(TIMEOUT_S)
    try:
        connection.request("GET", path, headers=dict(headers))
        answer = connection.getresponse()
        if answer.status >= 400:
            raise HTTPError(f"{UNIX}{file}", answer.status, answer.reason, answer.headers, None)
        return answer.read(MAX_BODY)
    finally:
        connection.close()


def mapping(value: Any) -> Mapping[str, Any]:
    """Return ``value`` if it is a JSON object, else an empty one."""
    return value if isinstance(value, dict) else {}
