"""OpenAI's legacy ``/v1/completions``: continuations of raw prompts."""

from __future__ import annotations

import secrets
from collections.abc import AsyncIterator, Mapping
from functools import partial
from typing import TYPE_CHECKING, Any

from treadle.errors import UnsupportedError
from treadle.scheduler.request import MediaPrompt
from treadle.server.http.api_errors import ApiError
from treadle.server.http.body_fields import Table, flag, read_fields, refused, text, whole
from treadle.server.http.http_io import Response, event, read_json, result
from treadle.server.protocols.answer_fields import timings, warnings
from treadle.server.protocols.llamacpp_answer import verbose
from treadle.server.protocols.openai.answer import (
    error_event,
    finish_reason,
    head,
    legacy_logprobs,
    usage,
)
from treadle.server.protocols.openai.chat import MAX_TOP, STREAM_OPTIONS
from treadle.server.protocols.openai.echo import measure_prompts
from treadle.server.requests.generation_request import (
    MAX_N,
    GenerationRequest,
    check_length,
    check_text,
    read_generation,
    read_prompt,
    several,
)
from treadle.server.requests.http_responses import (
    DONE,
    PING,
    StreamedResponse,
    finished,
    pieces_with_pings,
    whole_json,
)
from treadle.server.requests.ignored_fields import COMPLETIONS, STREAMED, ignored_fields
from treadle.server.requests.request_media import prompt_text
from treadle.server.requests.request_stream import RequestStream, StreamPiece
from treadle.server.requests.service import Service, service_of
from treadle.tokenizer.fill_in_middle import infill_ids

if TYPE_CHECKING:
    from starlette.requests import Request as HttpRequest

    from treadle.api.model import Model

MOST_ECHOED = 4_000_000  # log-probabilities of prompts: some hundred MB
FIELDS: Table = {
    "stream_options": STREAM_OPTIONS,
    "logprobs": whole(0, MAX_TOP),
    "echo": flag,
    "best_of": whole(1),
    "return_progress": flag,
    "timings_per_token": flag,
    "verbose": flag,
    "n_probs": whole(0, MAX_TOP),
    "n_cmpl": whole(1, MAX_N),
    "add_special_tokens": refused(
        "special tokens are added as the model requires: send token ids for other input", True
    ),
    "prompt_embeds": refused("not supported: send strings or token ids"),
    "suffix": text,
}


def read_completion(service: Service, body: dict[str, Any]) -> GenerationRequest:
    """Return the generation request of a body of ``/v1/completions``. Raises ApiError for invalid
    fields, TreadleError for settings out of range.
    """
    model = service.model
    given = read_fields(body, FIELDS)
    generation = read_generation({"n": given.get("n_cmpl"), **body}, model, service.defaults)
    generation.prompts = read_prompts(body, model)
    if given.get("best_of", generation.n) != generation.n:
        raise ApiError(400, "best_of: expected the same value as n", param="best_of")
    echo = given.get("echo", False)
    n_top = given.get("logprobs", given.get("n_probs") or None)
    if n_top is not None:
        generation.settings["logprobs"] = top = min(n_top, model.config.n_vocab)
        if echo and any(isinstance(ids, MediaPrompt) for ids in generation.prompts):
            raise ApiError(
                400,
                "logprobs: with echo, not supported for prompts with pictures or sounds",
                param="logprobs",
            )
        if echo and generation.n * (1 + top) * sum(map(len, generation.prompts)) > MOST_ECHOED:
            raise ApiError(
                400,
                f"logprobs: with echo, the prompts have more than {MOST_ECHOED}: request fewer",
                param="logprobs",
            )
    generation.progress = generation.is_streamed and given.get("return_progress", False)
    generation.plan(model)
    generation.ignored = ignored_fields(body, COMPLETIONS)
    generation.ignored += ignored_fields(
        body.get("stream_options") or {}, STREAMED, "stream_options."
    )
    options = given.get("stream_options", {})
    generation.more = {
        "include_usage": options.get("include_usage", False),
        "timings_per_token": given.get("timings_per_token", False),
        "verbose": given.get("verbose", False),
        "echo": [prompt_text(ids, model) for ids in generation.prompts] if echo else None,
    }
    return generation


def read_prompts(body: Mapping[str, Any], model: Model) -> list[list[int]]:
    """Return the token ids of each of a body's prompts; with a ``suffix``, of fill-in-the-middle
    prompts. Raises ApiError.
    """
    prompts = several(body.get("prompt"))
    suffix = read_fields(body, FIELDS).get("suffix")
    if not suffix:
        return [read_prompt(prompt, model) for prompt in prompts]
    result = []
    for prompt in prompts:
        before = text("prompt", prompt)
        check_text(before + suffix, model)
        try:
            ids = infill_ids(model.tokenizer, before, suffix)
        except UnsupportedError as error:
            raise ApiError(
                400, f"suffix: {error}", param="suffix", code="unsupported_parameter"
            ) from None
        result.append(check_length(ids, model))
    return result


async def completions(request: HttpRequest) -> Response:
    """``POST /v1/completions``: continue one or several raw prompts, whole or as a stream."""
    service = service_of(request)
    body = await read_json(request)
    stream = await service.begin(request, read_completion, body)
    await result(request, measure_prompts(service, stream))
    if stream.is_streamed:
        return StreamedResponse(stream, _chunks(service, stream), error_event)
    pieces = await finished(request, stream)
    return await whole_json(partial(completion_answer, service, stream), pieces)


def completion_answer(
    service: Service, stream: RequestStream, pieces: list[StreamPiece]
) -> dict[str, Any]:
    """Return the response body of a finished request; ``pieces``: one for each output."""
    return {
        **_head(service),
        "choices": [_choice(stream, piece) for piece in pieces],
        "usage": usage(stream),
        "timings": timings(stream.outputs[0]),
        **warnings(stream),
        **verbose(service, stream, pieces[0]),
    }


def _head(service: Service) -> dict[str, Any]:
    return head(service, "text_completion", f"cmpl-{secrets.token_hex(16)}")


def _choice(stream: RequestStream, piece: StreamPiece, *, first: bool = True) -> dict[str, Any]:
    """Return an object for ``choices`` of a response or chunk: text, log-probabilities and finish
    reason of ``piece``. ``first``: it is the first piece of its output, so the echoed prompt
    precedes it if requested.
    """
    more = stream.generation.more
    output = piece.output
    said = piece.content
    entries = piece.logprobs
    before = "" if more["echo"] is None else more["echo"][output.prompt]
    offsets = [len(before) + at for at in piece.starts]
    if first:
        said = before + said
        if "measured" in more:
            measured = more["measured"][output.prompt]
            entries = measured + entries
            offsets = output.answer.tokenizer.starts(entry.id for entry in measured) + offsets
    return {
        "text": said,
        "index": output.index,
        "logprobs": None if output.request.n_top is None else legacy_logprobs(entries, offsets),
        "finish_reason": finish_reason(piece.finish_reason),
    }


async def _chunks(service: Service, stream: RequestStream) -> AsyncIterator[bytes]:
    shared = _head(service)
    begun = set[int]()
    each = stream.generation.more["timings_per_token"]
    async for piece in pieces_with_pings(stream):
        if piece is None:
            yield PING
            continue
        if piece.progress is not None:
            told = piece.progress.as_dict(stream.arrival_s)
            choice = {"text": "", "index": piece.output.index, "logprobs": None}
            choices = [{**choice, "finish_reason": None}]
            yield event({**shared, "choices": choices, "prompt_progress": told})
            continue
        i = piece.output.index
        chunk = {**shared, "choices": [_choice(stream, piece, first=i not in begun)]}
        begun.add(i)
        if piece.finish_reason is not None or each:
            chunk["timings"] = timings(piece.output)
        if piece.finish_reason is not None:
            chunk |= {**warnings(stream), **verbose(service, stream, piece)}
        yield event(chunk)
    if stream.generation.more["include_usage"]:
        last: dict[str, Any] = {"usage": usage(stream), "timings": timings(stream.outputs[0])}
        yield event({**shared, "choices": [], **last})
    yield DONE
