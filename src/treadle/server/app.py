"""Routes and the middleware of every HTTP request: API keys, hosts, origins, the access log."""

from __future__ import annotations

import ipaddress
import re
import secrets
import socket
import time
from collections.abc import Awaitable, Callable
from functools import partial
from typing import TYPE_CHECKING, Any
from urllib.parse import urlsplit

from starlette.applications import Starlette
from starlette.datastructures import Headers, MutableHeaders
from starlette.exceptions import HTTPException
from starlette.middleware import Middleware
from starlette.middleware.cors import CORSMiddleware
from starlette.requests import Request as HttpRequest
from starlette.routing import Route
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from treadle.errors import TreadleError
from treadle.scheduler.output import RequestOutput
from treadle.server import static
from treadle.server.http.api_errors import ApiError, GoneError, not_yet, problem_of
from treadle.server.http.api_keys import (
    ASKED_HEADER,
    OWNER_HEADER,
    ApiKey,
    charge_tokens,
    current_key,
)
from treadle.server.http.http_io import Json, Response
from treadle.server.http.log import log
from treadle.server.http.path_prefix import PathPrefix
from treadle.server.openai_routes import OPENAI_DELETE, OPENAI_GET, OPENAI_POST
from treadle.server.protocols import (
    anthropic,
    audio,
    control_vectors,
    embeddings,
    kept_stream_actions,
    llamacpp,
    lora_adapters,
    metrics,
    ollama,
    rerank,
    score,
    slot_actions,
    tool_servers,
    vllm,
)
from treadle.server.protocols.answer_fields import reuse
from treadle.server.requests.request_media import prompt_text
from treadle.server.requests.request_stream import RequestStream
from treadle.server.requests.service import Service

if TYPE_CHECKING:
    from treadle.api.model import Model

Handler = Callable[[HttpRequest], Awaitable[Response]]

POST: dict[str, Handler] = {
    **OPENAI_POST,
    "/v1/messages": anthropic.messages,
    "/v1/messages/count_tokens": anthropic.count_tokens,
    "/api/chat": ollama.chat,
    "/api/generate": ollama.generate,
    "/api/embed": ollama.embed_texts,
    "/api/embeddings": ollama.embed_prompt,
    "/api/show": ollama.show,
    "/completion": llamacpp.completion,
    "/infill": llamacpp.infill,
    "/embedding": embeddings.native_embedding,
    "/v1/audio/transcriptions": audio.refuse,
    "/v1/audio/translations": audio.refuse,
    "/v1/rerank": rerank.rerank,
    "/v1/reranking": rerank.rerank,
    "/v2/rerank": rerank.cohere_rerank,
    "/v1/score": score.score,
    "/slots/{id}": slot_actions.act,
    "/tokenize": llamacpp.tokenize,
    "/detokenize": llamacpp.detokenize,
    "/apply-template": llamacpp.apply_template,
    "/lora-adapters": lora_adapters.change,
    "/control-vectors": control_vectors.change,
    "/props": llamacpp.change_props,
    "/v1/streams/lookup": kept_stream_actions.look_up,
    "/v1/mcp/call": tool_servers.call,
}
GET: dict[str, Handler] = {
    **OPENAI_GET,
    "/": ollama.root,
    "/api/version": ollama.version,
    "/api/tags": ollama.tags,
    "/api/ps": ollama.running,
    "/health": llamacpp.health,
    "/metrics": metrics.metrics,
    "/props": llamacpp.props,
    "/lora-adapters": lora_adapters.show,
    "/control-vectors": control_vectors.show,
    "/slots": slot_actions.slots,
    "/v1/mcp/tools": tool_servers.tools,
    "/v1/stream": kept_stream_actions.resume,
    "/version": vllm.version,
    "/tokenizer_info": vllm.tokenizer_info,
}
DELETE: dict[str, Handler] = {
    **OPENAI_DELETE,
    "/v1/stream": kept_stream_actions.stop,
}
NOT_YET = (  # paths that clients know and treadle does not implement
    "/v1/audio/speech",
    "/v1/images/generations",
    "/v1/responses/compact",
    "/api/pull",
    "/api/create",
    "/api/delete",
    "/api/copy",
    "/api/push",
)
# Paths that limits of keys do not count, besides all methods but POST: they are about calls that
# are counted already.
UNCOUNTED = ("/v1/streams/lookup", "/v1/chat/completions/control")
PUBLIC = ("/", "/health", "/v1/health")  # Ollama clients probe / to find out if a server runs


def paths(path: str) -> tuple[str, ...]:
    """Return the path with ``/v1`` and without it: clients' base URLs come in both forms."""
    return (path, path.removeprefix("/v1") if path.startswith("/v1/") else f"/v1{path}")


def build_app(service: Service) -> Starlette:
    """Build the ASGI application of a server of one model: all protocols, and the web page."""
    page = static.page_routes() if service.settings.page else []
    routes = [*page]
    for method, table in (("POST", POST), ("GET", GET), ("DELETE", DELETE)):
        for path, handler in table.items():
            routes += [Route(each, handler, methods=[method]) for each in paths(path)]
    methods = ["GET", "POST", "PUT", "DELETE"]
    routes += [Route(each, missing, methods=methods) for path in NOT_YET for each in paths(path)]
    return guarded_app(service, routes, page)


def guarded_app(service: Any, routes: list[Route], page: list[Route]) -> Starlette:
    """Build an ASGI application of ``routes`` behind the checks of every request: API keys, hosts,
    origins. ``service``: a Service, SpeechService or RouterService. ``page``: the web page's
    routes, also part of ``routes``, which need no key.
    """
    middleware = [Middleware(RequestGuard, service=service, page=page)]
    if service.settings.allow_origins:
        middleware.insert(
            0,
            Middleware(
                CORSMiddleware,
                allow_origins=list(service.settings.allow_origins),
                allow_methods=["GET", "POST", "DELETE"],
                allow_headers=["*"],
                allow_private_network=True,  # Chrome requires it for a server on loopback
            ),
        )
    if service.settings.api_prefix:
        prefixed = Middleware(PathPrefix, prefix=service.settings.api_prefix, refuse=error_response)
        middleware.insert(0, prefixed)
    error_handlers: dict[Any, Any] = {  # handlers may return any ASGI application
        ApiError: _refuse,
        TreadleError: _refuse,
        HTTPException: _refuse_http,
        GoneError: _client_left,
        Exception: _refuse,
    }
    app = Starlette(routes=routes, middleware=middleware, exception_handlers=error_handlers)
    app.state.service = service
    return app


async def missing(request: HttpRequest) -> Response:
    """Refuse (501) a path that clients know and treadle does not implement."""
    raise not_yet(request.url.path)


def error_response(path: str, problem: ApiError) -> Json:
    """Return the error ``problem`` in the format of the protocol that ``path`` belongs to:
    Anthropic's, Ollama's, or OpenAI's for all others.
    """
    own = path.removeprefix("/v1")
    if own.startswith("/messages"):
        value = anthropic.error_dict(problem)
    elif own.startswith("/api/"):
        value = ollama.error_dict(problem)
    else:
        value = problem.as_dict()
    return Json(value, problem.status, problem.headers)


async def _refuse(request: HttpRequest, error: Exception) -> Response:
    problem = request.scope["treadle.problem"] = problem_of(error)  # for the log
    return error_response(request.url.path, problem)


async def _refuse_http(request: HttpRequest, error: Exception) -> Response:
    """Answer an unknown path (404), or a method that the path does not have (405)."""
    assert isinstance(error, HTTPException)
    what = {404: "unknown path", 405: "method not allowed for this path"}
    message = what.get(error.status_code, str(error.detail))
    if error.status_code == 404:
        message += similar_path(request)
    problem = ApiError(error.status_code, f"{request.method} {request.url.path[:200]}: {message}")
    problem.headers |= dict(error.headers or {})
    return error_response(request.url.path, problem)


def similar_path(request: HttpRequest) -> str:
    """Return the end of a message about an unknown path: the server's most similar one for the
    method, or "".
    """
    from difflib import get_close_matches  # needed for errors only

    routes = [each for each in request.app.routes if isinstance(each, Route)]
    known = [each.path for each in routes if request.method in (each.methods or ())]
    near = get_close_matches(request.url.path[:200], known, n=1, cutoff=0.75)
    return f"; did you mean {near[0]}?" if near else ""


async def _client_left(request: HttpRequest, error: Exception) -> Response:
    """Return status 499, as nginx logs it, for a request whose client has left: only the log shows
    it.
    """
    return Response(status=499)


# -- access control -------------------------------------------------------------------------------


class RequestGuard:
    """ASGI middleware around all routes of ``app``: checks keys, hosts and origins, sets request
    ids, counts open requests, and writes the access log. ``page``: routes that need no key.
    """

    def __init__(self, app: ASGIApp, service: Any, page: list[Route]) -> None:
        self._app = app
        self._service = service
        self._hosts = known_hosts(service)
        self._uncounted = {each for path in UNCOUNTED for each in paths(path)}
        self._public = {*PUBLIC, *(route.path for route in page)}

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Check one HTTP request and pass it to the application; set its id, and log it at its end.
        A WebSocket is closed.
        """
        if scope["type"] != "http":
            if scope["type"] == "websocket":
                await send({"type": "websocket.close", "code": 1000})
                return
            return await self._app(scope, receive, send)
        headers = Headers(scope=scope)
        began = time.perf_counter()
        status = 0
        scope["treadle.came"] = began
        name = scope["treadle.id"] = request_id(headers.get("x-request-id", ""))

        async def noted(message: Message) -> None:
            nonlocal status
            if message["type"] == "http.response.start":
                status = message["status"]
                MutableHeaders(scope=message)["x-request-id"] = name
            await send(message)

        waited_for = not self._service.draining
        self._service.n_open += waited_for
        try:
            try:
                self._admit(scope, headers)
            except ApiError as refusal:
                scope["treadle.problem"] = refusal  # for the log
                await error_response(scope["path"], refusal)(scope, receive, noted)
            else:
                await self._app(scope, receive, noted)
        except Exception as error:  # answered here, for the id and the log's status
            if not status:
                problem = problem_of(error)
                problem.headers["Connection"] = "close"  # uvicorn closes it
                await error_response(scope["path"], problem)(scope, receive, noted)
            raise
        finally:
            self._service.n_open -= waited_for
            if "treadle.lease" in scope and not scope.get("treadle.detached"):
                scope["treadle.lease"].end()
            if self._service.settings.log and not scope.get("treadle.forwarded"):
                self._write_line(scope, name, status, time.perf_counter() - began)

    def _admit(self, scope: Scope, headers: Headers) -> None:
        """Find the API key of a request, check that the request is allowed, and count it for the
        key's limits. Stores the key's name and number in ``scope``. Raises ApiError (401, 403,
        429).
        """
        keys = self._service.keys
        key = keys.find(headers) if keys else None
        scope["treadle.key"] = None if key is None else keys.fairness_number(key)
        scope["treadle.owner"] = "" if key is None else key.name
        self.check(scope, headers, key)
        if key is None:
            return
        current_key.set(key)
        if self._service.settings.is_engine:  # its router has counted the request for its key
            owner = scope["treadle.owner"] = headers.get(OWNER_HEADER, "")
            scope["treadle.forwarded"] = ASKED_HEADER in headers
            charge_tokens.set(partial(self._service.charges.add, owner))
            return
        if scope["method"] == "POST" and scope["path"] not in self._uncounted:
            scope["treadle.lease"] = keys.begin(key)
        charge_tokens.set(partial(keys.charge, key))

    def _write_line(self, scope: Scope, name: str, status: int, seconds: float) -> None:
        """Write the log line of a finished request. ``name``: its id; ``status``: of its response,
        0 if the client left first; ``seconds``: since its arrival.
        """
        with_text = self._service.settings.log_text
        line = log_line(scope, name, status, seconds)
        if scope.get("treadle.owner"):
            line["key"] = scope["treadle.owner"]
        if "treadle.problem" in scope:
            line["error"] = error_fields(scope["treadle.problem"], text=with_text)
        if with_text and "treadle.stream" in scope:
            line |= logged_texts(scope["treadle.stream"], self._service.model)
        log(**line)

    def check(self, scope: Scope, headers: Headers, key: ApiKey | None) -> None:
        """Raise ApiError for a request that is not allowed: without a valid key where keys are
        demanded, else with an unknown Host or Origin. ``key``: the key in its headers, None without
        a valid one. Public paths are always allowed.
        """
        if scope["path"] in self._public:
            return
        if self._service.keys:
            if key is None:
                raise ApiError(
                    401,
                    "missing or wrong API key: send 'Authorization: Bearer KEY' or "
                    "'x-api-key: KEY'",
                    code="invalid_api_key",
                    headers={"WWW-Authenticate": "Bearer"},
                )
            self._service.check_key(key)
            return
        host = headers.get("host", "")
        if not (is_known(host, self._hosts) or is_local(scope)):
            raise ApiError(
                403,
                f"unknown Host {host[:80]!r}: start the server with --allow-host NAME, or with "
                "an API key",
                code="unknown_host",
            )
        origin = headers.get("origin")
        if origin is not None and not self._allows_origin(origin, host):
            raise ApiError(
                403,
                f"pages from {origin[:80]!r} may not call this server: start it with "
                "--allow-origin, or with an API key",
                code="unknown_origin",
            )

    def _allows_origin(self, origin: str, host: str) -> bool:
        """Return whether a web page of this origin may call. Any page can send simple requests to a
        server on loopback, and only the browser keeps the response from it. So http(s) pages may
        call only from this server's own host; applications that are no web pages may (``file:``,
        ``vscode-webview:``).
        """
        allowed = self._service.settings.allow_origins
        if origin in allowed or "*" in allowed:
            return True
        scheme, _, rest = origin.partition("://")
        return origin != "null" and (scheme not in ("http", "https") or rest == host)


def known_hosts(service: Any) -> frozenset[str]:
    """Return the host names by which clients may call this server, in lower case."""
    own = {"localhost", socket.gethostname(), *service.settings.hosts}
    return frozenset(name.lower() for name in own.union(service.settings.allow_hosts))


def is_known(host: str, hosts: frozenset[str]) -> bool:
    """Return whether the Host header ``host`` names this server, by a name in ``hosts``, a name
    below ``.localhost``, or an IP address. A page that resolves its own name to this machine (DNS
    rebinding) sends that name; IP addresses cannot be rebound.
    """
    try:
        name = (urlsplit(f"//{host}").hostname or "").lower()
    except ValueError:
        return False
    if name in hosts or name.endswith(".localhost"):
        return True
    try:
        ipaddress.ip_address(name)
    except ValueError:
        return False
    return True


def is_local(scope: Scope) -> bool:
    """Return whether a request came through a UNIX socket, which no web page can reach."""
    server = scope.get("server")
    return server is not None and server[1] is None


def request_id(given: str) -> str:
    """Return ``given``, the request's ``X-Request-Id`` header, if it has 1 to 64 letters, digits,
    ``_``, ``.`` or ``-``; else a new random id.
    """
    if re.fullmatch(r"[\w.-]{1,64}", given, re.ASCII):
        return given
    return secrets.token_hex(8)


def log_line(scope: Scope, name: str, status: int, seconds: float) -> dict[str, Any]:
    """Return the log record of a request, without prompts or output: id, path, status, and for
    generations token counts and times. ``name``: its id; ``status`` 0 means that the client left
    first (logged as 499); ``seconds``: since its arrival.
    """
    line: dict[str, Any] = {
        "id": name,
        "method": scope["method"],
        "path": scope["path"][:200],
        "status": status or 499,
        "seconds": round(seconds, 3),
    }
    stream: RequestStream | None = scope.get("treadle.stream")
    if stream is not None:
        started = [output.request.started for output in stream.outputs if output.request.started]
        first = [output.first_s for output in stream.outputs if output.first_s]
        answers = [output.answer for output in stream.outputs]
        line |= {
            "texts": len(answers),
            "n_prompt": sum(answer.timings.n_prompt for answer in answers),
            "n_cached": sum(answer.timings.n_cached for answer in answers),
            "cache": [
                reuse(output)
                for output in {each.prompt: each for each in reversed(stream.outputs)}.values()
            ],
            "n_written": sum(len(answer.ids) for answer in answers),
            "queue_s": round(min(started) - stream.arrival_s, 3) if started else None,
            "first_token_s": round(min(first) - stream.arrival_s, 3) if first else None,
            "finish": ["detached"]
            if scope.get("treadle.detached")
            else sorted({end_reason(answer) for answer in answers}),
        }
        if n_media := sum(len(output.answer.media) for output in stream.outputs):
            media_s = sum(answer.timings.media_s for answer in answers)
            line |= {"media": n_media, "media_s": round(media_s, 3)}
    return line


def error_fields(problem: ApiError, *, text: bool) -> dict[str, Any]:
    """Return the fields of an error for the log: ``code``, ``param``, the error's further fields
    and, with ``text``, its ``message``, which may quote parts of the request. Agents often show
    their own message in place of the server's, so the log has it.
    """
    told = {"code": problem.code or problem.type, "param": problem.param, **problem.more}
    told |= {"message": problem.message} if text else {}
    return {key: value for key, value in told.items() if value is not None}


def end_reason(answer: RequestOutput) -> str:
    """Return why the output ``answer`` ended, in the words of /metrics: its finish reason, "error",
    or "abort" if it has neither.
    """
    return answer.finish_reason or ("error" if answer.error else "abort")


def logged_texts(stream: RequestStream, model: Model) -> dict[str, Any]:
    """Return ``prompts`` and ``written``, lists of the prompts and outputs of a request as text,
    for logs with ``log_text``.
    """
    return {
        "prompts": [prompt_text(ids, model) for ids in stream.generation.prompts],
        "written": [model.detokenize(output.answer.ids) for output in stream.outputs],
    }
