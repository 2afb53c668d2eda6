"""llama.cpp's ``/lora-adapters``: default scales of LoRA adapters, for requests that name none."""

from __future__ import annotations

from starlette.requests import Request as HttpRequest

from treadle.api.options import adapter_scales
from treadle.server.http.http_io import Json, Response, read_any
from treadle.server.requests.generation_request import adapters
from treadle.server.requests.service import service_of


async def show(request: HttpRequest) -> Response:
    """``GET /lora-adapters``: the loaded adapters, each with its number and default scale."""
    engine = service_of(request).model.engine
    scales = dict(engine.cache.lora)
    return Json(
        [
            {"id": i, "name": one.name, "path": one.path.name, "scale": scales.get(i, 0.0)}
            for i, one in enumerate(engine.adapters)
        ]
    )


async def change(request: HttpRequest) -> Response:
    """``POST /lora-adapters``: set the default scales, ``[{"id", "scale"}, ...]``; adapters not
    named get 0.
    """
    engine = service_of(request).model.engine
    body = await read_any(request)
    engine.cache.lora = adapter_scales(adapters("body", body), None, engine)
    return Json({"success": True})
