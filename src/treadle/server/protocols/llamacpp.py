"""llama.cpp's own endpoints: ``/completion``, ``/infill``, tokens, templates, health and
properties.
"""

from __future__ import annotations

import dataclasses
from collections.abc import AsyncIterator
from contextlib import suppress
from functools import reduce
from operator import getitem
from typing import Any

from starlette.requests import Request as HttpRequest

from treadle.chat.media_parts import MARKER
from treadle.errors import UnsupportedError
from treadle.sampling import Sampling
from treadle.server.http.api_errors import ApiError, busy
from treadle.server.http.body_fields import (
    Table,
    array,
    flag,
    mapping,
    object_of,
    read_fields,
    text,
    texts,
    whole,
    wrong,
)
from treadle.server.http.http_io import Json, Response, event, read_json
from treadle.server.http.redaction import without_folders
from treadle.server.protocols.answer_fields import timings
from treadle.server.protocols.llamacpp_answer import final_fields, piece_fields, sampling_dict
from treadle.server.protocols.openai.answer import error_event
from treadle.server.protocols.openai.chat import MAX_TOP
from treadle.server.requests.chat_prompt import conversation_text
from treadle.server.requests.generation_request import (
    GenerationRequest,
    check_length,
    check_text,
    read_generation,
    read_prompt,
    room,
    several,
)
from treadle.server.requests.http_responses import (
    PING,
    StreamedResponse,
    finished,
    pieces_with_pings,
    whole_json,
)
from treadle.server.requests.ignored_fields import NATIVE, ignored_fields
from treadle.server.requests.request_media import check_vocabulary, prompt_text
from treadle.server.requests.request_stream import RequestStream, StreamPiece
from treadle.server.requests.service import Service, service_of
from treadle.tokenizer.fill_in_middle import infill_ids

MOST_NAMES = 256  # of ``response_fields``


def _names(name: str, value: Any) -> list[str]:
    """Read the field ``name``, a list of at most ``MOST_NAMES`` names of response fields: the last
    event of each stream looks them all up.
    """
    found = texts(name, value)
    if len(found) > MOST_NAMES:
        raise ApiError(400, f"{name}: {len(found)} names, at most {MOST_NAMES}", param=name)
    return found


def _n_probs(name: str, value: Any) -> int:
    """Read ``logprobs``, another name of ``n_probs``: the number of alternatives to each token;
    true means 1.
    """
    return whole(0, MAX_TOP)(name, int(value) if isinstance(value, bool) else value)


COMPLETION: Table = {
    "n_probs": whole(0, MAX_TOP),
    "logprobs": _n_probs,
    "return_tokens": flag,
    "timings_per_token": flag,
    "return_progress": flag,
    "response_fields": _names,
    "n_cmpl": whole(1),
}


def read_completion(service: Service, body: dict[str, Any]) -> GenerationRequest:
    """Return the generation request of a body of ``/completion``. Raises ApiError for invalid
    fields, TreadleError for settings out of range.
    """
    given = read_fields(body, COMPLETION)
    generation = read_generation(
        {"n": given.get("n_cmpl"), **body}, service.model, service.defaults
    )
    generation.prompts = [read_prompt(each, service.model) for each in several(body.get("prompt"))]
    if n_probs := given.get("n_probs", given.get("logprobs")):
        generation.settings["logprobs"] = min(n_probs, service.model.config.n_vocab)
    generation.progress = generation.is_streamed and given.get("return_progress", False)
    generation.plan(service.model)
    generation.ignored = ignored_fields(body, NATIVE)
    generation.more = {
        "tokens": given.get("return_tokens", False),
        "timings_per_token": given.get("timings_per_token", False),
        "fields": given.get("response_fields", []),
    }
    return generation


INFILL: Table = {
    "input_prefix": text,
    "input_suffix": text,
    "input_extra": array,
    "prompt": text,
}


def read_infill(service: Service, body: dict[str, Any]) -> GenerationRequest:
    """Return the generation request of a body of ``/infill``: a completion of a fill-in-the-middle
    prompt. Raises ApiError for invalid fields, TreadleError for settings out of range.
    """
    given = read_fields(body, INFILL)
    model = service.model
    before = given.get("input_prefix", "")
    behind = given.get("input_suffix", "")
    begun = given.get("prompt", "")
    files = []
    for i, file in enumerate(given.get("input_extra", [])):
        said = mapping(f"input_extra[{i}]", file)
        files.append((str(said.get("filename") or ""), text("text", said.get("text"))))
    check_text("".join([before, behind, begun, *(said for _, said in files)]), model)
    try:
        ids = infill_ids(model.tokenizer, before, behind, begun=begun, files=files)
    except UnsupportedError as error:
        raise ApiError(501, f"/infill: {error}", code="not_implemented") from None
    return read_completion(service, {**body, "prompt": check_length(ids, model)})


async def infill(request: HttpRequest) -> Response:
    """``POST /infill``: text between ``input_prefix`` and ``input_suffix``."""
    service = service_of(request)
    body = await read_json(request)
    return await _completed(request, service, await service.begin(request, read_infill, body))


async def completion(request: HttpRequest) -> Response:
    """``POST /completion``: llama.cpp's result object for a raw prompt; several prompts or outputs
    give a list of results.
    """
    service = service_of(request)
    body = await read_json(request)
    return await _completed(request, service, await service.begin(request, read_completion, body))


async def _completed(request: HttpRequest, service: Service, stream: RequestStream) -> Response:
    if stream.is_streamed:
        return StreamedResponse(stream, _chunks(service, stream), error_event)

    def answer(pieces: list[StreamPiece]) -> Any:
        result = [_whole(service, stream, piece) for piece in pieces]
        return result[0] if len(result) == 1 else result

    return await whole_json(answer, await finished(request, stream))


def _whole(service: Service, stream: RequestStream, piece: StreamPiece) -> dict[str, Any]:
    """Return llama.cpp's result for a whole output, or for a stream's last event (then ``piece`` is
    the last). If the request has ``response_fields``, only these are kept: a nested field such as
    ``timings/prompt_n`` has this path as its key. ``prompt`` is there only if it is one of them.
    """
    tokens = stream.is_streamed or stream.generation.more["tokens"]
    result = {**piece_fields(piece, tokens=tokens), **final_fields(service, stream, piece)}
    names: list[str] = stream.generation.more["fields"]
    if "prompt" in names:
        result["prompt"] = prompt_text(
            stream.generation.prompts[piece.output.prompt], service.model
        )
    found: dict[str, Any] = {}
    for name in names:
        with suppress(KeyError, TypeError):  # unknown names are left out
            found[name] = reduce(getitem, name.split("/"), result)
    return found if names else result


async def _chunks(service: Service, stream: RequestStream) -> AsyncIterator[bytes]:
    each = stream.generation.more["timings_per_token"]
    async for piece in pieces_with_pings(stream):
        if piece is None:
            yield PING
        elif piece.progress is not None:
            yield event(
                {**piece_fields(piece), "prompt_progress": piece.progress.as_dict(stream.arrival_s)}
            )
        elif piece.finish_reason is not None:
            yield event(_whole(service, stream, piece))
        else:
            yield event(
                {**piece_fields(piece), **({"timings": timings(piece.output)} if each else {})}
            )


# -- tokens and templates -------------------------------------------------------------------------


async def tokenize(request: HttpRequest) -> Response:
    """``POST /tokenize``: token ids of ``content``, a string, or a list of strings and ids.
    Options: ``add_special``, ``parse_special``, ``with_pieces``.
    """
    service, body = service_of(request), await read_json(request)
    table: Table = dict.fromkeys(("add_special", "parse_special", "with_pieces"), flag)
    given, content = read_fields(body, table), body.get("content")
    if content is None:
        raise ApiError(400, "content: required", param="content")
    bos = None if given.get("add_special", False) else False
    parts = content if isinstance(content, list) else [text("content", content)]
    if not all(type(part) in (int, str) for part in parts):
        raise wrong("content", content, "a string, or a list of strings and token ids")

    def ids_of(part: str | int, bos: bool | None) -> list[int]:
        if isinstance(part, int):
            check_vocabulary([part], service.model)
            return [part]
        special = given.get("parse_special", True)
        return service.model.tokenize(part, bos=bos, special=special)

    def read() -> list[int]:
        check_text("".join(part for part in parts if isinstance(part, str)), service.model)
        return [id for i, part in enumerate(parts) for id in ids_of(part, False if i else bos)]

    ids = await service.prepare(read)
    if not given.get("with_pieces", False):
        return Json({"tokens": ids})
    return Json({"tokens": [{"id": id, "piece": _piece(service, id)} for id in ids]})


def _piece(service: Service, token: int) -> str | list[int]:
    """Return a token's text, or the list of its bytes if they are no whole characters."""
    raw = service.model.tokenizer.token_bytes(token)
    try:
        return raw.decode("utf-8")
    except UnicodeDecodeError:
        return list(raw)


async def detokenize(request: HttpRequest) -> Response:
    """``POST /detokenize``: the text of the ids in ``tokens``."""
    service = service_of(request)
    body = await read_json(request)
    ids = array("tokens", body.get("tokens"))
    if not all(type(item) is int for item in ids):
        raise wrong("tokens", ids, "token ids")
    return Json({"content": await service.prepare(service.model.detokenize, ids)})


async def apply_template(request: HttpRequest) -> Response:
    """``POST /apply-template``: ``messages``, rendered with the chat template, as text."""
    service = service_of(request)
    body = await read_json(request)
    return Json({"prompt": await service.prepare(conversation_text, body, service)})


# -- state ----------------------------------------------------------------------------------------


async def health(request: HttpRequest) -> Response:
    """``GET /health``: 200 once the plans are compiled; 503 while loading or stopping, 500 after an
    error.
    """
    engine = service_of(request).engine
    if service_of(request).draining:
        raise busy("the server is stopping")
    if engine.state == "ok":
        return Json({"status": "ok"})
    if engine.state == "loading":
        raise ApiError(503, "Loading model", type="unavailable_error", headers={"Retry-After": "1"})
    raise ApiError(500, f"the model cannot be used: {without_folders(engine.why)}")


async def props(request: HttpRequest) -> Response:
    """``GET /props``: the server's properties: context, slots, sampling defaults, template,
    modalities.
    """
    service = service_of(request)
    model = service.model
    tokenizer = model.tokenizer
    template = model.template

    def spelt(token: int | None) -> str:
        return "" if token is None else tokenizer.piece(token)

    return Json(
        {
            "default_generation_settings": {
                "n_ctx": room(model),
                "params": sampling_dict(service.defaults),
            },
            "total_slots": model.engine.cache.n_sequences,
            "model_alias": service.name,
            "model_path": model.path.name,  # without folders, which stay private
            "chat_template": template.source,
            "endpoint_props": service.settings.props,
            "endpoint_slots": True,
            "endpoint_metrics": service.settings.metrics,
            "bos_token": spelt(tokenizer.bos),
            "eos_token": spelt(tokenizer.eos),
            "modalities": {
                "vision": "image" in model.modalities,
                "audio": "audio" in model.modalities,
            },
            "media_marker": MARKER,
            "build_info": service.fingerprint,
            "chat_template_kwargs": template.defaults,
            "treadle": {
                "builtin_template": template.builtin,
                "template_from": template.origin,
                "reasoning": template.default_reasoning,
                "reasoning_budget": model.defaults.reasoning_budget,
                "reasoning_preserve": template.preserve,
                "max_body_bytes": service.bodies.most,
                "mcp": [] if service.toolbox is None else service.toolbox.servers,
            },
        }
    )


PROPS: Table = {"default_generation_settings": object_of({"params": mapping})}


async def change_props(request: HttpRequest) -> Response:
    """``POST /props``: set the sampling defaults of later requests, in the form of ``GET /props``.
    Needs ``--props``.
    """
    service = service_of(request)
    if not service.settings.props:
        raise ApiError(
            501,
            "this server does not support changing global properties: start it with --props",
            code="not_enabled",
        )
    body = await read_json(request)
    given = read_fields(body, PROPS)
    settings = given.get("default_generation_settings", {})
    params = settings.get("params", {})
    own = {field.name for field in dataclasses.fields(Sampling)} - {"custom"}
    for where, names, known in (
        ("", body, [*PROPS, "model"]),
        ("default_generation_settings.", body.get("default_generation_settings") or {}, ["params"]),
        ("default_generation_settings.params.", params, own),
    ):
        for name in names:
            if name not in known:
                raise ApiError(
                    400,
                    f"{where}{name[:80]}: cannot be changed: expected {', '.join(sorted(known))}",
                    param=f"{where}{name[:80]}",
                )
    generation = await service.prepare(read_generation, params, service.model, service.defaults)
    service.defaults = generation.settings["sampling"]
    return Json({"success": True})
