"""The application of a speech model's server."""

from __future__ import annotations

import math
from typing import TYPE_CHECKING, Any

from starlette.routing import Route

from treadle.server.app import DELETE, GET, POST, guarded_app, paths
from treadle.server.http.api_errors import ApiError
from treadle.server.http.http_io import Json, Response
from treadle.server.protocols import vllm
from treadle.server.speech.speech_service import SpeechService
from treadle.server.speech.transcriptions import service_of, transcriptions, translations

if TYPE_CHECKING:
    from starlette.applications import Starlette
    from starlette.requests import Request as HttpRequest


def build_speech_app(service: SpeechService) -> Starlette:
    """Build the ASGI application of a speech model's server. Paths of models that write text are
    refused with a message that names the right path.
    """
    routes: list[Route] = []
    for (method, path), handler in OWN.items():
        routes += [Route(each, handler, methods=[method]) for each in paths(path)]
    for method, table in (("POST", POST), ("GET", GET), ("DELETE", DELETE)):
        for path in table:
            if (method, path) not in OWN:
                routes += [Route(each, refuse, methods=[method]) for each in paths(path)]
    return guarded_app(service, routes, [])


async def refuse(request: HttpRequest) -> Response:
    """Refuse (400) a path that only models that write text have."""
    name = service_of(request).name
    raise ApiError(
        400,
        f"{request.url.path}: {name} is a speech model: it transcribes sound "
        "(POST /v1/audio/transcriptions, /v1/audio/translations), and does not chat",
        param="model",
        code="wrong_model",
    )


async def root(request: HttpRequest) -> Response:
    """``GET /``: a line of text, for people and for clients that check whether a server runs."""
    name = service_of(request).name
    return Response(f"treadle transcribes with {name}: POST /v1/audio/transcriptions\n".encode())


async def health(request: HttpRequest) -> Response:
    """``GET /health``: 200 if the model is loaded and usable, else 503 or 500."""
    service = service_of(request)
    service.check_model()
    return Json({"status": "ok"})


async def models(request: HttpRequest) -> Response:
    """``GET /v1/models``: a list with the one speech model."""
    return Json({"object": "list", "data": [describe(service_of(request))]})


async def one_model(request: HttpRequest) -> Response:
    """``GET /v1/models/NAME``: the served model, whatever the name; an empty name gives the
    list.
    """
    if not request.path_params["name"]:
        return await models(request)
    return Json(describe(service_of(request)))


def describe(service: SpeechService) -> dict[str, Any]:
    """Return OpenAI's model object, with languages, tasks and sizes in ``meta``."""
    recognizer = service.recognizer
    config = recognizer.model.config
    gguf = recognizer.model.gguf
    return {
        "id": service.name,
        "object": "model",
        "created": service.created,
        "owned_by": "treadle",
        "architecture": {"input_modalities": ["audio"], "output_modalities": ["text"]},
        "meta": {
            "kind": "speech",
            "n_ctx": config.n_text_ctx,
            "n_ctx_train": config.n_text_ctx,
            "n_embd": config.n_embd,
            "n_vocab": config.n_vocab,
            "n_params": sum(math.prod(tensor.shape) for tensor in gguf.tensors.values()),
            "size": gguf.n_bytes,
            "languages": list(recognizer.languages),
            "tasks": ["transcribe", *(["translate"] if config.multilingual else [])],
        },
    }


async def metrics(request: HttpRequest) -> Response:
    """``GET /metrics``: transcriptions done and running, and seconds of sound, for Prometheus."""
    service = service_of(request)
    if not service.settings.metrics:
        raise ApiError(501, "start the server with --metrics", code="not_enabled")
    values = {
        "treadle:transcriptions_total": ("counter", service.n_requests),
        "treadle:transcribed_seconds_total": ("counter", service.seconds_done),
        "treadle:transcriptions_running": ("gauge", len(service.engine.outputs)),
    }
    lines = [f"# TYPE {name} {kind}\n{name} {value:g}\n" for name, (kind, value) in values.items()]
    return Response(
        "".join(lines).encode(),
        headers={"Process-Start-Time-Unix": str(service.created)},
        media_type="text/plain; version=0.0.4",
    )


OWN = {
    ("POST", "/v1/audio/transcriptions"): transcriptions,
    ("POST", "/v1/audio/translations"): translations,
    ("GET", "/"): root,
    ("GET", "/health"): health,
    ("GET", "/metrics"): metrics,
    ("GET", "/v1/models"): models,
    ("GET", "/v1/models/{name:path}"): one_model,
    ("GET", "/version"): vllm.version,
}
