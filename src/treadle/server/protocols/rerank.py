"""``/v1/rerank``: scores of documents for a query, in the formats of llama.cpp, Jina and Cohere;
with ``texts`` instead of ``documents``, in that of Text Embeddings Inference.
"""

from __future__ import annotations

import time
import uuid
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

from treadle.api.rerank import Pair, Reranker
from treadle.errors import UnsupportedError
from treadle.server.http.api_errors import ApiError, within
from treadle.server.http.body_fields import Table, flag, read_fields, text, whole, wrong
from treadle.server.http.http_io import Json, Response, read_json, result
from treadle.server.protocols.embeddings import MAX_INPUTS, TRUNCATE, most_tokens
from treadle.server.requests.generation_request import (
    adapters,
    check_length,
    check_text,
    most_characters,
    room,
    scales_of,
    strengths,
)
from treadle.server.requests.ignored_fields import RERANK as IGNORED
from treadle.server.requests.ignored_fields import ignored_fields
from treadle.server.requests.service import Service, service_of

if TYPE_CHECKING:
    from starlette.requests import Request as HttpRequest

    from treadle.api.model import Model
    from treadle.kvcache.prefix_tree import Lora

FIELDS: Table = {
    **TRUNCATE,
    "max_tokens_per_doc": whole(1),
    "query": text,
    "top_n": whole(1),
    "return_documents": flag,
    "return_text": flag,
    "lora": adapters,
    "control_vectors": strengths,
}


async def rerank(request: HttpRequest) -> Response:
    """``POST /v1/rerank``: the documents' scores for a query, best first."""
    service = service_of(request)
    body = await read_json(request)
    return Json(await result(request, rerank_answer(service, body)))


async def cohere_rerank(request: HttpRequest) -> Response:
    """``POST /v2/rerank``: the documents' scores for a query, in the format of Cohere's client."""
    service = service_of(request)
    body = await read_json(request)
    body.pop("texts", None)  # Text Embeddings Inference's field
    found = await result(request, rerank_answer(service, body))
    n_tokens = found["usage"]["prompt_tokens"]
    tokens = {"input_tokens": n_tokens, "output_tokens": 0}
    meta: dict[str, Any] = {"api_version": {"version": "2"}, "tokens": tokens}
    meta |= {"warnings": found["warnings"]} if "warnings" in found else {}  # where Cohere has them
    return Json({"id": str(uuid.uuid4()), "results": found["results"], "meta": meta})


async def scores_of(service: Service, reranker: Reranker, pairs: Sequence[Pair]) -> list[float]:
    """Return the reranker's score of each pair of texts, and charge their tokens to the API key.
    Batches alternate with steps of the scheduler.
    """
    scores: list[float] = []
    for batch in reranker.batches(pairs):
        began = time.perf_counter()
        scores += (await service.steps(reranker.runs(batch))).tolist()
        service.note_embedded(sum(len(ids) for ids, _ in batch), time.perf_counter() - began)
    return scores


async def rerank_answer(service: Service, body: dict[str, Any]) -> Any:
    """Return the response body of ``/v1/rerank`` for the request's ``body``, best document first:
    an object, or for ``texts`` a list. Raises ApiError for invalid fields, TreadleError for
    adapters that are not loaded.
    """
    name = "texts" if "texts" in body else "documents"
    given = read_fields(body, FIELDS)
    documents = _documents(body.get(name), name)
    if "query" not in given:
        raise ApiError(400, "query: expected a string", param="query")
    lora = scales_of(given, service.model.engine)
    model = service.model
    per_document = given.get("max_tokens_per_doc")
    most = room(model) if per_document else most_tokens(model, given)
    asked = model, given["query"], documents, lora, name, most, per_document
    reranker, pairs = await service.prepare(_read, *asked)
    scores = await scores_of(service, reranker, pairs)
    n_tokens = sum(len(ids) for ids, _ in pairs)
    told = ignored_fields(body, IGNORED)
    best = sorted(range(len(scores)), key=lambda i: -scores[i])[: given.get("top_n", len(scores))]
    if name == "texts":  # a bare list has no place for warnings
        for message in told:
            service.warn_once(message)
        whole = bool(given.get("return_text"))
        return [
            {"index": i, "score": scores[i]} | ({"text": documents[i]} if whole else {})
            for i in best
        ]
    results: list[dict[str, Any]] = [{"index": i, "relevance_score": scores[i]} for i in best]
    if given.get("return_documents"):
        for found in results:
            found["document"] = {"text": documents[found["index"]]}
    return {
        "object": "list",
        "model": service.name,
        "results": results,
        "usage": {"prompt_tokens": n_tokens, "total_tokens": n_tokens},
        **({"warnings": told} if told else {}),
    }


def _documents(value: Any, name: str) -> list[str]:
    """Return the texts of the documents in ``value``, of the field ``name``: strings, or objects
    with a ``text``. Raises ApiError.
    """
    if not isinstance(value, list) or not 1 <= len(value) <= MAX_INPUTS:
        raise wrong(name, value, f"1 to {MAX_INPUTS} texts")
    texts = [item.get("text") if isinstance(item, dict) else item for item in value]
    found = [item for item in texts if isinstance(item, str)]
    if len(found) < len(texts):
        raise wrong(name, value, "strings, or objects with a text field")
    return found


def _read(
    model: Model,
    query: str,
    documents: list[str],
    lora: Lora,
    name: str,
    most: int | None,
    per_document: int | None,
) -> tuple[Reranker, list[Pair]]:
    """Return a reranker with the adapters ``lora``, and the token ids of the query with each
    document. ``most``: tokens to which a pair is truncated; ``per_document``: tokens to which each
    document is truncated before that; None: not truncated. ``name``: the documents' field, for
    errors. Raises ApiError.
    """
    try:
        reranker = Reranker(model, lora)
    except UnsupportedError as error:
        raise ApiError(501, str(error), code="unsupported") from error
    pairs = []
    check_text(query, model)
    for i, document in enumerate(documents):
        with within(f"{name}[{i}]"):
            if most is None:
                check_text(document, model)
            document = document[: most_characters(model)]
            if per_document is not None:
                own = model.tokenize(document, bos=False)[:per_document]
                document = model.tokenizer.decode(own, start=False)
            ids, second = reranker.pair(query, document, most)
            pairs.append((check_length(ids, model), second))
    return reranker, pairs
