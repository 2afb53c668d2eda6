"""Anthropic's ``/v1/messages`` and ``/v1/messages/count_tokens``."""

from __future__ import annotations

import json
import secrets
from collections.abc import AsyncIterator, Mapping
from typing import Any

from starlette.requests import Request as HttpRequest

from treadle.chat.messages import MEDIA, PlacedPart, text_part
from treadle.chat.tools import OutputPiece
from treadle.chat.tools.arguments import arguments_of
from treadle.chat.tools.messages import in_turns
from treadle.server.http.api_errors import ApiError, named
from treadle.server.http.body_fields import (
    Table,
    array,
    mapping,
    object_of,
    one_of,
    read_fields,
    refused,
    text,
    texts,
    whole,
)
from treadle.server.http.http_io import Json, Response, event, read_json
from treadle.server.protocols.answer_fields import media_usage, warnings
from treadle.server.requests.chat_prompt import conversation_prompt, read_conversation, unsupported
from treadle.server.requests.generation_request import (
    GenerationRequest,
    conflicting_constraints,
    read_generation,
)
from treadle.server.requests.http_responses import StreamedResponse, finished, pieces_with_pings
from treadle.server.requests.ignored_fields import ANTHROPIC, ANTHROPIC_THINKING, ignored_fields
from treadle.server.requests.request_media import chat_ids
from treadle.server.requests.request_stream import OutputStream, RequestStream, StreamPiece
from treadle.server.requests.service import Service, service_of

# First line of a client's system prompt; it changes with every call, so with it no prompt prefix
# would ever be found in the cache.
BILLING = "x-anthropic-billing-header:"
# Signature of reasoning. It is not checked, but clients (pydantic-ai) take an empty one for a
# truncated stream, and do not send the block back.
SIGNATURE = "treadle"


def _format(name: str, value: Any) -> dict[str, Any]:
    """Read a field's value, Anthropic's format of the answer: return its JSON schema as OpenAI's
    ``response_format``. ``name``: the field's. Raises ApiError for another type.
    """
    form = mapping(name, value)
    kind = one_of("json_schema")(f"{name}.type", form.get("type"))
    return {"type": kind, "schema": mapping(f"{name}.schema", form.get("schema"))}


def _thread(name: str, value: Any) -> Any:
    """Refuse the field ``name`` (400), which asks for a conversation stored by the server:
    Anthropic's SDKs send it, and then only new messages. After this error code they send the whole
    conversation.
    """
    why = "conversations are not stored: send all messages, without this field"
    code = "thread_unsupported_request"
    raise ApiError(400, f"{name}: {why}", param=name, details={"error_code": code})


FIELDS: Table = {
    "thread": _thread,
    "max_tokens": whole(0),  # 0: only prefill the prompt into the cache
    "stop_sequences": texts,
    "metadata": mapping,
    "tools": array,
    "tool_choice": mapping,
    "messages": array,
    "thinking": mapping,
    "output_config": object_of({"effort": text, "format": _format}),
    "output_format": _format,  # older name of output_config.format
    "mcp_servers": refused("not supported: treadle does not call MCP servers", []),
    "compaction": refused("not supported: treadle does not summarize conversations"),
}
NAMES = {
    "stop": "stop_sequences",
    "user": "metadata.user_id",
    "reasoning_budget": "thinking.budget_tokens",
    "response_format": "output_config.format",
}
TEXT_BLOCKS = ("text", "search_result", "tool_reference")
TEXT_SOURCES = ("text", "content")  # of documents
TYPES = {
    400: "invalid_request_error",
    401: "authentication_error",
    403: "permission_error",
    404: "not_found_error",
    413: "request_too_large",
    429: "rate_limit_error",
    503: "overloaded_error",
    504: "timeout_error",
}


def error_dict(error: ApiError) -> dict[str, Any]:
    """Return an error as Anthropic's error object: ``{"type": "error", "error": {"type",
    "message"}}``.
    """
    other = "invalid_request_error" if error.status < 500 else "api_error"
    made = {"type": TYPES.get(error.status, other), "message": error.message}
    if "details" in error.more:
        made["details"] = error.more["details"]
    return {"type": "error", "error": made}


@named(NAMES)
def read_messages(service: Service, body: dict[str, Any]) -> GenerationRequest:
    """Return the generation request of a body of ``/v1/messages``. Raises ApiError for invalid
    fields, TreadleError for settings out of range.
    """
    given = read_fields(body, FIELDS)
    if "max_tokens" not in given:
        raise ApiError(400, "max_tokens: required", param="max_tokens")
    own: dict[str, Any] = {
        "stop": given.get("stop_sequences"),
        "user": given.get("metadata", {}).get("user_id"),
        "n": None,
        "reasoning_budget": given.get("thinking", {}).get("budget_tokens"),
    }
    if (form := _form(given)) is not None:
        own["response_format"] = form
    generation = read_generation({**body, **own}, service.model, service.defaults)
    generation.ignored = ignored_fields(body, ANTHROPIC)
    generation.ignored += ignored_fields(given.get("thinking", {}), ANTHROPIC_THINKING, "thinking.")
    generation.more["stop"] = list(generation.settings["stop"])  # without the template's own
    read_conversation(chat_of(body), service, generation)
    return generation


def _form(given: Mapping[str, Any]) -> dict[str, Any] | None:
    """Return the answer's format in ``given``, the fields as read, as OpenAI's ``response_format``:
    from ``output_config`` or the older ``output_format``; None without one. Raises ApiError if both
    are given.
    """
    forms = (given.get("output_config", {}).get("format"), given.get("output_format"))
    if all(forms):
        raise conflicting_constraints("output_format", "output_config.format")
    found: dict[str, Any] | None = forms[0] or forms[1]
    return found


def chat_of(body: Mapping[str, Any]) -> dict[str, Any]:
    """Return a body's conversation, tools and answer format as a body of OpenAI's chat completions.
    Raises ApiError.
    """
    given = read_fields(body, FIELDS)
    if not given.get("messages"):
        raise ApiError(400, "messages: required", param="messages")
    messages = _system(body.get("system"))
    for i, message in enumerate(given["messages"]):
        messages += _messages(f"messages[{i}]", mapping(f"messages[{i}]", message))
    chat: dict[str, Any] = {
        "messages": in_turns(messages),
        "tools": [_tool(f"tools[{i}]", tool) for i, tool in enumerate(given.get("tools", []))],
        "continue_final_message": body.get("continue_final_message"),
        "response_format": _form(given),
        **_choice(given.get("tool_choice", {})),
    }
    if "effort" in given.get("output_config", {}):
        chat["reasoning_effort"] = given["output_config"]["effort"]
    if "thinking" in given:  # variable of reasoning models' templates
        on = given["thinking"].get("type") != "disabled"
        chat["chat_template_kwargs"] = {"enable_thinking": on}
    return chat


def count(service: Service, body: Mapping[str, Any]) -> int:
    """Return the number of prompt tokens of a body's conversation, even if it exceeds the context.
    Raises ApiError for invalid fields, TreadleError for messages that the template refuses.
    """
    prompt = conversation_prompt(chat_of(body), service)
    return len(chat_ids(prompt, service.model, service.addresses, bounded=False))


def _tool(name: str, tool: Any) -> dict[str, Any]:
    own = mapping(name, tool)
    kind = own.get("type") or "custom"
    if kind != "custom":
        why = "treadle has no built-in tools, only tools with an input_schema"
        raise ApiError(400, f"{name}: type {kind!r:.40} is not supported: {why}", param="tools")
    function = {key: own[key] for key in ("name", "description", "strict") if key in own}
    return {
        "type": "function",
        "function": {**function, "parameters": own.get("input_schema") or {"type": "object"}},
    }


def _choice(choice: Mapping[str, Any]) -> dict[str, Any]:
    kind = choice.get("type", "auto")
    words = {"auto": "auto", "none": "none", "any": "required"}
    named = {"type": "function", "function": {"name": choice.get("name")}}
    if not isinstance(kind, str) or (kind not in words and kind != "tool"):
        raise ApiError(
            400, "tool_choice.type: expected auto, any, tool or none", param="tool_choice"
        )
    return {
        "tool_choice": words.get(kind, named),
        "parallel_tool_calls": not choice.get("disable_parallel_tool_use", False),
    }


def _system(system: Any) -> list[dict[str, Any]]:
    if system is None:
        return []
    blocks = [system] if isinstance(system, str) else array("system", system)
    said = [block if isinstance(block, str) else _text("system", block) for block in blocks]
    kept = [_without_billing(words) for words in said]
    return [{"role": "system", "content": "\n".join(words for words in kept if words)}]


def _without_billing(words: str) -> str:
    return words.partition("\n")[2] if words.startswith(BILLING) else words


def _text(name: str, block: Any) -> str:
    return text(f"{name}.text", mapping(name, block).get("text"))


def _messages(name: str, message: Mapping[str, Any]) -> list[dict[str, Any]]:
    """Return one message as messages in OpenAI's format: tool results become messages of their own,
    tool calls a list besides the content. ``name``: its place in the body.
    """
    role = message.get("role")
    content = message.get("content")
    if isinstance(content, str):
        return [{"role": role, "content": content}]
    said: list[str | PlacedPart] = []
    calls: list[dict[str, Any]] = []
    results: list[dict[str, Any]] = []
    thought: list[str] = []
    for i, block in enumerate(array(f"{name}.content", content)):
        where = f"{name}.content[{i}]"
        kind = mapping(where, block).get("type")
        if kind == "thinking":
            thought.append(text(f"{where}.thinking", block.get("thinking")))
        elif kind == "tool_use":
            arguments = json.dumps(mapping(f"{where}.input", block.get("input")))
            function = {"name": text(f"{where}.name", block.get("name")), "arguments": arguments}
            calls.append({"id": block.get("id"), "type": "function", "function": function})
        elif kind == "tool_result":
            results.append(_result(where, block))
        elif kind in MEDIA:
            said.append(PlacedPart(block, where))
        elif kind != "redacted_thinking":
            said.append(_read(where, block))
    made: dict[str, Any] = {"role": role, "content": _content(said)}
    if calls:
        made["tool_calls"] = calls
    if thought:
        made["reasoning_content"] = "\n".join(thought)
    return [*results, *([made] if said or calls or not results else [])]


def _content(said: list[str | PlacedPart]) -> str | list[dict[str, Any] | PlacedPart]:
    """Return the texts and pictures in ``said`` as the content of a chat message: one string if all
    are texts, else a list of parts.
    """
    if any(isinstance(each, PlacedPart) for each in said):
        return [text_part(each) if isinstance(each, str) else each for each in said]
    return "\n".join(each for each in said if isinstance(each, str))


def _read(name: str, block: Any) -> str:
    """Return the text of a content block. ``name``: its place in the body. Raises ApiError for
    blocks that are not text.
    """
    own = mapping(name, block)
    kind = own.get("type")
    source = own.get("source")
    if kind == "text":
        return _text(name, own)
    if kind == "search_result":
        return "\n".join(_text(name, part) for part in array(f"{name}.content", own.get("content")))
    if kind == "tool_reference":  # the model sees all tools anyway
        return text(f"{name}.tool_name", own.get("tool_name"))
    if kind == "document" and isinstance(source, dict) and source.get("type") in TEXT_SOURCES:
        where = f"{name}.source"
        told = source.get("data" if source["type"] == "text" else "content")
        if isinstance(told, list) and source["type"] == "content":
            told = "\n".join(_read(f"{where}.content[{i}]", part) for i, part in enumerate(told))
        said = (own.get("title"), own.get("context"), text(f"{where}.{source['type']}", told))
        return "\n".join(text(name, each) for each in said if each)
    raise unsupported(name, kind, name)


def _parts(name: str, block: Any) -> list[dict[str, Any] | PlacedPart]:
    """Return a block of a tool result as parts of chat content; blocks that are not text are kept
    unchanged as placed parts. ``name``: its place in the body.
    """
    own = mapping(name, block)
    source = own.get("source") if own.get("type") == "document" else None
    kind = source.get("type") if isinstance(source, dict) else None
    if source is not None and kind == "content" and isinstance(source.get("content"), list):
        said = [text(name, own[key]) for key in ("title", "context") if own.get(key)]
        result: list[dict[str, Any] | PlacedPart] = [text_part(each) for each in said]
        for i, part in enumerate(source["content"]):
            result += _parts(f"{name}.source.content[{i}]", part)
        return result
    if own.get("type") in TEXT_BLOCKS or kind in TEXT_SOURCES:
        return [text_part(_read(name, own))]
    return [PlacedPart({**own, "type": text(f"{name}.type", own.get("type"))}, name)]


def _result(name: str, block: Mapping[str, Any]) -> dict[str, Any]:
    content = block.get("content") or ""
    if not isinstance(content, str):
        where = f"{name}.content"
        parts = enumerate(array(where, content))
        content = [made for i, part in parts for made in _parts(f"{where}[{i}]", part)]
        if not any(isinstance(part, PlacedPart) for part in content):
            content = "\n".join(part["text"] for part in content)
    return {"role": "tool", "tool_call_id": block.get("tool_use_id"), "content": content}


# -- responses ------------------------------------------------------------------------------------


async def messages(request: HttpRequest) -> Response:
    """``POST /v1/messages``: answer a conversation, whole or as a stream of events."""
    service = service_of(request)
    body = await read_json(request)
    stream = await service.begin(request, read_messages, body)
    shown = _message(service, stream.outputs[0])
    stream.ids.add(shown["id"])
    if stream.is_streamed:
        return StreamedResponse(
            stream, _events(stream, shown), lambda e: event(error_dict(e), "error")
        )
    (piece,) = await finished(request, stream)
    shown["content"] = _blocks(piece.parsed_parts())
    return Json(
        {**shown, **_stop(stream, piece), "usage": _usage(piece.output), **warnings(stream)}
    )


async def count_tokens(request: HttpRequest) -> Response:
    """``POST /v1/messages/count_tokens``: the number of prompt tokens of a conversation."""
    service = service_of(request)
    body = await read_json(request)
    return Json({"input_tokens": await service.prepare(count, service, body)})


def _message(service: Service, of: OutputStream) -> dict[str, Any]:
    """Return Anthropic's message object for the output ``of``, with its token counts so far, and
    without content or stop reason yet.
    """
    return {
        "id": f"msg_{secrets.token_hex(12)}",
        "type": "message",
        "role": "assistant",
        "model": service.name,
        "content": [],
        "stop_reason": None,
        "stop_sequence": None,
        "usage": _usage(of),
    }


def _usage(of: OutputStream) -> dict[str, Any]:
    """Return token counts of the output ``of``, and the prompt's pictures and sounds.
    ``input_tokens`` excludes cached tokens, because clients add both up.
    """
    t = of.answer.timings
    return {
        "input_tokens": t.n_prompt - t.n_cached,
        "cache_creation_input_tokens": 0,
        "cache_read_input_tokens": t.n_cached,
        "output_tokens": len(of.answer.ids),
        **media_usage(of.answer.media),
    }


def _stop(stream: RequestStream, piece: StreamPiece) -> dict[str, Any]:
    word = piece.output.answer.stopped_by
    own = stream.generation.more["stop"]
    if piece.finish_reason == "stop" and piece.output.scanner.n_calls:
        return {"stop_reason": "tool_use", "stop_sequence": None}
    if piece.finish_reason != "stop":
        return {"stop_reason": "max_tokens", "stop_sequence": None}
    if word and word in own:
        return {"stop_reason": "stop_sequence", "stop_sequence": word}
    return {"stop_reason": "end_turn", "stop_sequence": None}


def _blocks(parts: list[OutputPiece]) -> list[dict[str, Any]]:
    """Return the content blocks of a whole answer; ``parts``: its parsed output."""
    blocks: list[dict[str, Any]] = []
    for part in parts:
        if part.kind == "arguments":
            blocks[-1]["input"] = arguments_of(part.text)
        else:
            blocks.append(_opening(part))
            if part.call is None:
                blocks[-1][_TEXTS[part.kind]] = part.text
            if part.kind == "reasoning":
                blocks[-1]["signature"] = SIGNATURE
    return blocks


_TEXTS = {"reasoning": "thinking", "content": "text"}  # the key of a block's text


def _opening(part: OutputPiece) -> dict[str, Any]:
    """Return an empty content block of the kind of ``part``: tool_use, thinking or text."""
    if part.call is not None:
        return {"type": "tool_use", "id": part.call.id, "name": part.call.name, "input": {}}
    if part.kind == "reasoning":
        return {"type": "thinking", "thinking": "", "signature": ""}
    return {"type": "text", "text": ""}


def _delta(part: OutputPiece) -> dict[str, Any]:
    if part.kind == "reasoning":
        return {"type": "thinking_delta", "thinking": part.text}
    if part.kind == "content":
        return {"type": "text_delta", "text": part.text}
    return {"type": "input_json_delta", "partial_json": part.text}


def _closing(index: int, kind: str) -> bytes:
    """Return the events that end the open content block number ``index``; b"" if none is open
    (``kind`` ""). Reasoning gets a signature before its end, which clients send back with it.
    """
    if not kind:
        return b""
    end = _event("content_block_stop", index=index)
    if kind != "reasoning":
        return end
    signed = {"type": "signature_delta", "signature": SIGNATURE}
    return _event("content_block_delta", index=index, delta=signed) + end


async def _events(stream: RequestStream, shown: dict[str, Any]) -> AsyncIterator[bytes]:
    yield _event("message_start", message=shown)
    index = -1  # of the open block
    kind = ""  # of the open block
    async for piece in pieces_with_pings(stream):
        if piece is None:
            yield _event("ping")
            continue
        for part in piece.parsed_parts():
            if part.call is not None or part.kind not in (kind, "arguments"):
                yield _closing(index, kind)
                index = index + 1
                kind = part.kind
                yield _event("content_block_start", index=index, content_block=_opening(part))
            if part.text:
                yield _event("content_block_delta", index=index, delta=_delta(part))
        if piece.finish_reason is not None:
            yield _closing(index, kind)
            own = {"delta": _stop(stream, piece), "usage": _usage(piece.output), **warnings(stream)}
            yield _event("message_delta", **own)
    yield _event("message_stop")


def _event(kind: str, **values: Any) -> bytes:
    return event({"type": kind, **values}, kind)
