"""``/v1/embeddings`` of OpenAI's, and llama.cpp's ``/embedding``."""

from __future__ import annotations

import asyncio
import base64
from typing import TYPE_CHECKING, Any

import numpy as np

from treadle.server.asked import check_length, check_text, is_ids
from treadle.server.fields import Table, one_of, read_fields, whole, wrong
from treadle.server.problems import ApiError
from treadle.server.service import Service, service_of
from treadle.server.wire import Json, Response, read_json, result

if TYPE_CHECKING:
    from starlette.requests import Request

    from treadle.model import Model

MAX_INPUTS = 2048

FIELDS: Table = {
    "encoding_format": one_of("float", "base64"),
    "dimensions": whole(1),
}


async def embeddings(request: Request) -> Response:
    """``POST /v1/embeddings``."""
    service, body = service_of(request), await read_json(request)
    return Json(await result(request, embeddings_answer(service, body)))


async def embeddings_answer(service: Service, body: dict[str, Any]) -> dict[str, Any]:
    """The whole answer. Raises ApiError, TreadleError."""
    given, width = read_fields(body, FIELDS), service.model.config.n_embd
    if given.get("dimensions", width) != width:
        raise ApiError(
            400, f"dimensions: this model's vectors have {width}, and are not cut",
            param="dimensions", code="unsupported_parameter",
        )  # fmt: skip
    vectors, n_tokens = await embed(service, body.get("input"))
    packed = given.get("encoding_format") == "base64"
    data = [
        {
            "object": "embedding",
            "index": i,
            "embedding": _base64(vector) if packed else vector.tolist(),
        }
        for i, vector in enumerate(vectors)
    ]
    return {
        "object": "list",
        "data": data,
        "model": service.name,
        "usage": {"prompt_tokens": n_tokens, "total_tokens": n_tokens},
    }


async def native_embedding(request: Request) -> Response:
    """``POST /embedding``."""
    service, body = service_of(request), await read_json(request)
    content = body.get("content", body.get("input"))
    vectors, _ = await result(request, embed(service, content, "content"))
    return Json([{"index": i, "embedding": [row.tolist()]} for i, row in enumerate(vectors)])


async def embed(service: Service, value: Any, name: str = "input") -> tuple[np.ndarray, int]:
    """Vectors float32 ``[n_texts, n_embd]`` of length 1, and how many tokens were read. Batches
    and steps of texts take turns. Raises ApiError, TreadleError.
    """
    texts = await service.prepare(_read, value, service.model, name)
    made = [np.zeros((0, service.model.config.n_embd), np.float32)]
    for batch in service.model.engine.together(texts):
        job = service.engine.submit(lambda ids=batch: _run(service.model, ids))  # type: ignore[misc]
        made.append(await asyncio.wrap_future(job))
    n_tokens = sum(map(len, texts))
    service.tally.n_embedded += n_tokens
    return np.concatenate(made), n_tokens


def _run(model: Model, batch: list[list[int]]) -> np.ndarray:
    """In the engine's thread. Texts that are being written give way where there is no room."""
    with model._room_for(max(map(len, batch))):
        return model.engine.embed(batch)


def _read(value: Any, model: Model, name: str) -> list[list[int]]:
    """A text, ids, or a list of either."""
    several = isinstance(value, list) and not is_ids(value)
    items = value if several else [value]
    if value is None or not items or len(items) > MAX_INPUTS:
        raise ApiError(400, f"{name}: expected 1 to {MAX_INPUTS} texts", param=name)
    made = []
    for item in items:
        if isinstance(item, str):
            check_text(item, model)
            item = model.tokenize(item)
        elif not is_ids(item):
            raise wrong(name, item, "texts, or lists of token ids")
        made.append(check_length(item, model))
    return made


def _base64(vector: np.ndarray) -> str:
    return base64.b64encode(vector.astype("<f4").tobytes()).decode()
