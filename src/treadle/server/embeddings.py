"""``/v1/embeddings`` of OpenAI's, and llama.cpp's ``/embedding``."""

from __future__ import annotations

import asyncio
import base64
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

import numpy as np

from treadle.arguments import lora_scales
from treadle.embedding import EUCLIDEAN, NOTHING, Embedder, scaled
from treadle.errors import TreadleError
from treadle.server.asked import adapters, check_length, check_text, is_ids, most_characters, room
from treadle.server.fields import Table, flag, one_of, read_fields, whole, wrong
from treadle.server.problems import ApiError, within
from treadle.server.service import Service, service_of
from treadle.server.wire import Json, Response, read_json, result

if TYPE_CHECKING:
    from starlette.requests import Request

    from treadle.model import Model

MAX_INPUTS = 2048

CUT: Table = {"dimensions": whole(1)}
POOLINGS = {"mean": "mean", "cls": "first", "last": "last"}  # and what ``Config`` calls them
READ: Table = {"lora": adapters, "pooling": one_of(*POOLINGS), "default_prompt": flag}
FIELDS: Table = {
    **CUT,
    **READ,
    "normalize": flag,
    "encoding_format": one_of("float", "base64"),
}
NATIVE: Table = {**READ, "embd_normalize": whole(NOTHING)}


async def embeddings(request: Request) -> Response:
    """``POST /v1/embeddings``. ``content`` and no ``input``: as ``/embedding``."""
    service, body = service_of(request), await read_json(request)
    if "input" not in body and "content" in body:
        return await _native(request, service, body)
    return Json(await result(request, embeddings_answer(service, body)))


async def embeddings_answer(service: Service, body: dict[str, Any]) -> dict[str, Any]:
    """The whole answer. Raises ApiError, TreadleError."""
    given = read_fields(body, FIELDS)
    embedder = embedder_of(service.model, given)
    vectors, n_tokens = await embed(service, body.get("input"), embedder)
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
    return await _native(request, service_of(request), await read_json(request))


async def _native(request: Request, service: Service, body: dict[str, Any]) -> Response:
    content = body.get("content", body.get("input"))
    given = read_fields(body, NATIVE)
    by = given.get("embd_normalize", EUCLIDEAN)
    embedder = embedder_of(service.model, {**given, "normalize": by == EUCLIDEAN})
    vectors, _ = await result(request, embed(service, content, embedder, "content"))
    if by != EUCLIDEAN:
        vectors = scaled(vectors, by)
    return Json([{"index": i, "embedding": [row.tolist()]} for i, row in enumerate(vectors)])


def embedder_of(model: Model, given: Mapping[str, Any]) -> Embedder:
    """What makes the vectors that were asked for. Raises ApiError, TreadleError."""
    pooling, own = given.get("pooling"), model.config.pooling
    if pooling is not None and POOLINGS[pooling] != own:
        name = next(name for name, ours in POOLINGS.items() if ours == own)
        raise ApiError(400, f"pooling: {pooling}: the model's own is {name}", param="pooling")
    lora = lora_scales(given.get("lora"), model.engine)
    try:
        return Embedder(
            model, given.get("normalize", True), given.get("dimensions"), lora,
            default_prompt=given.get("default_prompt", True),
        )  # fmt: skip
    except TreadleError as error:
        raise ApiError(400, str(error), param="dimensions") from error


async def embed(
    service: Service, value: Any, embedder: Embedder, name: str = "input", *, cut: bool = False
) -> tuple[np.ndarray, int]:
    """Vectors float32 ``[n_texts, n]``, and how many tokens were read. Batches and steps of texts
    take turns. ``cut``: read of a text that is too long what there is room for. Raises ApiError,
    TreadleError.
    """
    texts = await service.prepare(_read, value, service.model, embedder.prompt, name, cut)
    made = [np.zeros((0, embedder.n), np.float32)]
    for batch in service.model.engine.together(texts):
        job = service.engine.submit(lambda ids=batch: embedder.run(ids))  # type: ignore[misc]
        made.append(await asyncio.wrap_future(job))
    n_tokens = sum(map(len, texts))
    service.tally.n_embedded += n_tokens
    return np.concatenate(made), n_tokens


def _read(value: Any, model: Model, prompt: str, name: str, cut: bool) -> list[list[int]]:
    """A text, ids, or a list of either; ``prompt`` goes before each text."""
    several = isinstance(value, list) and not (value and is_ids(value))
    items = value if several else [value]
    if value is None or not items or len(items) > MAX_INPUTS:
        raise ApiError(400, f"{name}: expected 1 to {MAX_INPUTS} texts", param=name)
    made = []
    for i, item in enumerate(items):
        if not isinstance(item, str) and not is_ids(item):
            raise wrong(name, item, "texts, or lists of token ids")
        with within(f"{name}[{i}]" if several else name):
            made.append(check_length(_ids(item, model, cut, prompt), model))
    return made


def _ids(item: str | list[int], model: Model, cut: bool, prompt: str = "") -> list[int]:
    """Where some are cut off, a text still ends with the token that ends it."""
    if isinstance(item, list):
        return item[: room(model)] if cut else item
    item = prompt + item
    if not cut:
        check_text(item, model)
        return model.tokenize(item)
    ids, most = model.tokenize(item[: most_characters(model)]), room(model)
    ends = model.tokenizer.add_eos or model.tokenizer.add_sep
    return [*ids[: most - 1], ids[-1]] if ends and len(ids) > most else ids[:most]


def _base64(vector: np.ndarray) -> str:
    return base64.b64encode(vector.astype("<f4").tobytes()).decode()
