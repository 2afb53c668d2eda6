"""``treadle ps``: what a running server has loaded."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from typing import Any

import click

from treadle.cli.ui.table import n_bytes, n_weights, print_json, print_table, remark
from treadle.errors import TreadleError

ADDRESS = "http://127.0.0.1:8080"  # the default of `treadle serve`
UNIX = "unix:"  # an address that is a UNIX socket, as `treadle serve` prints it
TIMEOUT_S = 5.0
MAX_BODY = 1 << 22  # bytes of an answer
NOUNS = {"image": "pictures", "audio": "sounds"}


@click.command()
@click.option(
    "--url",
    default=ADDRESS,
    show_default=True,
    envvar="TREADLE_URL",
    help="Address of the server, as it is printed; the variable TREADLE_URL sets it too.",
)
@click.option(
    "--api-key",
    metavar="KEY",
    envvar="TREADLE_API_KEY",
    help="API key of the server. The variable TREADLE_API_KEY keeps it out of the list of "
    "processes.",
)
@click.option("--json", "as_json", is_flag=True, help="Print a list of objects.")
def command(url: str, api_key: str | None, as_json: bool) -> None:
    """Show the models that a running server has, and what it does now."""
    reports = ask_server(url.rstrip("/"), api_key)
    if as_json:
        print_json(reports)
    elif not reports:
        remark(f"{url}: the server has no models")
    else:
        print_models(reports)


def ask_server(url: str, api_key: str | None) -> list[dict[str, Any]]:
    """Return the facts of each model that a server has. Raises TreadleError if none answers."""
    listing = get(url, "/v1/models", api_key)
    models = listing.get("data") if isinstance(listing, dict) else None
    if not isinstance(models, list):
        raise TreadleError(f"{url}: the answer to /v1/models is no list of models")
    alone = len(models) == 1
    state = state_of(url, api_key) if alone else None
    slots = read_optional(url, "/slots", api_key) if alone else None
    return [report_of(model, state, slots) for model in models if isinstance(model, dict)]


def report_of(model: Mapping[str, Any], state: str | None, slots: Any) -> dict[str, Any]:
    """Return the facts of one model: of ``/v1/models``, and, of a server's only one, those of
    ``/health`` and ``/slots``.
    """
    meta = mapping(model.get("meta"))
    shape = mapping(model.get("architecture"))
    status = mapping(model.get("status"))
    busy = None
    if isinstance(slots, list):
        busy = [slot for slot in slots if mapping(slot).get("is_processing")]
    return {
        "name": str(model.get("id")),
        "state": str(status.get("value") or state or "unknown"),
        "n_parameters": meta.get("n_params"),
        "n_bytes": meta.get("size"),
        "n_context": meta.get("n_ctx"),
        "reads": list(shape.get("input_modalities") or ["text"]),
        "n_requests": None if busy is None else len(busy),
        "n_slots": len(slots) if isinstance(slots, list) else None,
    }


def state_of(url: str, api_key: str | None) -> str:
    """Return the state that ``/health`` tells: "ready", "loading", "failed" or "unknown"."""
    try:
        health = mapping(get(url, "/health", api_key))
    except TreadleError as error:
        text = str(error)
        return "loading" if "503" in text else "failed" if "500" in text else "unknown"
    return "ready" if health.get("status") == "ok" else str(health.get("status") or "unknown")


def read_optional(url: str, path: str, api_key: str | None) -> Any:
    """Return an endpoint's answer, None if the server has none."""
    try:
        return get(url, path, api_key)
    except TreadleError:
        return None


def get(base: str, path: str, api_key: str | None) -> Any:
    """Return the JSON that a server has at a path. Raises TreadleError if none answers, or with an
    error.
    """
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
            raise TreadleError(f"{base}: the server wants an API key: --api-key KEY") from error
        status = error.code
        raise TreadleError(f"{base}{path}: the server answered HTTP status {status}") from error
    except (URLError, OSError) as error:
        reason = getattr(error, "reason", None) or error
        raise TreadleError(
            f"no server answers at {base} ({reason}): start one with `treadle serve MODEL`, or "
            "name another with --url"
        ) from error
    except ValueError as error:
        raise TreadleError(
            f"{base}{path}: the answer is no JSON: is it a server of models?"
        ) from error


def get_tcp(url: str, headers: Mapping[str, str]) -> bytes:
    """Return the body of an address. Raises HTTPError, URLError and OSError."""
    from urllib.request import ProxyHandler, Request, build_opener

    opener = build_opener(ProxyHandler({}))
    with opener.open(Request(url, headers=dict(headers)), timeout=TIMEOUT_S) as answer:
        body: bytes = answer.read(MAX_BODY)
        return body


def get_unix(file: str, path: str, headers: Mapping[str, str]) -> bytes:
    """Return the body of a path of the server at a UNIX socket. Raises HTTPError and OSError."""
    from http.client import HTTPConnection, HTTPException
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
    except HTTPException as error:
        raise ValueError(str(error)) from error
    finally:
        connection.close()


def mapping(value: Any) -> Mapping[str, Any]:
    """Return a JSON object, an empty one for anything else."""
    return value if isinstance(value, dict) else {}


def print_models(reports: Sequence[Mapping[str, Any]]) -> None:
    """Print the models for people."""
    rows = []
    for report in reports:
        requests = report["n_requests"]
        rows.append(
            (
                report["name"],
                report["state"],
                n_weights(report["n_parameters"]) if report["n_parameters"] else "",
                n_bytes(report["n_bytes"]) if report["n_bytes"] else "",
                report["n_context"] or "",
                ", ".join(NOUNS.get(kind, kind) for kind in report["reads"]),
                "" if requests is None else f"{requests} of {report['n_slots']}",
            )
        )
    headers = ["name", "state", "params ", "size ", "context ", "reads", "slots in use"]
    print_table(headers, rows, optional=("params ", "reads"))
