"""Ollama's ``/api``: streams of JSON lines, durations in nanoseconds."""

from __future__ import annotations

import hashlib
import re
from collections.abc import AsyncIterator, Callable, Collection, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import replace
from typing import TYPE_CHECKING, Any

from treadle import __version__
from treadle.api.embedding import Embedder
from treadle.chat.media_parts import kind_of_base64
from treadle.chat.messages import PlacedPart, parts_of
from treadle.chat.tools import OutputPiece, ParsedOutput
from treadle.chat.tools.arguments import arguments_of
from treadle.server.http.api_errors import ApiError, named
from treadle.server.http.body_fields import (
    Table,
    array,
    flag,
    mapping,
    one_of,
    read_fields,
    refused,
    text,
)
from treadle.server.http.http_io import Json, Response, encode, read_json, result, utc
from treadle.server.protocols.answer_fields import media_usage, warnings
from treadle.server.protocols.embeddings import CUT, embed, embedder_of, most_tokens
from treadle.server.protocols.openai.chat import read_logprobs
from treadle.server.protocols.openai.completions import read_prompts
from treadle.server.requests.chat_prompt import read_conversation
from treadle.server.requests.generation_request import (
    ANY_OBJECT,
    GenerationRequest,
    check_length,
    check_text,
    conflicting_constraints,
    read_generation,
    read_prompt,
    room,
)
from treadle.server.requests.http_responses import StreamedResponse, finished, pieces_with_pings
from treadle.server.requests.ignored_fields import OLLAMA, ignored_by_ollama
from treadle.server.requests.request_media import images_ids
from treadle.server.requests.request_stream import OutputStream, RequestStream, StreamPiece
from treadle.server.requests.service import Service, service_of

if TYPE_CHECKING:
    from pathlib import Path

    from starlette.requests import Request as HttpRequest

    from treadle.api.model import Model

Say = Callable[[ParsedOutput], dict[str, Any]]  # parsed output -> its fields in the response
SPOKEN = "0.12.11"  # Ollama's first with log-probabilities
EFFORTS = ("low", "medium", "high", "max")
NEVER = "9999-12-31T23:59:59Z"  # expiry of a model that stays loaded
NOTHING = ParsedOutput("", "", [])
_IMAGE = re.compile(r"(?:prompt\.)?((?:messages\[\d+\]\.)?images\[\d+\])(?:\.data)?")

FIELDS: Table = {
    "options": mapping,
    "stream": flag,
    "raw": flag,
    "prompt": text,
    "system": text,
    "messages": array,
    "tools": array,
    "images": array,
    "suffix": text,
    "template": refused("not supported: the model's own template is used", ""),
    "context": refused("not supported: prefixes are reused automatically", []),
    "_debug_render_only": refused("not supported: use /apply-template", False),
}


def error_dict(error: ApiError) -> dict[str, Any]:
    """Return an error as Ollama's error object: ``{"error": message}``."""
    return {"error": error.message}


def _asked(service: Service, body: Mapping[str, Any]) -> GenerationRequest:
    """Return the generation request of a body, without its prompt, which the caller sets. Ollama
    has the settings in ``options``, and streams by default. Raises ApiError and TreadleError.
    """
    given = read_fields(body, FIELDS)
    options = dict(given.get("options", {}))
    if options.get("num_predict") in (0, -2):  # both mean: up to the context's end
        options["num_predict"] = -1
    form = body.get("format")
    if form not in (None, ""):
        options |= _format(form, options)
    options |= {"stream": given.get("stream", True), "n": None}
    generation = read_generation(options, service.model, service.defaults)
    generation.ignored = ignored_by_ollama(body, OLLAMA, room(service.model))
    generation.options = replace(generation.options, streams=False)  # a line has whole calls
    generation.settings["logprobs"] = read_logprobs(body, service.model)
    return generation


def _format(form: Any, options: Mapping[str, Any]) -> dict[str, Any]:
    """Return Ollama's ``format`` as ``{"json_schema": ...}``; {} if it is "json" and ``options``
    have a schema. Raises ApiError for two different schemas.
    """
    other = next((key for key in ("json_schema", "guided_json") if options.get(key)), None)
    if form == "json":
        return dict(ANY_OBJECT) if other is None else {}
    schema = mapping("format", form)
    if other is not None and options[other] != schema:
        raise conflicting_constraints("format", f"options.{other}")
    return {"json_schema": schema}


@contextmanager
def _images_named() -> Iterator[None]:
    """Rename pictures in errors of the block to their places in Ollama's body:
    ``messages[0].images[1]``.
    """
    try:
        yield
    except ApiError as error:
        name = _IMAGE.match(error.message)
        if name is not None:
            error.message = name[1] + error.message[name.end() :]
            error.param = name[1]
        raise


@named({"json_schema": "format"})
def read_chat(service: Service, body: dict[str, Any]) -> GenerationRequest:
    """Return the generation request of a body of ``/api/chat``. Raises ApiError for invalid fields,
    TreadleError for settings out of range.
    """
    given = read_fields(body, FIELDS)
    generation = _asked(service, body)
    messages = [_given(f"messages[{i}]", each) for i, each in enumerate(given.get("messages", []))]
    chat = {"messages": messages, "tools": given.get("tools")}
    with _images_named():
        own = {**_thinking(body), "json_schema": generation.options.schema}
        read_conversation({**chat, **own}, service, generation)
    return generation


def _given(name: str, message: Any) -> dict[str, Any]:
    """Return Ollama's message as a chat message: ``images``, which may be sounds too, become parts
    of its content, before the text; those of a tool result after it. ``name``: its place in the
    body.
    """
    result = dict(mapping(name, message))
    pictures = array(f"{name}.images", result.pop("images", None) or [])
    if not pictures:
        return result
    said = result.get("content")
    texts = parts_of(said) if isinstance(said, str) else array(f"{name}.content", said or [])
    images = [
        PlacedPart({"type": kind_of_base64(data), "data": data}, f"{name}.images[{i}]")
        for i, data in enumerate(pictures)
    ]
    content = [*texts, *images] if result.get("role") == "tool" else [*images, *texts]
    return {**result, "content": content}


@named({"json_schema": "format"})
def read_generate(service: Service, body: dict[str, Any]) -> GenerationRequest:
    """Return the generation request of a body of ``/api/generate``: the prompt is one chat message,
    with ``raw`` it is used unchanged, and with ``suffix`` it is a fill-in-the-middle prompt. Raises
    ApiError for invalid fields, TreadleError for settings out of range.
    """
    given = read_fields(body, FIELDS)
    generation = _asked(service, body)
    prompt = given.get("prompt", "")
    images = given.get("images", [])
    if images and given.get("suffix"):
        raise ApiError(400, "images: not supported with suffix", param="images")
    if given.get("suffix"):
        generation.prompts = read_prompts(
            {"prompt": prompt, "suffix": given["suffix"]}, service.model
        )
        generation.plan(service.model)
        return generation
    if given.get("raw", False):
        generation.prompts = [_raw_ids(prompt, images, service.model)]
        generation.plan(service.model)
        return generation
    messages = [_given("prompt", {"role": "user", "content": prompt, "images": images})]
    if given.get("system"):
        messages.insert(0, {"role": "system", "content": given["system"]})
    with _images_named():
        own = {**_thinking(body), "json_schema": generation.options.schema}
        read_conversation({"messages": messages, **own}, service, generation)
    return generation


def _raw_ids(prompt: str, images: list[Any], model: Model) -> list[int]:
    if not images:
        return read_prompt(prompt, model)
    check_text(prompt, model)
    return check_length(images_ids(prompt, images, model), model)


def _thinking(body: Mapping[str, Any]) -> dict[str, Any]:
    """Return Ollama's ``think`` as fields of OpenAI's chat: ``chat_template_kwargs`` (whether to
    reason) and, if given, ``reasoning_effort``; {} without ``think``. Raises ApiError.
    """
    think = body.get("think")
    if think is None or think == "":
        return {}
    if not isinstance(think, bool):
        one_of("true", "false", *EFFORTS)("think", think)
    effort = {"reasoning_effort": think} if think in EFFORTS else {}
    on = think not in (False, "false")
    return {"chat_template_kwargs": {"enable_thinking": on}, **effort}


async def chat(request: HttpRequest) -> Response:
    """``POST /api/chat``: answer a conversation; without messages only report that the model is
    loaded.
    """
    service = service_of(request)
    body = await read_json(request)
    if body.get("messages") in (None, []):  # the client wants the model loaded
        return Json(_loaded(service, _message))
    return await _answer(request, service, await service.begin(request, read_chat, body), _message)


async def generate(request: HttpRequest) -> Response:
    """``POST /api/generate``: continue or answer a prompt; without one only report that the model
    is loaded.
    """
    service = service_of(request)
    body = await read_json(request)
    if not body.get("prompt"):  # the client wants the model loaded
        return Json(_loaded(service, _response))
    stream = await service.begin(request, read_generate, body)
    return await _answer(request, service, stream, _response)


def _message(told: ParsedOutput) -> dict[str, Any]:
    made: dict[str, Any] = {"role": "assistant", "content": told.content}
    if told.reasoning:
        made["thinking"] = told.reasoning
    if told.calls:
        made["tool_calls"] = [
            {
                "id": call.id,
                "function": {
                    "index": index,
                    "name": call.name,
                    "arguments": arguments_of(call.arguments),
                },
            }
            for index, call in enumerate(told.calls, told.first)
        ]
    return {"message": made}


def _response(told: ParsedOutput) -> dict[str, Any]:
    thought = {"thinking": told.reasoning} if told.reasoning else {}
    return {"response": told.content, **thought}


def _loaded(service: Service, say: Say) -> dict[str, Any]:
    service.check_ready()
    return {**_head(service), **say(NOTHING), "done": True, "done_reason": "load"}


async def _answer(
    request: HttpRequest, service: Service, stream: RequestStream, say: Say
) -> Response:
    if stream.is_streamed:
        parts = _lines(service, stream, say)
        return StreamedResponse(
            stream, parts, lambda e: _line(error_dict(e)), "application/x-ndjson"
        )
    (piece,) = await finished(request, stream)
    parsed_parts = _said(piece, piece.parsed_parts(), say)
    return Json({**_head(service), **parsed_parts, **_end(piece), **warnings(stream)})


async def _lines(service: Service, stream: RequestStream, say: Say) -> AsyncIterator[bytes]:
    async for piece in pieces_with_pings(stream):
        if piece is None:  # JSON lines have no comments: keep-alive is an empty part
            yield _line({**_head(service), **say(NOTHING), "done": False})
            continue
        parts = piece.parsed_parts()
        if parts or piece.logprobs:  # log-probabilities may precede held-back text
            yield _line({**_head(service), **_said(piece, parts, say), "done": False})
        if piece.finish_reason is not None:
            yield _line({**_head(service), **say(NOTHING), **_end(piece), **warnings(stream)})


def _said(piece: StreamPiece, parts: list[OutputPiece], say: Say) -> dict[str, Any]:
    result = say(ParsedOutput.of(parts))
    if piece.output.request.n_top is not None:
        result["logprobs"] = [entry.as_dict() for entry in piece.logprobs]
    return result


def _line(value: Any) -> bytes:
    return encode(value) + b"\n"


def _head(service: Service) -> dict[str, Any]:
    return {"model": service.name, "created_at": utc()}


def _end(piece: StreamPiece) -> dict[str, Any]:
    reason = "stop" if piece.finish_reason == "stop" else "length"
    return {"done": True, "done_reason": reason, **_durations(piece.output)}


def _durations(of: OutputStream) -> dict[str, Any]:
    t = of.answer.timings
    return {
        "total_duration": _ns(of.last_s - of.arrival_s),
        "load_duration": _ns(t.compile_s),
        "prompt_eval_count": t.n_prompt,
        "prompt_eval_duration": _ns(t.prefill_s),
        "eval_count": t.n_generated,
        "eval_duration": _ns(t.decode_s),
        **media_usage(of.answer.media),
    }


def _ns(seconds: float) -> int:
    return max(0, int(seconds * 1e9))


# -- embeddings and models ------------------------------------------------------------------------


async def embed_texts(request: HttpRequest) -> Response:
    """``POST /api/embed``: a vector for each text in ``input``."""
    service = service_of(request)
    body = await read_json(request)
    given = {"truncate": True, **read_fields(body, {**CUT, "truncate": flag})}
    embedder = embedder_of(service.model, given)
    if body.get("input") == []:
        return Json({"model": service.name, "embeddings": []})
    most = most_tokens(service.model, given)
    work = embed(service, body.get("input"), embedder, most=most)
    vectors, n_tokens = await result(request, work)
    made = {"model": service.name, "embeddings": vectors.tolist(), "prompt_eval_count": n_tokens}
    return Json({**made, **_notes(service, body, embedder)})


async def embed_prompt(request: HttpRequest) -> Response:
    """``POST /api/embeddings``, the older form: the vector of one ``prompt``."""
    service = service_of(request)
    body = await read_json(request)
    given = read_fields(body, {"truncate": flag})
    prompt = text("prompt", body.get("prompt"))
    embedder = Embedder(service.model)
    most = most_tokens(service.model, given)
    vectors, _ = await result(request, embed(service, prompt, embedder, "prompt", most=most))
    return Json({"embedding": vectors[0].tolist(), **_notes(service, body, embedder)})


def _notes(service: Service, body: Mapping[str, Any], embedder: Embedder) -> dict[str, list[str]]:
    """Return ``{"warnings": [...]}`` about options without effect, and the embedder's note; {}
    without any.
    """
    told = ignored_by_ollama(body, {}, room(service.model))
    told += [embedder.note] if embedder.note else []
    return {"warnings": told} if told else {}


def describe(service: Service) -> dict[str, Any]:
    """Return the served model's entry in ``/api/tags``."""
    model = service.model
    size = model.gguf.n_bytes
    return entry_of(service.name, model.path, size, service.created, details(service))


def entry_of(
    name: str, place: Path | str, n_bytes: int | None, changed_s: float, details: dict[str, Any]
) -> dict[str, Any]:
    """Return an entry in ``/api/tags`` for the model ``name``. ``place``: its path, of which the
    digest is made; ``n_bytes``: its size, None if unknown (shown as 0); ``changed_s``: Unix time of
    its last change; ``details``: as of ``details_of``.
    """
    # Clients need a digest; hashing the whole file would be too slow.
    told = f"{place}:{n_bytes}".encode()
    return {
        "name": name,
        "model": name,
        "modified_at": utc(changed_s),
        "size": n_bytes or 0,
        "digest": hashlib.sha256(told).hexdigest(),
        "details": details,
    }


def details(service: Service) -> dict[str, Any]:
    """Return Ollama's ``details`` of the served model: family, number of weights, quantization."""
    card = service.card()
    return details_of(service.model.config.arch.name, card["parameters"], card["format"])


def details_of(arch: str, n_parameters: str, format: str) -> dict[str, Any]:
    """Return Ollama's ``details`` of a model: family (``arch``), number of weights
    (``n_parameters``, as "1.1B"), quantization (``format``, as "Q4_K").
    """
    return {
        "parent_model": "",
        "format": "gguf",
        "family": arch,
        "families": [arch] if arch else [],
        "parameter_size": n_parameters,
        "quantization_level": format,
    }


async def root(request: HttpRequest) -> Response:
    """``GET /``: "Ollama is running"; Ollama clients probe it to find out if a server runs."""
    return Response(b"Ollama is running", headers={"vary": "Accept"})  # a browser gets the page


async def version(request: HttpRequest) -> Response:
    """``GET /api/version``: the Ollama version whose API is implemented, which clients check (VS
    Code's Copilot requires 0.6.4), and treadle's own.
    """
    return Json({"version": SPOKEN, "treadle": __version__})


async def tags(request: HttpRequest) -> Response:
    """``GET /api/tags``: a list with the served model."""
    return Json({"models": [describe(service_of(request))]})


async def running(request: HttpRequest) -> Response:
    """``GET /api/ps``: a list with the served model, which is always loaded."""
    service = service_of(request)
    own = {"expires_at": NEVER, "size_vram": 0, "context_length": room(service.model)}
    return Json({"models": [{**describe(service), **own}]})


async def show(request: HttpRequest) -> Response:
    """``POST /api/show``: facts about the served model, whatever the name in the body."""
    service = service_of(request)
    model = service.model
    arch = model.config.arch.name
    return Json(
        {
            "modelfile": "",
            "parameters": f"{'num_ctx':30} {room(model)}",  # clients truncate prompts to it
            "template": model.template.source,
            "details": details(service),
            "model_info": {
                "general.architecture": arch,
                f"{arch}.context_length": room(model),  # a request cannot raise it
                f"{arch}.embedding_length": model.config.n_embd,
            },
            "capabilities": capabilities(service),
        }
    )


def capabilities(service: Service) -> list[str]:
    """Return Ollama's ``capabilities`` of the served model: features that clients may offer with
    it.
    """
    if not service.writes:  # so that clients offer no chat with it
        return ["embedding"]
    return capabilities_of(service.dialect.thought is not None, service.model.modalities)


def capabilities_of(thinks: bool, modalities: Collection[str]) -> list[str]:
    """Return Ollama's ``capabilities`` of a model that writes text. ``thinks``: its template has
    reasoning; ``modalities``: the kinds of media that it reads.
    """
    found = {"tools": True, "thinking": thinks}
    for name, kind in (("vision", "image"), ("audio", "audio")):
        found[name] = kind in modalities
    return ["completion", "embedding", *(name for name, there in found.items() if there)]
