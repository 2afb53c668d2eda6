"""OpenAI's older ``/v1/completions``: texts that are gone on with."""

from __future__ import annotations

import secrets
from collections.abc import AsyncIterator
from typing import TYPE_CHECKING, Any

from treadle.server.asked import Asked, is_ids, read_asked, read_prompt
from treadle.server.call import Call, Piece
from treadle.server.fields import Table, flag, mapping, read_fields, refused, whole
from treadle.server.openai_answer import (
    error_event,
    finish_reason,
    head,
    legacy_logprobs,
    timings,
    usage,
    warnings,
)
from treadle.server.openai_chat import MAX_TOP
from treadle.server.problems import ApiError
from treadle.server.service import Service, service_of
from treadle.server.wire import (
    DONE,
    PING,
    Json,
    Response,
    Stream,
    event,
    finished,
    read_json,
    ticking,
)

if TYPE_CHECKING:
    from starlette.requests import Request

MAX_PROMPTS = 256  # of one call

FIELDS: Table = {
    "stream_options": mapping,
    "logprobs": whole(0, MAX_TOP),
    "echo": flag,
    "best_of": whole(1),
    "return_progress": flag,
    "suffix": refused("filling in the middle is not supported yet", ""),
}


def read_completion(service: Service, body: dict[str, Any]) -> Asked:
    """What a body asks for. Raises ApiError, TreadleError."""
    model, given = service.model, read_fields(body, FIELDS)
    asked = read_asked(body, model, service.defaults)
    asked.prompts = [read_prompt(prompt, model) for prompt in _prompts(body.get("prompt"))]
    if given.get("best_of", asked.n) != asked.n:
        raise ApiError(400, "best_of: only the same as n", param="best_of")
    echo = given.get("echo", False)
    if "logprobs" in given:
        if echo:
            raise ApiError(
                400, "logprobs: those of the prompt (echo) are not supported yet",
                param="logprobs", code="unsupported_parameter",
            )  # fmt: skip
        asked.settings["logprobs"] = min(given["logprobs"], model.config.n_vocab)
    asked.progress = asked.stream and given.get("return_progress", False)
    asked.plan(model)
    options = given.get("stream_options", {})
    asked.more = {
        "include_usage": options.get("include_usage") is True,
        "echo": [model.detokenize(ids) for ids in asked.prompts] if echo else None,
    }
    return asked


def _prompts(prompt: Any) -> list[Any]:
    """One prompt, or several: a list of ids is one, a list of texts or of lists is several."""
    if prompt is None:
        raise ApiError(400, "prompt: required", param="prompt")
    several = isinstance(prompt, list) and prompt and not is_ids(prompt)
    prompts = prompt if several else [prompt]
    if len(prompts) > MAX_PROMPTS:
        raise ApiError(400, f"prompt: {len(prompts)}, at most {MAX_PROMPTS}", param="prompt")
    return prompts


async def completions(request: Request) -> Response:
    """``POST /v1/completions``."""
    service, body = service_of(request), await read_json(request)
    call = await service.begin(request, read_completion, body)
    if call.stream:
        return Stream(call, _chunks(call, _head(service)), error_event)
    return Json(completion_answer(service, call, await finished(request, call)))


def completion_answer(service: Service, call: Call, pieces: list[Piece]) -> dict[str, Any]:
    """The whole answer: a piece for each text."""
    return {
        **_head(service),
        "choices": [_choice(call, piece, 0)[0] for piece in pieces],
        "usage": usage(call),
        "timings": timings(call.texts[0]),
        **warnings(call),
    }


def _head(service: Service) -> dict[str, Any]:
    return head(service, "text_completion", f"cmpl-{secrets.token_hex(16)}")


def _choice(call: Call, piece: Piece, offset: int) -> tuple[dict[str, Any], int]:
    """A choice of an answer or a chunk; ``offset``: characters of its text before it."""
    echo, said = call.asked.more["echo"], piece.content
    if echo is not None and offset == 0:
        said = echo[piece.text.prompt] + said
    logprobs = None
    if piece.text.request.n_top is not None:
        logprobs, _ = legacy_logprobs(piece.logprobs, offset)
    return {
        "text": said,
        "index": piece.text.index,
        "logprobs": logprobs,
        "finish_reason": finish_reason(piece.finish_reason),
    }, offset + len(said)


async def _chunks(call: Call, shared: dict[str, Any]) -> AsyncIterator[bytes]:
    offsets = [0] * len(call.texts)
    async for piece in ticking(call):
        if piece is None:
            yield PING
            continue
        if piece.progress is not None:
            told = piece.progress.as_dict(call.came_s)
            choice = {"text": "", "index": piece.text.index, "logprobs": None}
            choices = [{**choice, "finish_reason": None}]
            yield event({**shared, "choices": choices, "prompt_progress": told})
            continue
        i = piece.text.index
        choice, offsets[i] = _choice(call, piece, offsets[i])
        chunk = {**shared, "choices": [choice]}
        if piece.finish_reason is not None:
            chunk |= {"timings": timings(piece.text), **warnings(call)}
        yield event(chunk)
    if call.asked.more["include_usage"]:
        yield event({**shared, "choices": [], "usage": usage(call)})
    yield DONE
