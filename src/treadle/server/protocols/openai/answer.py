"""Parts of OpenAI's responses that others use too: first fields, token counts, finish reasons,
error events, legacy log-probabilities.
"""

from __future__ import annotations

import math
import time
from collections.abc import Awaitable, Callable, Iterable
from typing import TYPE_CHECKING, Any

from treadle.server.http.http_io import Json, event, read_json
from treadle.server.protocols.answer_fields import media_tokens, media_usage
from treadle.server.requests.service import service_of

if TYPE_CHECKING:
    from starlette.requests import Request as HttpRequest

    from treadle.sampling.logprobs import TokenLogprob
    from treadle.server.http.api_errors import ApiError
    from treadle.server.requests.generation_request import GenerationRequest
    from treadle.server.requests.request_stream import RequestStream
    from treadle.server.requests.service import Service


def head(service: Service, kind: str, name: str) -> dict[str, Any]:
    """Return the first fields of an OpenAI response. ``kind``: its ``object``, such as
    "chat.completion"; ``name``: its id.
    """
    return {
        "id": name,
        "object": kind,
        "created": int(time.time()),
        "model": service.name,
        "system_fingerprint": service.fingerprint,
    }


def counter(
    read: Callable[[Service, dict[str, Any]], GenerationRequest],
) -> Callable[[HttpRequest], Awaitable[Json]]:
    """Return an endpoint that counts the prompt tokens of the generation request that
    ``read(service, body)`` returns, and generates nothing.
    """

    async def input_tokens(request: HttpRequest) -> Json:
        service = service_of(request)
        body = await read_json(request)
        generation = await service.prepare(read, service, body)
        n_tokens = sum(map(len, generation.prompts))
        return Json({"object": "response.input_tokens", "input_tokens": n_tokens})

    return input_tokens


def finish_reason(reason: str | None) -> str | None:
    """Return OpenAI's finish reason for ``reason``, that of an output: "length" also for a full
    context ("context"); others, and None (not finished), unchanged.
    """
    return "length" if reason == "context" else reason


def usage(stream: RequestStream) -> dict[str, Any]:
    """Return a finished request's token counts, and its pictures and sounds. Each prompt counts
    once, however many outputs (``n``) it has.
    """
    first = {output.prompt: output for output in reversed(stream.outputs)}
    n_prompt = sum(output.answer.timings.n_prompt for output in first.values())
    n_cached = sum(output.answer.timings.n_cached for output in first.values())
    n_written = sum(len(output.answer.ids) for output in stream.outputs)
    media = [each for _, output in sorted(first.items()) for each in output.answer.media]
    return {
        "prompt_tokens": n_prompt,
        "completion_tokens": n_written,
        "total_tokens": n_prompt + n_written,
        "prompt_tokens_details": {"cached_tokens": n_cached, **media_tokens(media)},
        "completion_tokens_details": {
            "reasoning_tokens": sum(output.n_reasoning for output in stream.outputs)
        },
        **media_usage(media),
    }


def error_event(error: ApiError) -> bytes:
    """Return an error as the last server-sent event of a stream."""
    return event(error.as_dict())


def legacy_logprobs(entries: Iterable[TokenLogprob], offsets: list[int]) -> dict[str, Any]:
    """Return the log-probabilities ``entries`` in the form of ``/v1/completions``: an object of
    lists, an element for each token. ``offsets``: for each entry, the index of the character of the
    output at which its token begins.
    """
    tokens: list[str] = []
    result: dict[str, list[Any]] = {
        "tokens": tokens,
        "token_logprobs": [],
        "top_logprobs": [],
        "text_offset": offsets,
    }
    for entry in entries:
        tokens.append(entry.token)
        known = not math.isnan(entry.logprob)  # a prompt's first token has no probability
        result["token_logprobs"].append(entry.logprob if known else None)
        tops: dict[str, float] = {}
        for top in entry.top_logprobs:
            tops.setdefault(top.token, top.logprob)  # partial characters may have the same text
        result["top_logprobs"].append(tops if known else None)
    return result
