"""OpenAI's ``/v1/chat/completions``: from a body to a generation request (``read_chat``), and from
its output to a response or events (``respond``).

The endpoint itself is ``chat_endpoint.chat_completions``, which calls ``respond`` for requests
without tools of MCP servers.
"""

from __future__ import annotations

import secrets
from collections.abc import AsyncIterator, Mapping
from dataclasses import replace
from functools import partial
from typing import TYPE_CHECKING, Any

from treadle.chat.tools import OutputPiece, ParsedOutput
from treadle.chat.tools.openai_objects import delta_of, message_of
from treadle.server.http.api_errors import ApiError
from treadle.server.http.body_fields import (
    Table,
    array,
    flag,
    object_of,
    one_of,
    read_fields,
    refused,
    whole,
)
from treadle.server.http.http_io import Response, event
from treadle.server.protocols.answer_fields import timings, warnings
from treadle.server.protocols.llamacpp_answer import verbose
from treadle.server.protocols.openai.answer import error_event, finish_reason, head, usage
from treadle.server.requests.chat_prompt import read_conversation
from treadle.server.requests.generation_request import MAX_N, GenerationRequest, read_generation
from treadle.server.requests.http_responses import (
    DONE,
    PING,
    StreamedResponse,
    finished,
    pieces_with_pings,
    whole_json,
)
from treadle.server.requests.ignored_fields import CHAT, STREAMED, ignored_fields
from treadle.server.requests.request_stream import RequestStream, StreamPiece
from treadle.server.requests.service import Service

if TYPE_CHECKING:
    from starlette.requests import Request as HttpRequest

    from treadle.api.model import Model

MAX_TOP = 64  # alternatives to a token
STREAM_OPTIONS = object_of({"include_usage": flag})
LOGPROBS: Table = {"logprobs": flag, "top_logprobs": whole(0, MAX_TOP)}

FIELDS: Table = {
    "stream_options": STREAM_OPTIONS,
    "timings_per_token": flag,
    "return_progress": flag,
    "verbose": flag,
    "n_probs": whole(0, MAX_TOP),
    "n_cmpl": whole(1, MAX_N),
    "include_reasoning": flag,
    "reasoning_format": one_of("auto", "deepseek", "deepseek-legacy", "none"),
    "chat_template": refused("not supported: the model's own template is used", ""),
    "functions": refused("not supported: use tools", []),
    "function_call": refused("not supported: use tool_choice", "none", "auto"),
    "modalities": refused("not supported: treadle generates text only", ["text"]),
    "audio": refused("not supported: treadle generates text only"),
    "web_search_options": refused("not supported: treadle has no web search"),
    "suffix": refused("not supported in chats", ""),
    "messages": array,
}


def read_chat(service: Service, body: dict[str, Any]) -> GenerationRequest:
    """Return the generation request of a body of ``/v1/chat/completions``. Raises ApiError for
    invalid fields, TreadleError for settings out of range.
    """
    model = service.model
    given = read_fields(body, FIELDS)
    generation = read_generation({"n": given.get("n_cmpl"), **body}, model, service.defaults)
    generation.settings["logprobs"] = read_logprobs(body, model)
    if given.get("n_probs") and generation.settings["logprobs"] is None:
        generation.settings["logprobs"] = min(given["n_probs"], model.config.n_vocab)
    read_conversation(body, service, generation)
    generation.ignored = ignored_fields(body, CHAT)
    generation.ignored += ignored_fields(
        body.get("stream_options") or {}, STREAMED, "stream_options."
    )
    if body.get("documents") and "documents" not in model.template.source:
        generation.ignored.append("documents: ignored: the chat template does not use them")
    if given.get("reasoning_format") == "none":  # all output is content, marks included
        marks = replace(generation.planned.marks, thought=None, opened=False)
        generation.planned = replace(generation.planned, marks=marks)
    elif given.get("reasoning_format") == "deepseek-legacy":
        generation.ignored.append(
            "reasoning_format: deepseek-legacy is ignored: the content has no reasoning"
        )
    options = given.get("stream_options", {})
    generation.progress = generation.is_streamed and given.get("return_progress", False)
    generation.more = {
        "include_usage": options.get("include_usage", False),
        "timings_per_token": given.get("timings_per_token", False),
        "verbose": given.get("verbose", False),
        "reasoning": given.get("include_reasoning", True),
    }
    return generation


def read_logprobs(body: Mapping[str, Any], model: Model) -> int | None:
    """Return how many alternatives to each token the answer is to have, by ``logprobs`` and
    ``top_logprobs`` of the body; None: no log-probabilities at all. Raises ApiError.
    """
    given = read_fields(body, LOGPROBS)
    n_top: int = given.get("top_logprobs", 0)
    if given.get("logprobs"):
        return min(n_top, model.config.n_vocab)
    if n_top:
        raise ApiError(400, "top_logprobs: logprobs must be true", param="top_logprobs")
    return None


async def respond(request: HttpRequest, service: Service, body: dict[str, Any]) -> Response:
    """Return the response to ``POST /v1/chat/completions``, whole or as a stream."""
    stream = await service.begin(request, read_chat, body)
    id = _new_id()
    stream.ids.add(id)
    if stream.is_streamed:
        return StreamedResponse(stream, _chunks(service, stream, id), error_event)
    pieces = await finished(request, stream)
    return await whole_json(partial(chat_answer, service, stream, id=id), pieces)


def chat_answer(
    service: Service, stream: RequestStream, pieces: list[StreamPiece], *, id: str | None = None
) -> dict[str, Any]:
    """Return the response body of the finished request of ``stream``; ``pieces``: one for each
    output. ``id``: the response's, None for a new one.
    """
    return answer_of(
        service, stream, pieces, [piece.parsed_parts() for piece in pieces], id or _new_id()
    )


def answer_of(
    service: Service,
    stream: RequestStream,
    pieces: list[StreamPiece],
    said: list[list[OutputPiece]],
    id: str,
) -> dict[str, Any]:
    """Return the response body of a finished request, whose outputs are parsed already: ``said``
    has the parsed parts of each of ``pieces``.
    """
    told = zip(pieces, (kept(stream, parts) for parts in said), strict=True)
    choices = [
        choice_of(piece, {"message": message_of(ParsedOutput.of(parts))}) for piece, parts in told
    ]
    return {
        **head(service, "chat.completion", id),
        "choices": choices,
        "usage": usage(stream),
        "timings": timings(stream.outputs[0]),
        **warnings(stream),
        **verbose(service, stream, pieces[0]),
    }


def kept(stream: RequestStream, parts: list[OutputPiece]) -> list[OutputPiece]:
    """Return ``parts`` without reasoning if the request of ``stream`` has vLLM's
    ``include_reasoning: false``, else all of them.
    """
    wanted = stream.generation.more["reasoning"]
    return parts if wanted else [part for part in parts if part.kind != "reasoning"]


def _new_id() -> str:
    return f"chatcmpl-{secrets.token_hex(16)}"


def choice_of(piece: StreamPiece, said: dict[str, Any]) -> dict[str, Any]:
    """Return an object for ``choices`` of a response or chunk: the index, log-probabilities and
    finish reason of ``piece``, and ``said``, which is ``{"message": ...}`` or ``{"delta": ...}``.
    """
    result: dict[str, Any] = {"index": piece.output.index, **said}
    if piece.output.request.n_top is not None:
        result["logprobs"] = {"content": [entry.as_dict() for entry in piece.logprobs]}
    else:
        result["logprobs"] = None
    calls = piece.finish_reason == "stop" and piece.output.scanner.n_calls
    result["finish_reason"] = "tool_calls" if calls else finish_reason(piece.finish_reason)
    return result


async def _chunks(service: Service, stream: RequestStream, id: str) -> AsyncIterator[bytes]:
    """Yield the events of a stream, whose chunks have the id ``id``: a role for each output at
    once, before any token exists; then deltas, each output's end, and token counts if requested.
    """
    more = stream.generation.more
    shared = head(service, "chat.completion.chunk", id)
    for output in stream.outputs:
        opening = {"role": "assistant", "content": None}
        choice = {"index": output.index, "delta": opening, "logprobs": None, "finish_reason": None}
        yield event({**shared, "choices": [choice]})
    async for piece in pieces_with_pings(stream):
        if piece is None:
            yield PING
            continue
        if piece.progress is not None:
            delta = {**shared, "choices": [choice_of(piece, {"delta": {}})]}
            yield event({**delta, "prompt_progress": piece.progress.as_dict(stream.arrival_s)})
            continue
        for part, delta in _parts(piece):
            chunk = {**shared, "choices": [choice_of(part, {"delta": delta})]}
            if part.finish_reason is not None or more["timings_per_token"]:
                chunk["timings"] = timings(part.output)
            if part.finish_reason is not None:
                chunk |= warnings(stream) | verbose(service, stream, piece)
            yield event(chunk)
    if more["include_usage"]:
        told = {"usage": usage(stream), "timings": timings(stream.outputs[0])}
        yield event({**shared, "choices": [], **told})
    yield DONE


def _parts(piece: StreamPiece) -> list[tuple[StreamPiece, dict[str, Any]]]:
    """Split a piece of output into parts for chunks: return pairs of a piece and its delta. The
    last part of an output has an empty delta and the finish reason.
    """
    deltas = [delta_of(part) for part in kept(piece.output.stream, piece.parsed_parts())]
    end = piece.finish_reason is not None
    if piece.logprobs and not deltas and not end:  # of text that is held back
        deltas = [{"content": ""}]
    parts = []
    for delta in [*deltas, *([{}] if end else [])]:
        reason = None if delta else piece.finish_reason
        parts.append((replace(piece, finish_reason=reason), delta))
        piece = replace(piece, logprobs=[])  # sent once
    return parts
