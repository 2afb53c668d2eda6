"""``/control-vectors``: default strengths of control vectors, for requests that name none."""

from __future__ import annotations

from starlette.requests import Request as HttpRequest

from treadle.api.options import adapter_scales
from treadle.server.http.http_io import Json, Response, read_any
from treadle.server.requests.generation_request import strengths
from treadle.server.requests.service import service_of


async def show(request: HttpRequest) -> Response:
    """``GET /control-vectors``: the loaded vectors, each with its default strength and its
    layers.
    """
    engine = service_of(request).model.engine
    scales = dict(engine.cache.lora)
    n_adapters = len(engine.adapters)
    return Json(
        [
            {
                "id": i,
                "name": one.name,
                "path": one.path.name if one.path else "",
                "strength": scales.get(n_adapters + i, 0.0),
                "layers": sorted(one.directions),
            }
            for i, one in enumerate(engine.control_vectors)
        ]
    )


async def change(request: HttpRequest) -> Response:
    """``POST /control-vectors``: set the default strengths, ``{NAME: STRENGTH}``; vectors not named
    get 0.
    """
    engine = service_of(request).model.engine
    body = await read_any(request)
    engine.cache.lora = adapter_scales(None, strengths("body", body), engine)
    return Json({"success": True})
