"""``/v1/models`` of a server with one model, which answers under any name."""

from __future__ import annotations

import math
from typing import TYPE_CHECKING, Any

from treadle.server.http.http_io import Json, Response, utc
from treadle.server.protocols import ollama
from treadle.server.requests.generation_request import room
from treadle.server.requests.service import Service, service_of

if TYPE_CHECKING:
    from starlette.requests import Request as HttpRequest


def describe(service: Service) -> dict[str, Any]:
    """Return OpenAI's object of the served model, with llama.cpp's ``meta``."""
    model = service.model
    tensors = service.model.gguf.tensors.values()
    return {
        "id": service.name,
        "object": "model",
        "created": service.created,
        "owned_by": "treadle",
        "architecture": {
            "input_modalities": ["text", *sorted(model.modalities)],
            "output_modalities": ["text"] if service.writes else ["embeddings"],
        },
        "meta": {
            "n_ctx": room(model),
            "n_ctx_train": model.config.n_ctx_train,
            "n_embd": model.config.n_embd,
            "n_vocab": model.config.n_vocab,
            "n_params": sum(math.prod(tensor.shape) for tensor in tensors),
            "size": model.gguf.n_bytes,
        },
    }


def describe_for_llamacpp(service: Service) -> dict[str, Any]:
    """Return llama.cpp's entry of ``models``: Ollama's entry, with the capability "multimodal" if
    the model reads more than text.
    """
    media = ["multimodal"] if service.model.modalities else []
    return {**ollama.describe(service), "capabilities": [*ollama.capabilities(service), *media]}


def describe_for_anthropic(service: Service) -> dict[str, Any]:
    """Return Anthropic's object of the served model."""
    return anthropic_model(service.name, service.created, room(service.model))


def anthropic_model(name: str, created: int, most_tokens: int | None) -> dict[str, Any]:
    """Return Anthropic's object of the model ``name``. ``created``: Unix time; ``most_tokens``:
    maximum tokens of a prompt, None if unknown.
    """
    return {
        "type": "model",
        "id": name,
        "display_name": name,
        "created_at": utc(created),
        "lifecycle": "active",
        "max_input_tokens": most_tokens,
    }


def is_anthropics(request: HttpRequest) -> bool:
    """Return whether a request comes from an Anthropic client, by its headers: the path of OpenAI's
    list is the same, the format another.
    """
    return "anthropic-version" in request.headers


async def models(request: HttpRequest) -> Response:
    """``GET /v1/models``: a list with the served model, in OpenAI's and llama.cpp's form, or for
    Anthropic's clients in theirs.
    """
    service = service_of(request)
    if is_anthropics(request):
        data = [describe_for_anthropic(service)]
        name = service.name
        return Json({"data": data, "first_id": name, "last_id": name, "has_more": False})
    own = {"models": [describe_for_llamacpp(service)]}
    return Json({**own, "object": "list", "data": [describe(service)]})


async def one_model(request: HttpRequest) -> Response:
    """``GET /v1/models/NAME``: the served model, whatever the name; an empty name gives the
    list.
    """
    if not request.path_params["name"]:
        return await models(request)
    of = describe_for_anthropic if is_anthropics(request) else describe
    return Json(of(service_of(request)))
