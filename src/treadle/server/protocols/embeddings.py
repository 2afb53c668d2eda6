"""OpenAI's ``/v1/embeddings`` and llama.cpp's ``/embedding``. Other endpoints use the functions
here that read inputs and compute vectors.
"""

from __future__ import annotations

import base64
import time
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

import numpy as np

from treadle.api.embedding import EUCLIDEAN, NOTHING, Embedder, scaled
from treadle.errors import TreadleError
from treadle.server.http.api_errors import ApiError, within
from treadle.server.http.body_fields import Table, flag, one_of, read_fields, refused, whole, wrong
from treadle.server.http.http_io import Json, Response, read_json, result
from treadle.server.requests.generation_request import (
    adapters,
    check_length,
    check_text,
    item_ids,
    most_characters,
    room,
    scales_of,
    strengths,
)
from treadle.server.requests.ignored_fields import EMBEDDINGS as IGNORED
from treadle.server.requests.ignored_fields import ignored_fields
from treadle.server.requests.service import Service, service_of

if TYPE_CHECKING:
    from starlette.requests import Request as HttpRequest

    from treadle.api.model import Model

MAX_INPUTS = 2048

CUT: Table = {"dimensions": whole(1)}
# API names of poolings, and ``Config``'s.
POOLINGS = {"mean": "mean", "cls": "first", "last": "last", "none": "none"}
READ: Table = {
    "lora": adapters,
    "control_vectors": strengths,
    "pooling": one_of(*POOLINGS),
    "default_prompt": flag,
}


def _is_cut(name: str, value: Any) -> bool:
    """Return whether long inputs are truncated, from the ``value`` of the field ``name``: true or
    false, or Cohere's "none" or "end". Raises ApiError for other values.
    """
    if isinstance(value, str):
        return one_of("none", "end")(name, value.lower()) == "end"
    return flag(name, value)


def _side(name: str, value: Any) -> str:
    """Return the side at which inputs are truncated, the ``value`` of the field ``name``. Raises
    ApiError unless it is "right", the only one supported.
    """
    return one_of("right")(name, value.lower() if isinstance(value, str) else value)


TRUNCATE: Table = {
    "truncate": _is_cut,
    "truncate_prompt_tokens": whole(-1),
    "truncation_side": _side,
    "truncation_direction": _side,
}
FIELDS: Table = {
    **CUT,
    **READ,
    **TRUNCATE,
    "normalize": flag,
    "use_activation": flag,
    "embd_normalize": whole(NOTHING),
    "encoding_format": one_of("float", "base64"),
    "embed_dtype": refused("not supported: vectors are float32", "float32"),
    "endianness": refused("not supported: base64 is little-endian", "native", "little"),
    "add_special_tokens": refused(
        "special tokens are added as the model requires: send token ids for other input", True
    ),
    "messages": refused("not supported: send texts as input"),
    "late_chunking": refused("not supported: each text is embedded separately", False),
}
NATIVE: Table = {**READ, **TRUNCATE, "embd_normalize": whole(NOTHING)}


async def embeddings(request: HttpRequest) -> Response:
    """``POST /v1/embeddings``: a vector for each input. A body with ``content`` and no ``input`` is
    answered as by ``/embedding``.
    """
    service = service_of(request)
    body = await read_json(request)
    if "input" not in body and "content" in body:
        return await _native(request, service, body)
    return Json(await result(request, embeddings_answer(service, body)))


async def embeddings_answer(service: Service, body: dict[str, Any]) -> dict[str, Any]:
    """Return the response body of ``/v1/embeddings`` for the request's ``body``: OpenAI's list of
    vectors, and token counts. Raises ApiError for invalid fields, TreadleError for options that the
    model does not support.
    """
    given = read_fields(body, FIELDS)
    if given.get("pooling") == "none":
        raise ApiError(
            400,
            "pooling: none returns a vector for each token: use /embedding",
            param="pooling",
        )
    by = given.get("embd_normalize", EUCLIDEAN)
    unit = given.get("normalize", given.get("use_activation", True)) and by == EUCLIDEAN
    embedder = embedder_of(service.model, {**given, "normalize": unit})
    most = most_tokens(service.model, given)
    vectors, n_tokens = await embed(service, body.get("input"), embedder, most=most)
    if by != EUCLIDEAN:
        vectors = scaled(vectors, by)
    told = [*ignored_fields(body, IGNORED), *filter(None, [embedder.note])]
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
        **({"warnings": told} if told else {}),
    }


async def native_embedding(request: HttpRequest) -> Response:
    """``POST /embedding``, llama.cpp's: a list of objects, each with a list of vectors: one, or
    with ``pooling`` "none" one for each token.
    """
    return await _native(request, service_of(request), await read_json(request))


async def _native(request: HttpRequest, service: Service, body: dict[str, Any]) -> Response:
    content = body.get("content", body.get("input"))
    given = read_fields(body, NATIVE)
    by = given.get("embd_normalize", EUCLIDEAN)
    most = most_tokens(service.model, given)
    pooling = given.get("pooling", service.model.config.pooling)
    embedder = embedder_of(service.model, {**given, "normalize": by == EUCLIDEAN})
    for message in ignored_fields(body, IGNORED):  # the response is a bare list without warnings
        service.warn_once(message)
    if pooling == "none":
        work = embed_tokens(service, content, embedder, most)
        made = [rows.tolist() for rows in await result(request, work)]
    else:
        vectors, _ = await result(request, embed(service, content, embedder, "content", most=most))
        made = [[row] for row in scaled(vectors, by if by != EUCLIDEAN else NOTHING).tolist()]
    return Json([{"index": i, "embedding": rows} for i, rows in enumerate(made)])


def most_tokens(model: Model, given: Mapping[str, Any]) -> int | None:
    """Return the number of tokens to which inputs are truncated, by the body's fields ``given``;
    None: longer inputs are errors. Raises ApiError.
    """
    asked = given.get("truncate_prompt_tokens")
    if asked is None:
        return room(model) if given.get("truncate") else None
    if asked == 0:
        raise wrong("truncate_prompt_tokens", 0, "a positive whole number, or -1")
    return room(model) if asked == -1 else min(asked, room(model))


def embedder_of(model: Model, given: Mapping[str, Any]) -> Embedder:
    """Return an embedder with the options in ``given``, a body's fields: pooling, dimensions,
    adapters. Raises ApiError and TreadleError for those that the model does not support.
    """
    pooling = given.get("pooling")
    own = model.config.pooling
    free = pooling == "none" or (own, pooling) == ("none", "mean")
    if pooling is not None and not free and POOLINGS[pooling] != own:
        name = next(name for name, ours in POOLINGS.items() if ours == own)
        raise ApiError(
            400, f"pooling: {pooling} is not supported: this model uses {name}", param="pooling"
        )
    lora = scales_of(given, model.engine)
    try:
        return Embedder(
            model,
            given.get("normalize", True),
            given.get("dimensions"),
            lora,
            default_prompt=given.get("default_prompt", True),
        )
    except TreadleError as error:
        raise ApiError(400, str(error), param="dimensions") from error


async def embed(
    service: Service,
    value: Any,
    embedder: Embedder,
    name: str = "input",
    *,
    most: int | None = None,
) -> tuple[np.ndarray, int]:
    """Return vectors, f32 ``[n_texts, n]``, and the number of tokens processed. ``value``: the
    inputs, in the field ``name``; ``most``: tokens to which each is truncated, None for an error if
    it is too long. Batches alternate with steps of the scheduler. Raises ApiError and TreadleError.
    """
    texts = await service.prepare(_read, value, service.model, embedder, name, most)
    made = [np.zeros((0, embedder.n), np.float32)]
    for batch in service.model.engine.batches(texts):
        began = time.perf_counter()
        made.append(await service.steps(embedder.runs(batch)))
        service.note_embedded(sum(map(len, batch)), time.perf_counter() - began)
    return np.concatenate(made), sum(map(len, texts))


async def embed_tokens(
    service: Service, value: Any, embedder: Embedder, most: int | None
) -> list[np.ndarray]:
    """Return for each input in ``value`` the vectors of its tokens, f32 ``[n_tokens, n_embd]``, not
    pooled. ``most``: tokens to which each input is truncated, None for an error if it is too long.
    """
    result = []
    for ids in await service.prepare(_read, value, service.model, embedder, "content", most):
        began = time.perf_counter()
        result.append(await service.steps(embedder.token_runs(ids)))
        service.note_embedded(len(ids), time.perf_counter() - began)
    return result


def _read(
    value: Any, model: Model, embedder: Embedder, name: str, most: int | None
) -> list[list[int]]:
    """Return the token ids of each input. ``value``, in the field ``name``: a string, a list of ids
    and strings, llama.cpp's object of a ``prompt_string`` or of ``content`` parts, or a list of
    these. ``most``: tokens to which each is truncated, None: a longer one is an error. The
    embedder's prompt precedes each string. Raises ApiError.
    """
    several = isinstance(value, list) and not any(type(item) is int for item in value)
    items = value if several else [value]
    if value is None or not items or len(items) > MAX_INPUTS:
        raise ApiError(400, f"{name}: expected 1 to {MAX_INPUTS} texts", param=name)
    result = []
    for i, item in enumerate(items):
        if isinstance(item, dict):
            item = _text_of(name, item)
        mixed = isinstance(item, list) and all(type(part) in (int, str) for part in item)
        if not isinstance(item, str) and not mixed:
            raise wrong(name, item, "strings, or lists of token ids")
        with within(f"{name}[{i}]" if several else name):
            result.append(check_length(_ids(item, model, embedder, most), model))
    return result


def _text_of(name: str, item: Mapping[str, Any]) -> str:
    """Return the text of ``item``, an input that is an object of ``prompt_string`` or ``content``
    parts, in the field ``name``. Raises ApiError for pictures and sounds.
    """
    parts = item.get("content")
    if isinstance(item.get("prompt_string"), str) and not item.get("multimodal_data"):
        return str(item["prompt_string"])
    if not isinstance(parts, list) and "multimodal_data" not in item:
        raise wrong(name, item, "strings, lists of token ids, or lists of parts in content")
    texts = [
        part["text"]
        for part in parts or ()
        if isinstance(part, dict) and part.get("type") == "text" and type(part.get("text")) is str
    ]
    if not texts or len(texts) != len(parts or ()):
        raise ApiError(
            400,
            f"{name}: pictures and sounds get no vectors: expected strings, or lists of token ids",
            param=name,
            code="unsupported_content",
        )
    return "".join(texts)


def _ids(
    item: str | list[int | str], model: Model, embedder: Embedder, most: int | None
) -> list[int]:
    if isinstance(item, list):
        ids = item_ids(item, model)
        return ids if most is None else embedder.cut(ids, most, whole=False)
    item = embedder.prompt + item
    if most is None:
        check_text(item, model)
        return model.tokenize(item)
    return embedder.cut(model.tokenize(item[: most_characters(model)]), most)


def _base64(vector: np.ndarray) -> str:
    return base64.b64encode(vector.astype("<f4").tobytes()).decode()
