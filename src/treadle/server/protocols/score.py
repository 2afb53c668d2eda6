"""vLLM's ``/score``: scores of how similar or relevant two texts are to each other, for pairs of
texts.

A reranker scores each pair; with other models the score is the cosine of the angle between the
vectors of the two texts.
"""

from __future__ import annotations

import math
import secrets
import time
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

from treadle.api.rerank import Pair, Reranker
from treadle.errors import UnsupportedError
from treadle.server.http.api_errors import ApiError, within
from treadle.server.http.body_fields import Table, flag, read_fields, wrong
from treadle.server.http.http_io import Json, Response, read_json, result
from treadle.server.protocols.embeddings import (
    MAX_INPUTS,
    TRUNCATE,
    embed,
    embedder_of,
    most_tokens,
)
from treadle.server.protocols.rerank import scores_of
from treadle.server.requests.generation_request import (
    adapters,
    check_length,
    check_text,
    most_characters,
    scales_of,
    strengths,
)
from treadle.server.requests.ignored_fields import SCORE as IGNORED
from treadle.server.requests.ignored_fields import ignored_fields
from treadle.server.requests.service import Service, service_of

if TYPE_CHECKING:
    from starlette.requests import Request as HttpRequest

    from treadle.api.model import Model

# vLLM's names of the two sides, older and newer ones.
FIRST = ("text_1", "queries", "data_1")
SECOND = ("text_2", "documents", "data_2")
FIELDS: Table = {
    **TRUNCATE,
    "use_activation": flag,
    "activation": flag,
    "lora": adapters,
    "control_vectors": strengths,
}


async def score(request: HttpRequest) -> Response:
    """``POST /score``: scores of pairs: one text with each of several, or two lists of the same
    length.
    """
    service = service_of(request)
    body = await read_json(request)
    return Json(await result(request, score_answer(service, body)))


async def score_answer(service: Service, body: dict[str, Any]) -> dict[str, Any]:
    """Return the response body of ``/score`` for the request's ``body``: a list of the pairs'
    scores, in order, and token counts. Raises ApiError for invalid fields, TreadleError for
    adapters that are not loaded.
    """
    given = read_fields(body, FIELDS)
    first, first_name = _side(body, FIRST)
    second, second_name = _side(body, SECOND)
    if len(first) not in (1, len(second)):
        raise ApiError(
            400,
            f"{first_name}: {len(first)} texts for {len(second)} in {second_name}: expected one, "
            "or as many",
            param=first_name,
        )
    if "cls.output.weight" in service.model.gguf.tensors:
        texts = [first * len(second) if len(first) == 1 else first, second]
        scores, n_tokens = await _reranked(service, texts, (first_name, second_name), given)
    else:
        scores, n_tokens = await _cosines(service, first, second, (first_name, second_name), given)
    told = ignored_fields(body, IGNORED)
    return {
        "id": f"score-{secrets.token_hex(16)}",
        "object": "list",
        "created": int(time.time()),
        "model": service.name,
        "data": [{"index": i, "object": "score", "score": each} for i, each in enumerate(scores)],
        "usage": {"prompt_tokens": n_tokens, "total_tokens": n_tokens, "completion_tokens": 0},
        **({"warnings": told} if told else {}),
    }


def _side(body: Mapping[str, Any], names: Sequence[str]) -> tuple[list[str], str]:
    """Return the texts of one side of the pairs, and the name of their field; ``names``: of fields
    that may have them. Raises ApiError.
    """
    name = next((name for name in names if body.get(name) is not None), names[0])
    value = body.get(name)
    texts = [value] if isinstance(value, str) else value
    if not isinstance(texts, list) or not 1 <= len(texts) <= MAX_INPUTS:
        raise wrong(name, value, f"a string, or 1 to {MAX_INPUTS} of them")
    for i, item in enumerate(texts):
        if not isinstance(item, str):
            raise wrong(f"{name}[{i}]", item, "a string")
    return texts, name


async def _reranked(
    service: Service,
    texts: Sequence[list[str]],
    names: tuple[str, str],
    given: Mapping[str, Any],
) -> tuple[list[float], int]:
    """Return each pair's score by a reranker, and the number of tokens. ``texts``: the pairs' first
    texts and their second ones. Scores are between 0 and 1 unless ``use_activation`` in the fields
    ``given`` is false. ``names``: the two fields, for errors. Raises ApiError.
    """
    model = service.model
    lora = scales_of(given, model.engine)
    try:
        reranker = Reranker(model, lora)
    except UnsupportedError as error:
        raise ApiError(501, str(error), code="unsupported") from error
    activated = given.get("use_activation", given.get("activation", True))
    if reranker.gives_probabilities and not activated:
        raise ApiError(
            400,
            "use_activation: this model gives probabilities only: expected true",
            param="use_activation",
        )
    most = most_tokens(model, given)
    pairs = await service.prepare(_pairs, model, reranker, texts, names, most)
    scores = await scores_of(service, reranker, pairs)
    if activated and not reranker.gives_probabilities:
        scores = [_sigmoid(each) for each in scores]
    return scores, sum(len(ids) for ids, _ in pairs)


def _pairs(
    model: Model,
    reranker: Reranker,
    texts: Sequence[list[str]],
    names: tuple[str, str],
    most: int | None,
) -> list[Pair]:
    """Return the token ids of each pair as the input of ``reranker``, and where those of the second
    token type begin. ``texts``: the pairs' first texts and their second ones. ``most``: tokens to
    which a pair is truncated, None: a longer one is an error; ``names``: the two fields, for
    errors. Raises ApiError.
    """
    pairs = []
    for i, pair in enumerate(zip(*texts, strict=True)):
        for name, text in zip(names, pair, strict=True):
            if most is None:
                with within(name):
                    check_text(text, model)
        first, second = (text[: most_characters(model)] for text in pair)
        with within(f"{names[1]}[{i}]"):
            ids, at = reranker.pair(first, second, most)
            pairs.append((check_length(ids, model), at))
    return pairs


async def _cosines(
    service: Service,
    first: list[str],
    second: list[str],
    names: tuple[str, str],
    given: Mapping[str, Any],
) -> tuple[list[float], int]:
    """Return the cosine of the angle between the vectors of each pair of a ``first`` and a
    ``second`` text, and the number of tokens. A single first text is paired with each second one.
    ``names``: the two fields, for errors; ``given``: the body's fields. Raises ApiError.
    """
    more = {name: given.get(name) for name in ("lora", "control_vectors")}
    embedder = embedder_of(service.model, {"normalize": True, **more})
    most = most_tokens(service.model, given)
    left, n_left = await embed(service, first, embedder, names[0], most=most)
    right, n_right = await embed(service, second, embedder, names[1], most=most)
    return (left * right).sum(1).tolist(), n_left + n_right


def _sigmoid(x: float) -> float:
    return 1 / (1 + math.exp(-x)) if x >= 0 else math.exp(x) / (1 + math.exp(x))
