"""A call from a client to an engine, and the response back, part by part.

While the model is loaded, a streamed call gets the keep-alives of its protocol. A client that
leaves ends the connection to the engine, which cancels the call there. An engine that ends in the
middle becomes an error in the protocol's own form.
"""

from __future__ import annotations

import asyncio
import codecs
import json
import re
import time
from collections.abc import Callable, Coroutine, Mapping
from typing import TYPE_CHECKING, Any
from urllib.parse import parse_qs, quote

from treadle.base.fast_classes import dataclass
from treadle.server.http.api_errors import ApiError, GoneError
from treadle.server.http.api_keys import ASKED_HEADER, OWNER_HEADER, current_key
from treadle.server.http.http_io import (
    LARGE,
    MAX_SOUND_BODY,
    Bodies,
    encode,
    event,
    parse_any,
    read_body,
    utc,
    watched,
)
from treadle.server.protocols import anthropic, ollama
from treadle.server.requests.http_responses import PING, PING_S
from treadle.server.requests.kept_streams import UNREAD_S
from treadle.server.router.engine_client import EngineGoneError, EngineResponse, call_engine
from treadle.server.router.pool import LoadedEngine

if TYPE_CHECKING:
    from starlette.requests import Request as HttpRequest
    from starlette.types import Receive, Scope, Send

    from treadle.server.router.service import RouterService

# Request headers that are not forwarded: of the connection, or set anew by the router.
NOT_SENT = {b"host", b"connection", b"keep-alive", b"transfer-encoding", b"te", b"trailer"}
NOT_SENT |= {b"upgrade", b"expect", b"content-length", b"authorization", b"x-api-key", b"origin"}
NOT_SENT |= {b"x-request-id", b"x-request-timeout", b"cookie", b"proxy-authorization"}
NOT_SENT |= {OWNER_HEADER.encode(), ASKED_HEADER.encode()}
NOT_RETURNED = {b"connection", b"keep-alive", b"transfer-encoding", b"date", b"x-request-id"}
ENDING_S = 1.0  # most seconds from an engine's closed connection to its process's end
FIELDS = ("stream", "keep_alive")  # fields of a body that the router itself obeys
OLLAMA_STREAMS = ("/api/chat", "/api/generate")
MULTIPART_MODEL = re.compile(
    rb'content-disposition:[^\r\n]*\bname="model"[^\r\n]*\r\n(?:[^\r\n]+\r\n)*\r\n([^\r\n]{1,500})\r\n',
    re.IGNORECASE,
)


@dataclass(eq=False)
class ModelCall:
    """A client's request, as far as the router must know it: path, body, and the model's name.

    ``body`` is dropped when the engine has it: a text may be written for minutes.
    """

    path: str
    body: bytes
    fields: Mapping[str, Any]  # values of those keys in FIELDS that a JSON body has
    name: str | None  # of the model
    has_text: bool = False  # messages or a prompt

    @property
    def own_path(self) -> str:
        """The path without ``/v1``."""
        return self.path.removeprefix("/v1")

    @property
    def is_streamed(self) -> bool:
        """Whether the response is a stream; Ollama's chats and generations are by default."""
        streams = self.fields.get("stream")
        if self.own_path in OLLAMA_STREAMS:
            return streams is None or streams is True
        return streams is True

    @property
    def is_ollamas(self) -> bool:
        """Whether the path is one of Ollama's, and so the response in Ollama's form."""
        return self.own_path.startswith("/api/")

    def empty_answer(self, model: str) -> dict[str, Any]:
        """Return the first fields of Ollama's response for ``model``, with an empty text."""
        empty: dict[str, Any] = {"response": ""}
        if self.own_path == "/api/chat":
            empty = {"message": {"role": "assistant", "content": ""}}
        return {"model": model, "created_at": utc(), **empty}


def target_of(scope: Scope) -> bytes:
    """Return path and query of a request, as the client wrote them."""
    path: bytes = scope.get("raw_path") or quote(scope["path"]).encode()
    return path + b"?" + scope["query_string"] if scope.get("query_string") else path


async def read_call(request: HttpRequest, bodies: Bodies) -> ModelCall:
    """Read a request's body, counted in ``bodies``, and find the model that the body or the query
    names. Raises ApiError and GoneError.
    """
    query = parse_qs(request.url.query)
    named = query.get("model", [None])[0]
    if request.method in ("GET", "DELETE", "HEAD"):
        return ModelCall(request.url.path, b"", {}, named)
    with bodies.weighing() as weigh:
        is_sound = request.url.path.removeprefix("/v1").startswith("/audio/")
        most = max(bodies.most, MAX_SOUND_BODY) if is_sound else bodies.most
        raw = await read_body(request, weigh, most)
        kind = request.headers.get("content-type", "").lower()
        if kind.startswith("multipart/"):
            part = MULTIPART_MODEL.search(raw)
            name = part[1].decode("utf-8", "replace") if part else named
            return ModelCall(request.url.path, raw, {}, name)
        if not raw:
            return ModelCall(request.url.path, raw, {}, named)
        value = await asyncio.to_thread(parse_any, raw) if len(raw) > LARGE else parse_any(raw)
    found = value if isinstance(value, dict) else {}
    fields = {field: found[field] for field in FIELDS if field in found}
    name = found.get("model")
    if name is not None and not isinstance(name, str):
        raise ApiError(400, "model: expected a string", param="model")
    has_text = bool(found.get("messages") or found.get("prompt"))
    return ModelCall(request.url.path, raw, fields, name or named, has_text)


class Forwarding:
    """ASGI application that forwards one call to the engine of a model. A stream that outlives its
    connection goes on if the client leaves, so that its engine stays loaded.

    ``acquire``: returns the engine, loaded if need be. ``keep_s``: seconds that the engine stays
    loaded after the call; None for as many as before.
    """

    def __init__(
        self,
        service: RouterService,
        call: ModelCall,
        acquire: Callable[[], Coroutine[Any, Any, LoadedEngine]],
        keep_s: float | None = None,
    ) -> None:
        self.service = service
        self.call = call
        self.acquire = acquire
        self.keep_s = keep_s
        self._begun = False  # whether a stream has begun
        self._started = False  # whether any response has begun
        self._last = b"\n"

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Forward the call and send the response. If the client leaves, the call is cancelled,
        unless its stream is kept.
        """
        task = asyncio.current_task()
        assert task is not None
        kept = self._kept(scope)
        cut: ApiError | GoneError | None = None  # why the call is cancelled
        timers: list[asyncio.TimerHandle] = []

        def cancel(why: ApiError | GoneError) -> None:
            nonlocal cut
            cut = why
            task.cancel()

        def leave() -> None:
            if kept is None:
                cancel(GoneError())
            else:
                timers.append(task.get_loop().call_later(UNREAD_S, cancel, GoneError()))

        loading = self.service.loading_streams

        def reached() -> None:
            if kept is not None and loading.get(kept) is cancel:
                del loading[kept]

        if kept is not None:
            if kept in loading:
                loading[kept](stopped())  # the new one takes its place
            loading[kept] = cancel
        try:
            async with watched(receive, leave):
                await self._answer(scope, send, reached)
        except asyncio.CancelledError:
            if cut is None:
                raise
            if hasattr(task, "uncancel"):
                task.uncancel()
            if isinstance(cut, ApiError) and self._begun:
                await self._end_with(cut, send)
            elif isinstance(cut, ApiError) or not self._started:
                raise cut from None
        finally:
            for timer in timers:
                timer.cancel()
            reached()

    def _kept(self, scope: Scope) -> tuple[str, str] | None:
        """Return the key's name and the conversation's id for a stream that outlives its
        connection; None for other calls.
        """
        if scope["method"] != "POST" or not self.call.is_streamed:
            return None
        given = dict(scope["headers"]).get(b"x-conversation-id", b"").decode("latin-1")
        return (scope.get("treadle.owner", ""), given) if given else None

    async def _answer(self, scope: Scope, send: Send, reached: Callable[[], object]) -> None:
        """Forward the call, to another engine if one had ended before; ``reached`` is called once
        an engine has it. An error becomes the end of a stream that has begun.
        """
        try:
            while not await self._answered(scope, send, reached):
                pass
        except ApiError as error:
            scope["treadle.forwarded"] = False  # for the log: the engine has no line of it
            if not self._begun:
                raise
            scope["treadle.problem"] = error
            await self._end_with(error, send)

    async def _answered(self, scope: Scope, send: Send, reached: Callable[[], object]) -> bool:
        """Forward the call to an engine and send its response; ``reached`` is called once the
        engine has the call. Return False if the engine had ended before that, so that another is to
        be loaded. Raises ApiError if it ended later.
        """
        engine = await self._loaded(send)
        try:
            response = await self._call(scope, engine)
            reached()
            try:
                scope["treadle.forwarded"] = True
                await self._return(response, send, engine)
            finally:
                response.close()
                key = current_key.get()
                if key is not None and key.tokens_per_minute is not None:
                    self.service.pool.run(self.service.charge(engine))
            return True
        except EngineGoneError as error:
            await asyncio.wait({engine.process.ended}, timeout=ENDING_S)
            if error.reached or not engine.process.ended.done():
                raise self._crash(engine) from None
            return False
        finally:
            self.service.pool.release(engine, self.keep_s)

    def _crash(self, engine: LoadedEngine) -> ApiError:
        return ApiError(
            502,
            f"{engine.model.name}: its engine has ended unexpectedly; the next call starts another",
            type="server_error",
            code="engine_crashed",
        )

    async def _loaded(self, send: Send) -> LoadedEngine:
        """Return the engine, once it is loaded; a streamed call is sent keep-alives meanwhile."""
        waiting = asyncio.ensure_future(self.acquire())
        try:
            while self.call.is_streamed:
                done, _ = await asyncio.wait({waiting}, timeout=PING_S)
                if done:
                    break
                if not self._begun:
                    await self._begin(send)
                await self._send(send, self._ping())
            return await waiting
        except BaseException:
            if not waiting.done():
                waiting.cancel()
                await asyncio.wait({waiting})
            elif not waiting.cancelled() and waiting.exception() is None:
                self.service.pool.release(waiting.result(), self.keep_s)
            raise

    async def _call(self, scope: Scope, engine: LoadedEngine) -> EngineResponse:
        index = scope.get("treadle.key") or 0
        key = engine.keys[index % len(engine.keys)]
        headers = [(name, value) for name, value in scope["headers"] if name not in NOT_SENT]
        headers += [
            (b"host", b"localhost"),
            (b"authorization", b"Bearer " + key.encode()),
            (b"x-request-id", scope["treadle.id"].encode()),
            (OWNER_HEADER.encode(), scope.get("treadle.owner", "").encode()),
        ]
        headers += self._time_left(scope)
        body = self._body_for_engine()
        response = await call_engine(
            engine.socket_address, scope["method"], target_of(scope), headers, body
        )
        self.call.body = b""
        return response

    def _time_left(self, scope: Scope) -> list[tuple[bytes, bytes]]:
        """Return the ``X-Request-Timeout`` header for the engine: the client's seconds, less those
        since the call came; no header without a limit.
        """
        said = next((v for n, v in scope["headers"] if n == b"x-request-timeout"), None)
        if said is None:
            return []
        try:
            left = max(0.001, float(said) - (time.perf_counter() - scope["treadle.came"]))
        except ValueError:
            return [(b"x-request-timeout", said)]  # the engine refuses it
        return [(b"x-request-timeout", f"{left:.3f}".encode())]

    def _body_for_engine(self) -> bytes:
        """Return the body for the engine, without a ``keep_alive`` of 0: the router itself unloads
        the model, and the engine would warn that it cannot.
        """
        if self.keep_s == 0 and "keep_alive" in self.call.fields:
            given = json.loads(self.call.body.removeprefix(codecs.BOM_UTF8))
            return json.dumps({key: v for key, v in given.items() if key != "keep_alive"}).encode()
        return self.call.body

    # -- the response -----------------------------------------------------------------------------

    async def _return(self, response: EngineResponse, send: Send, engine: LoadedEngine) -> None:
        if response.status == 500:
            self.service.check_engine(engine)
        if self._begun and response.status != 200:
            raise returned_error(response.status, await response.body())
        if not self._begun:
            known = any(name == b"content-length" for name, _ in response.headers)
            body = await response.body() if known else b""  # an engine may end within it
            headers = [each for each in response.headers if each[0] not in NOT_RETURNED]
            head = {"type": "http.response.start", "status": response.status, "headers": headers}
            self._started = True
            await send(head)
            if known:
                await send({"type": "http.response.body", "body": body})
                return
            self._begun = True
        async for part in response.parts():
            await self._send(send, part)
        await send({"type": "http.response.body", "body": b"", "more_body": False})

    async def _begin(self, send: Send) -> None:
        self._begun = self._started = True
        kind = b"application/x-ndjson" if self.call.is_ollamas else b"text/event-stream"
        headers = [
            (b"content-type", kind if self.call.is_ollamas else kind + b"; charset=utf-8"),
            (b"cache-control", b"no-cache"),
            (b"x-accel-buffering", b"no"),
        ]
        await send({"type": "http.response.start", "status": 200, "headers": headers})

    async def _send(self, send: Send, part: bytes) -> None:
        if part:
            self._last = part[-1:]
            await send({"type": "http.response.body", "body": part, "more_body": True})

    def _ping(self) -> bytes:
        """Return a keep-alive in the form of the call's protocol."""
        if self.call.is_ollamas:
            return encode({**self.call.empty_answer(self.call.name or ""), "done": False}) + b"\n"
        return PING  # Anthropic's own event may not come before message_start

    async def _end_with(self, error: ApiError, send: Send) -> None:
        """Send an error as the last part of a stream that has begun, in the form of the call's
        protocol.
        """
        cut = b"" if self._last == b"\n" else b"\n" if self.call.is_ollamas else b"\n\n"
        part = cut + error_part(self.call, error)
        await send({"type": "http.response.body", "body": part, "more_body": True})
        await send({"type": "http.response.body", "body": b"", "more_body": False})


def stopped() -> ApiError:
    """Return the error for a call whose stream was stopped before an engine had the call."""
    return ApiError(
        400,
        "the request was cancelled: its stream was stopped while the model was being loaded",
        code="cancelled",
    )


def error_part(call: ModelCall, error: ApiError) -> bytes:
    """Return an error as the last part of a stream, in the form of the call's protocol."""
    if call.is_ollamas:
        return encode(ollama.error_dict(error)) + b"\n"
    if call.own_path.startswith("/messages"):
        return event(anthropic.error_dict(error), "error")
    if call.own_path == "/responses":
        own = {"code": error.code or error.type, "message": error.message, "param": error.param}
        return event({"type": "error", "sequence_number": 0, **own}, "error")
    return event(error.as_dict())


def returned_error(status: int, body: bytes) -> ApiError:
    """Return an engine's error response, with the HTTP ``status``, as ApiError; its ``body`` may be
    in any protocol's form.
    """
    try:
        value = json.loads(body)
    except ValueError:
        value = None
    own = value.get("error") if isinstance(value, dict) else None
    if isinstance(own, str):
        return ApiError(status, own)
    if not isinstance(own, dict):
        return ApiError(status, f"the engine answered with status {status}")
    known = {key: own.get(key) for key in ("type", "param", "code")}
    more = {key: v for key, v in own.items() if key not in (*known, "message")}
    return ApiError(status, str(own.get("message")), **known, **more)
