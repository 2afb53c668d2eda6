"""``/v1/models``: the one model that is served, whatever it is called by clients."""

from __future__ import annotations

import math
from typing import Any

from starlette.requests import Request

from treadle.server.asked import room
from treadle.server.service import Service, service_of
from treadle.server.wire import Json, Response


def describe(service: Service) -> dict[str, Any]:
    """OpenAI's object, with llama.cpp's ``meta``."""
    model, tensors = service.model, service.model.gguf.tensors.values()
    return {
        "id": service.name,
        "object": "model",
        "created": service.created,
        "owned_by": "treadle",
        "meta": {
            "n_ctx": room(model),
            "n_ctx_train": model.config.n_ctx_train,
            "n_embd": model.config.n_embd,
            "n_vocab": model.config.n_vocab,
            "n_params": sum(math.prod(tensor.shape) for tensor in tensors),
            "size": model.gguf.n_bytes,
        },
    }


async def models(request: Request) -> Response:
    """``GET /v1/models``."""
    return Json({"object": "list", "data": [describe(service_of(request))]})


async def one_model(request: Request) -> Response:
    """``GET /v1/models/NAME``: any name is this model's."""
    return Json(describe(service_of(request)))
