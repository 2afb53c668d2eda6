"""``treadle ps``: what a running server has loaded."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import click

from treadle.base.humanize import n_bytes, n_weights
from treadle.cli.server_client import ADDRESS, API_KEY, StatusError, get, mapping
from treadle.cli.ui.table import print_json, print_table, remark
from treadle.errors import TreadleError

NOUNS = {"image": "pictures", "audio": "sounds"}


@click.command()
@click.option(
    "--url",
    default=ADDRESS,
    show_default=True,
    envvar="TREADLE_URL",
    help="Address of the server, as it is printed; the variable TREADLE_URL sets it too.",
)
@API_KEY
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
    """Return the facts of one model, an entry of ``/v1/models``. ``state`` and ``slots``: the
    answers of ``/health`` and ``/slots``, which are asked only if the server has one model; else
    None.
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
    """Return the server's state by ``/health``: "ready", "loading", "failed", "unknown", or its own
    word.
    """
    try:
        health = mapping(get(url, "/health", api_key))
    except StatusError as error:
        return {503: "loading", 500: "failed"}.get(error.status, "unknown")
    except TreadleError:
        return "unknown"
    return "ready" if health.get("status") == "ok" else str(health.get("status") or "unknown")


def read_optional(url: str, path: str, api_key: str | None) -> Any:
    """Return the JSON of an endpoint, None if the server does not have it."""
    try:
        return get(url, path, api_key)
    except TreadleError:
        return None


def print_models(reports: Sequence[Mapping[str, Any]]) -> None:
    """Print the models, as ``report_of`` returns them, as a table."""
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
