"""Several replicas of a model at one address, on Ray Serve.

The front server reads a request's body, and passes it to the replica that has its prefix cached. A
replica is the whole server of ``treadle serve`` without its socket: it checks keys, hosts and
limits, and makes the error responses.
"""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncIterator, Callable
from typing import Any

from ray import serve
from ray.exceptions import RayError
from ray.serve.config import RequestRouterConfig
from starlette.requests import Request as HttpRequest
from starlette.responses import JSONResponse, Response, StreamingResponse

from treadle.distributed.cluster.affinity import beginning
from treadle.distributed.cluster.plan import ReplicaPlan
from treadle.distributed.cluster.router import PrefixRouter
from treadle.errors import TreadleError
from treadle.server.app import build_app
from treadle.server.http.api_errors import ApiError, GoneError
from treadle.server.http.http_io import LARGE, Bodies, parse, read_body
from treadle.server.requests.service import Service

# Keys of an ASGI scope that can be sent to another process.
KEPT = (
    *("type", "asgi", "http_version", "method", "path", "raw_path", "query_string", "headers"),
    *("client", "server", "scheme"),
)
APP = "treadle"
CLIENT_GONE = 499  # nginx's status for a client that left; nobody reads it
MAX_CALLS = 512  # in one replica; further ones wait in the front server


class Replica:
    """One model with its server, in a Ray Serve actor."""

    def __init__(self, plan: ReplicaPlan) -> None:
        self._model = plan.open()
        self._service = Service(self._model, plan.settings)
        self._service.engine.start()
        self._service.engine.warmed.result()
        self._app = build_app(self._service)

    def check_health(self) -> None:
        """Raise TreadleError if the model is no longer usable; Ray Serve then replaces the
        replica.
        """
        if self._service.engine.state == "error":
            raise TreadleError(self._service.engine.why)

    async def call(
        self, names: list[str], scope: dict[str, Any], body: bytes
    ) -> AsyncIterator[dict[str, Any]]:
        """Handle one request, and yield the response's ASGI messages. ``names``: prefix hashes,
        which only the router reads; ``scope``: the request's ASGI scope.
        """
        messages: asyncio.Queue[dict[str, Any] | None] = asyncio.Queue()
        gone = asyncio.Event()
        asked = False

        async def receive() -> dict[str, Any]:
            nonlocal asked
            if not asked:
                asked = True
                return {"type": "http.request", "body": body, "more_body": False}
            await gone.wait()
            return {"type": "http.disconnect"}

        async def send(message: Any) -> None:
            await messages.put(message)

        task = asyncio.ensure_future(self._app(scope, receive, send))
        task.add_done_callback(lambda _: messages.put_nowait(None))
        try:
            while (message := await messages.get()) is not None:
                yield message
        finally:
            gone.set()
            with contextlib.suppress(Exception):
                await task

    def __del__(self) -> None:
        service = getattr(self, "_service", None)
        if service is not None:
            service.close()
            self._model.close()


class FrontServer:
    """Serves the address: reads bodies of at most ``max_body`` bytes, and forwards requests to
    replicas.
    """

    def __init__(self, replica: Any, max_body: int) -> None:
        self._call = replica.options(stream=True).call
        self._bodies = Bodies(max_body)

    async def __call__(self, request: HttpRequest) -> Response:
        """Handle one request: read its body, and return the response of a replica."""
        try:
            with self._bodies.weighing() as weigh:
                body = await read_body(request, weigh, self._bodies.most)
                large = len(body) > LARGE
                names = await asyncio.to_thread(_names, body) if large else _names(body)
        except ApiError as error:
            return JSONResponse(error.as_dict(), error.status, error.headers)
        except GoneError:
            return Response(status_code=CLIENT_GONE)
        scope = {name: request.scope[name] for name in KEPT if name in request.scope}
        messages = self._call.remote(names, scope, body)
        try:
            head = await messages.__anext__()
        except RayError:
            lost = ApiError(500, "the replica's process ended during this request; retry")
            return JSONResponse(lost.as_dict(), lost.status)
        answer = StreamingResponse(_parts(messages), head["status"])
        answer.raw_headers = [(bytes(name), bytes(value)) for name, value in head["headers"]]
        return answer


def _names(body: bytes) -> list[str]:
    """Return the prefix hashes of a request body; [] if it is not JSON (the replica then refuses
    it).
    """
    try:
        return beginning(parse(body)) if body else []
    except ApiError:
        return []


async def _parts(messages: Any) -> AsyncIterator[bytes]:
    """Yield the bytes of the response's body from a replica's ASGI ``messages``, as they come; if
    the client disconnects, the replica's call is cancelled.
    """
    try:
        async for message in messages:
            if part := message.get("body"):
                yield part
    finally:
        messages.cancel()


def run(plan: ReplicaPlan, host: str, port: int, ready: Callable[[str], None]) -> None:
    """Start the application of ``plan`` on the connected Ray, or replace the running one; then call
    ``ready`` with its address.
    """
    serve.start(http_options={"host": host, "port": port})
    chosen_by: Any = PrefixRouter
    router = RequestRouterConfig(request_router_class=chosen_by)
    replica: Any = serve.deployment(
        Replica,
        num_replicas=plan.replicas,
        max_ongoing_requests=MAX_CALLS,
        ray_actor_options={"num_cpus": plan.cpus},
        request_router_config=router,
        health_check_period_s=5,
    )
    front: Any = serve.deployment(
        FrontServer, max_ongoing_requests=4 * MAX_CALLS, ray_actor_options={"num_cpus": 0.1}
    )
    serve.run(front.bind(replica.bind(plan), plan.max_body), name=APP, route_prefix="/")
    shown = {"0.0.0.0": "127.0.0.1", "::": "[::1]"}.get(host, host)
    ready(f"http://{shown}:{port}")
