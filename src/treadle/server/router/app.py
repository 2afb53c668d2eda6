"""The router's ASGI application: every path of the one-model server, forwarded to an engine or
answered by the router itself.
"""

from __future__ import annotations

from collections.abc import Awaitable, Callable
from typing import Any

from starlette.applications import Starlette
from starlette.requests import Request as HttpRequest
from starlette.routing import Route

from treadle.server import static
from treadle.server.app import DELETE, GET, NOT_YET, POST, guarded_app, missing, paths
from treadle.server.protocols import ollama, vllm
from treadle.server.router import endpoints, kept_streams
from treadle.server.router.service import RouterService

Endpoint = Callable[[HttpRequest], Awaitable[Any]]
# Paths with their methods that the router answers itself, or looks up among the engines.
OWN: dict[tuple[str, str], Endpoint] = {
    ("GET", "/"): ollama.root,
    ("GET", "/api/version"): ollama.version,
    ("GET", "/health"): endpoints.health,
    ("GET", "/metrics"): endpoints.metrics,
    ("GET", "/props"): endpoints.props,
    ("GET", "/slots"): endpoints.slots,
    ("GET", "/v1/models"): endpoints.models,
    ("POST", "/v1/models"): endpoints.start_download,
    ("DELETE", "/v1/models"): endpoints.delete_model,
    ("POST", "/v1/models/load"): endpoints.load,
    ("POST", "/v1/models/unload"): endpoints.unload,
    ("GET", "/v1/models/sse"): endpoints.model_events,
    ("GET", "/v1/models/{name:path}"): endpoints.one_model,
    ("GET", "/api/tags"): endpoints.tags,
    ("GET", "/api/ps"): endpoints.running,
    ("POST", "/api/show"): endpoints.show,
    ("POST", "/api/pull"): endpoints.pull,
    ("DELETE", "/api/delete"): endpoints.delete,
    ("POST", "/api/copy"): endpoints.copy,
    ("POST", "/api/chat"): endpoints.generate,
    ("POST", "/api/generate"): endpoints.generate,
    ("POST", "/v1/chat/completions/control"): endpoints.look_up,
    ("GET", "/v1/stream"): kept_streams.resume,
    ("DELETE", "/v1/stream"): kept_streams.stop,
    ("POST", "/v1/streams/lookup"): kept_streams.look_up,
    ("GET", "/version"): vllm.version,
}


def handler(method: str, path: str) -> Endpoint:
    """Return the router's endpoint for a method and path of the one-model server: the router's own,
    a look-up among the engines, or forwarding.
    """
    if (method, path) in OWN:
        return OWN[method, path]
    if "{id}" in path and path.startswith("/v1/responses/"):
        return endpoints.look_up
    return endpoints.forward


def build_router_app(service: RouterService) -> Starlette:
    """Build the ASGI application of a router; its paths are those of the one-model server and
    ``OWN``.
    """
    page = static.page_routes() if service.settings.page else []
    known = {
        (method, path)
        for method, table in (("POST", POST), ("GET", GET), ("DELETE", DELETE))
        for path in table
    }
    # The most frequent first: a call is compared with one route after the other.
    ordered = [*sorted(known - OWN.keys(), key=lambda each: (each[0] != "POST", each[1])), *OWN]
    routes = [*page]
    for method, path in ordered:
        answer = handler(method, path)
        routes += [Route(each, answer, methods=[method]) for each in paths(path)]
    own = {path for _, path in OWN}
    methods = ["GET", "POST", "PUT", "DELETE"]
    routes += [
        Route(each, missing, methods=methods)
        for path in NOT_YET
        if path not in own
        for each in paths(path)
    ]
    return guarded_app(service, routes, page)
