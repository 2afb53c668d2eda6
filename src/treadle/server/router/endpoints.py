"""Endpoints that the router answers itself: lists of models, loads, unloads, the library, its own
state.
"""

from __future__ import annotations

import asyncio
import hashlib
from collections.abc import AsyncIterator, Mapping
from typing import TYPE_CHECKING, Any

from starlette.requests import Request as HttpRequest

from treadle.errors import TreadleError
from treadle.server.http.api_errors import ApiError, busy, problem_of
from treadle.server.http.body_fields import text
from treadle.server.http.http_io import Json, Response, encode, event, read_json, result, watched
from treadle.server.protocols import ollama
from treadle.server.protocols.models import is_anthropics
from treadle.server.requests.http_responses import PING
from treadle.server.router import library, listings
from treadle.server.router.forwarding import Forwarding, read_call, target_of
from treadle.server.router.listings import ModelCard, read_card
from treadle.server.router.merged_metrics import merge, router_metrics
from treadle.server.router.pool import DOWNLOADING
from treadle.server.router.service import (
    RouterService,
    check_allowed,
    is_allowed,
    keep_seconds,
    service_of,
)

if TYPE_CHECKING:
    from starlette.types import Receive, Scope, Send

SSE_PING_S = 15.0
ON = ("1", "true", "on", "yes")
OFF = ("0", "false", "off", "no")


class RouterStream(Response):
    """A streamed response that the router makes itself; ``parts`` yields its bytes."""

    def __init__(self, parts: AsyncIterator[bytes], media_type: str) -> None:
        headers = {"cache-control": "no-cache", "x-accel-buffering": "no"}
        super().__init__(None, 200, headers, media_type)
        self._parts = parts

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Send the parts until their end, or until the client leaves."""
        await send(self.head)

        async def pass_parts() -> None:
            async for part in self._parts:
                await send({"type": "http.response.body", "body": part, "more_body": True})

        task = asyncio.ensure_future(pass_parts())
        async with watched(receive, task.cancel):
            await asyncio.wait({task})
        if not task.cancelled():
            task.result()
            await send({"type": "http.response.body", "body": b"", "more_body": False})


# -- calls that an engine answers -----------------------------------------------------------------


async def forward(request: HttpRequest) -> Forwarding:
    """Forward a call to the engine of the model that it names, which is loaded if need be."""
    service = service_of(request)
    call = await read_call(request, service.bodies)
    model = await service.find(call.name)
    keep = keep_seconds(call.fields.get("keep_alive")) if call.is_ollamas else None
    return Forwarding(service, call, lambda: service.acquire(model), keep)


async def generate(request: HttpRequest) -> Any:
    """``POST /api/chat`` and ``/api/generate``: forward the call. Without a prompt or messages it
    only loads the model, or with ``keep_alive`` 0 unloads it, which the router answers itself.
    """
    service = service_of(request)
    call = await read_call(request, service.bodies)
    model = await service.find(call.name)
    keep = keep_seconds(call.fields.get("keep_alive"))
    if keep == 0 and not call.has_text:
        service.pool.run(service.pool.unload(model))
        return Json({**call.empty_answer(model.name), "done": True, "done_reason": "unload"})
    return Forwarding(service, call, lambda: service.acquire(model), keep)


async def look_up(request: HttpRequest) -> Any:
    """Answer a call about something that only one engine has, such as a stored response. The engine
    of the model that the call names answers; without a name, the first loaded engine that knows it.
    """
    service = service_of(request)
    call = await read_call(request, service.bodies)
    if call.name:
        model = await service.find(call.name)
        return Forwarding(service, call, lambda: service.acquire(model))
    target = target_of(request.scope)
    last: Response | None = None
    for engine in service.pool.text_engines():
        found = await service.ask(engine, target, request.method, call.body)
        if found is None:
            continue
        kind = found.headers.get(b"content-type", b"application/json").decode("latin-1")
        answer = Response(found.body, found.status, media_type=kind)
        if found.status < 400:
            return answer
        if last is None or found.status != 404:
            last = answer
    if last is None:
        raise ApiError(404, "no loaded model knows it; a model that was unloaded forgets its own")
    return last


async def slots(request: HttpRequest) -> Any:
    """``GET /slots``: the slots of the engine of ``model``; [] if that is not loaded."""
    service = service_of(request)
    call = await read_call(request, service.bodies)
    model = await service.find(call.name)
    if service.pool.engine(model) is None:
        return Json([])
    return Forwarding(service, call, lambda: service.acquire(model))


async def props(request: HttpRequest) -> Any:
    """``GET /props``: those of the engine of ``model``, which is loaded unless ``autoload=false``;
    without ``model`` the router's own.
    """
    service = service_of(request)
    call = await read_call(request, service.bodies)
    if call.name:
        model = await service.find(call.name)
        loads = request.query_params.get("autoload", "true").lower() not in OFF
        if not loads and service.pool.engine(model) is None:
            raise ApiError(
                400, f"{model.name} is not loaded", param="model", code="model_not_loaded"
            )
        return Forwarding(service, call, lambda: service.acquire(model))
    return Json(
        {
            "role": "router",
            "max_instances": service.own.most_loaded or len(service.models.models),
            "models_autoload": service.own.autoload,
            "model_alias": "treadle",
            "model_path": "none",
            "default_generation_settings": {"params": {}, "n_ctx": 0},
            "build_info": service.fingerprint,
            "modalities": {"vision": False, "audio": False},
            "treadle": {
                "max_body_bytes": service.bodies.most,
                "library": service.own.library,
                "memory": service.own.memory,
                "memory_used": service.pool.used,
            },
        }
    )


async def metrics(request: HttpRequest) -> Any:
    """``GET /metrics``: the router's own and those of all loaded engines; with ``model`` of that
    alone.
    """
    service = service_of(request)
    if not service.settings.metrics:
        raise ApiError(501, "start the server with --metrics", code="not_enabled")
    named = request.query_params.get("model")
    texts: dict[str, str] = {}
    wanted = [await service.find(named)] if named else await service.listed()
    engines = [engine for model in wanted if (engine := service.pool.engine(model)) is not None]

    async def read(engine: Any) -> None:
        found = await service.ask(engine, b"/metrics")
        if found is not None:
            texts[engine.model.name] = found.body.decode("utf-8", "replace")

    await asyncio.gather(*(read(engine) for engine in engines))
    merged = merge(
        {
            engine.model.name: texts[engine.model.name]
            for engine in engines
            if engine.model.name in texts
        }
    )
    own = router_metrics(service.pool, wanted)
    return Response(
        (own + merged).encode(),
        headers={"Process-Start-Time-Unix": str(service.created)},
        media_type="text/plain; version=0.0.4",
    )


async def health(request: HttpRequest) -> Response:
    """``GET /health``: 200 unless the router is stopping, whatever state its engines are in."""
    if service_of(request).draining:
        raise busy("the server is stopping")
    return Json({"status": "ok"})


# -- lists ----------------------------------------------------------------------------------------


async def cards(service: RouterService) -> list[ModelCard]:
    """Return the cards of all models that the request's API key may use."""
    models = await service.listed()
    return await asyncio.to_thread(lambda: [read_card(model) for model in models])


async def models(request: HttpRequest) -> Response:
    """``GET /v1/models``, which is llama.cpp's ``/models`` too: a list of all models, loaded or
    not; ``reload=1`` reads the folders first.
    """
    service = service_of(request)
    if request.query_params.get("reload", "").lower() in ON:
        await service.refresh()
    found = await cards(service)
    if is_anthropics(request):
        data = [listings.describe_for_anthropic(card, service.created) for card in found]
        ends = {"first_id": data[0]["id"], "last_id": data[-1]["id"]} if data else {}
        return Json({"data": data, "first_id": None, "last_id": None, **ends, "has_more": False})
    data = [listings.describe(card, service.pool, service.created) for card in found]
    return Json({"object": "list", "data": data})


async def one_model(request: HttpRequest) -> Response:
    """``GET /v1/models/NAME``: one model of the list; an empty name gives the list."""
    service = service_of(request)
    name = request.path_params["name"]
    if not name:
        return await models(request)
    card = await card_of(service, name)
    if is_anthropics(request):
        return Json(listings.describe_for_anthropic(card, service.created))
    return Json(listings.describe(card, service.pool, service.created))


async def card_of(service: RouterService, name: str | None) -> ModelCard:
    """Return the card of the model that ``name`` means, of the default one for None. Raises
    ApiError.
    """
    model = await service.find(name)
    return await asyncio.to_thread(read_card, model)


async def tags(request: HttpRequest) -> Response:
    """``GET /api/tags``: all models, and further names that clients gave them, as Ollama lists
    them.
    """
    service = service_of(request)
    found = await cards(service)
    copies = service.models.copies()
    return Json(
        {
            "models": [
                listings.describe_for_ollama(card, name)
                for card in found
                for name in ("", *(each for each in card.model.aliases if each in copies))
            ]
        }
    )


async def running(request: HttpRequest) -> Response:
    """``GET /api/ps``: the loaded models, as Ollama lists them."""
    service = service_of(request)
    listed = {model.name for model in await service.listed()}
    models = [engine.model for engine in service.pool.engines()]
    loaded = [model for model in models if model.name in listed]
    found = await asyncio.to_thread(lambda: [read_card(model) for model in loaded])
    return Json({"models": [listings.running_for_ollama(card, service.pool) for card in found]})


async def show(request: HttpRequest) -> Response:
    """``POST /api/show``: facts about a model from its file's header, without loading it."""
    service = service_of(request)
    body = await read_json(request)
    card = await card_of(service, name_in(body))
    if card.stored is None:
        raise ApiError(404, f"{card.model.name} is not downloaded yet", param="model")
    return Json(await asyncio.to_thread(listings.show_for_ollama, card))


def name_in(body: Mapping[str, Any]) -> str:
    """Return the model's name in a body of Ollama's: ``model`` or ``name``. Raises ApiError."""
    name = text("model", body.get("model") or body.get("name") or "")
    if not name:
        raise ApiError(400, "model: required", param="model")
    return name


# -- loads ----------------------------------------------------------------------------------------


async def load(request: HttpRequest) -> Response:
    """``POST /models/load``: begin to load a model, and answer at once; ``/models/sse`` and
    ``/models`` tell when it is loaded.
    """
    service = service_of(request)
    model = await service.find(name_in(await read_json(request)))
    service.pool.run(service.pool.load(model))
    return Json({"success": True})


async def unload(request: HttpRequest) -> Response:
    """``POST /models/unload``: unload a model after its running calls, or cancel its load; answer
    at once.
    """
    service = service_of(request)
    model = await service.find(name_in(await read_json(request)))
    service.pool.run(service.pool.unload(model))
    return Json({"success": True})


async def model_events(request: HttpRequest) -> Response:
    """``GET /models/sse``: a stream of events for changes of the models' states, as they happen."""
    service = service_of(request)
    queue: asyncio.Queue[dict[str, Any]] = asyncio.Queue()

    async def events() -> AsyncIterator[bytes]:
        service.pool.listeners.add(queue)
        try:
            yield PING
            while True:
                try:
                    told = await asyncio.wait_for(queue.get(), SSE_PING_S)
                    model = service.models.get(told["model"])
                    if model is None or is_allowed(model):
                        yield event(told)
                except asyncio.TimeoutError:
                    yield PING
        finally:
            service.pool.listeners.discard(queue)

    return RouterStream(events(), "text/event-stream")


# -- the library ----------------------------------------------------------------------------------


def check_library(service: RouterService) -> None:
    """Raise ApiError (403) if the server was started without ``--library``, which lets clients
    download, remove and copy models.
    """
    if not service.own.library:
        raise ApiError(
            403,
            "clients may not download, remove or copy models: start the server with --library",
            code="library_off",
        )


async def pull(request: HttpRequest) -> Response:
    """``POST /api/pull``: download a model; streams the progress unless ``stream`` is false."""
    service = service_of(request)
    check_library(service)
    body = await read_json(request)
    ref = library.hub_name(name_in(body))
    if body.get("stream") is False:

        async def whole() -> None:
            async for _ in library.download(ref):
                pass

        await result(request, whole())  # it stops if the client leaves
        await service.refresh()
        return Json({"status": "success"})

    async def lines() -> AsyncIterator[bytes]:
        yield encode({"status": "pulling manifest"}) + b"\n"
        try:
            async for step in library.download(ref):
                if step.path is None:
                    digest = "sha256:" + hashlib.sha256(step.file.encode()).hexdigest()
                    told = {"status": f"pulling {step.file}", "digest": digest}
                    yield encode({**told, "total": step.total, "completed": step.done}) + b"\n"
            await service.refresh()
            yield encode({"status": "success"}) + b"\n"
        except (ApiError, TreadleError, OSError) as error:
            yield encode(ollama.error_dict(problem_of(error))) + b"\n"

    return RouterStream(lines(), "application/x-ndjson")


async def start_download(request: HttpRequest) -> Response:
    """``POST /models``: download a model in the background; ``/models/sse`` has the progress."""
    service = service_of(request)
    check_library(service)
    name = name_in(await read_json(request))
    ref = library.hub_name(name)

    async def work() -> None:
        try:
            async for step in library.download(ref):
                if step.path is None:
                    told = {step.file: {"done": step.done, "total": step.total}}
                    service.pool.publish(name, "download_progress", told)
            await service.refresh()
            service.pool.publish(name, "download_finished")
        except (TreadleError, OSError) as error:
            service.pool.publish(name, "download_failed", {"error": problem_of(error).message})

    service.pool.run(work())
    service.pool.publish(name, "model_status", {"status": DOWNLOADING})
    return Json({"success": True})


async def delete(request: HttpRequest) -> Response:
    """``DELETE /api/delete``: remove a downloaded model, or a further name that a client gave
    one.
    """
    service = service_of(request)
    check_library(service)
    await remove(service, name_in(await read_json(request)))
    return Response(b"")


async def delete_model(request: HttpRequest) -> Response:
    """``DELETE /models?model=NAME``, llama.cpp's: remove a downloaded model, or a further name."""
    service = service_of(request)
    check_library(service)
    await remove(service, name_in(dict(request.query_params)))
    return Json({"success": True})


async def remove(service: RouterService, name: str) -> None:
    """Remove a further name that a client gave a model, or unload and remove a downloaded model.
    Raises ApiError for models that were not downloaded.
    """
    copies = service.models.copies
    model = service.models.get(name)
    if model is not None:
        check_allowed(model)
    if isinstance(copies, library.CopiedNames) and copies.remove(name):
        await service.refresh()
        return
    if model is None:
        await service.find(name)  # raises, unless a part of a name fits
        raise ApiError(404, f"model {name[:200]!r}: name it whole to remove it", param="model")
    if not model.from_library:
        raise ApiError(
            403,
            f"{model.name} was named when the server was started: only downloaded models can be "
            "removed",
            param="model",
        )
    await service.pool.unload(model)
    await asyncio.to_thread(library.remove_model, model)
    await service.refresh()
    service.pool.publish(model.name, "model_remove")


async def copy(request: HttpRequest) -> Response:
    """``POST /api/copy``: give a model a further name; no file is copied."""
    service = service_of(request)
    check_library(service)
    body = await read_json(request)
    source = await service.find(text("source", body.get("source") or ""))
    name = text("destination", body.get("destination") or "")
    if service.models.get(name) is not None:
        raise ApiError(400, f"destination {name[:200]!r}: the name is taken", param="destination")
    copies = service.models.copies
    assert isinstance(copies, library.CopiedNames)
    copies.add(name, source.name)
    await service.refresh()
    return Response(b"")
