"""OpenAI's ``/v1/responses``. Every event has its ``sequence_number``, an item its
``output_index``, a part its ``content_index``: clients put answers together by them.
"""

from __future__ import annotations

import secrets
import time
from collections.abc import AsyncIterator, Mapping
from typing import Any

from starlette.requests import Request
from starlette.responses import Response

from treadle.server.asked import Asked, read_asked
from treadle.server.call import Call, Piece
from treadle.server.conversation import conversation_ids
from treadle.server.fields import Table, array, flag, mapping, read_fields, refused, text, whole
from treadle.server.openai_answer import usage
from treadle.server.openai_chat import MAX_TOP
from treadle.server.problems import ApiError
from treadle.server.service import Service, service_of
from treadle.server.wire import PING, Json, Stream, event, finished, read_json, ticking

SKIPPED = ("reasoning",)  # items that say nothing to the model
ECHOED = ("instructions", "max_output_tokens", "metadata", "temperature", "top_p", "user")

FIELDS: Table = {
    "instructions": text,
    "text": mapping,
    "reasoning": mapping,
    "tools": array,
    "previous_response_id": text,
    "store": flag,
    "metadata": mapping,
    "top_logprobs": whole(0, MAX_TOP),
    "include": array,
    "truncation": refused("nothing is ever cut", "disabled", "auto"),
    "background": refused("a response is written while its client waits", False),
    "conversation": refused("send the conversation's items"),
    "prompt": refused("there are no stored prompts"),
}


def read_response(service: Service, body: dict[str, Any]) -> Asked:
    """What a body asks for. Raises ApiError, TreadleError."""
    given = read_fields(body, FIELDS)
    form = given.get("text", {}).get("format")
    own: dict[str, Any] = {"response_format": form, "n": None, "stop": None, "max_tokens": None}
    asked = read_asked({**body, **own}, service.model, service.defaults)
    asked.settings["stop"] += service.model.template.stop
    if "message.output_text.logprobs" in given.get("include", []):
        asked.settings["logprobs"] = given.get("top_logprobs", 0)
    talk = _earlier(service, given) + read_items(body.get("input"))
    first = (
        [{"role": "system", "content": given["instructions"]}] if "instructions" in given else []
    )
    # Tools that are no functions are a service of OpenAI's own: clients send them to everybody.
    functions = [tool for tool in given.get("tools", []) if _is_function(tool)]
    chat = {
        "messages": first + talk,
        "tools": functions,
        "tool_choice": body.get("tool_choice") if functions else "none",
        "reasoning_effort": given.get("reasoning", {}).get("effort"),
    }
    asked.prompts = [conversation_ids(chat, service.model)]
    asked.more = {"talk": talk, "keep": given.get("store", True)}
    return asked


def _is_function(tool: Any) -> bool:
    return mapping("tools", tool).get("type") in ("function", "namespace")


def _earlier(service: Service, given: Mapping[str, Any]) -> list[dict[str, Any]]:
    """What was said up to the response that this one goes on from; not its instructions."""
    name = given.get("previous_response_id")
    if name is None:
        return []
    found = service.talks.get(name)
    if found is None:
        raise ApiError(
            400, f"previous_response_id: {name[:80]!r} is not kept here (any more): send the whole "
            "conversation", param="previous_response_id", code="previous_response_not_found",
        )  # fmt: skip
    return found


def read_items(value: Any) -> list[dict[str, Any]]:
    """``input``, a text or items, as messages of a chat."""
    if isinstance(value, str):
        return [{"role": "user", "content": value}]
    made: list[dict[str, Any]] = []
    for i, item in enumerate(array("input", value)):
        where = f"input[{i}]"
        kind = mapping(where, item).get("type", "message")
        if kind == "message":
            made.append({"role": item.get("role"), "content": item.get("content")})
        elif kind == "function_call":
            function = {"name": item.get("name"), "arguments": item.get("arguments")}
            call = {"id": item.get("call_id"), "type": "function", "function": function}
            made.append({"role": "assistant", "content": None, "tool_calls": [call]})
        elif kind == "function_call_output":
            said = item.get("output")
            made.append({"role": "tool", "tool_call_id": item.get("call_id"), "content": said})
        elif kind not in SKIPPED:
            raise ApiError(400, f"{where}: an item of type {kind!r:.40}", param="input")
    return made


class _Reply:
    """One response, as it is told: its ids, and what of the body it repeats."""

    def __init__(self, service: Service, call: Call, body: Mapping[str, Any]) -> None:
        self.service, self.call = service, call
        self.id, self.item_id = f"resp_{secrets.token_hex(24)}", f"msg_{secrets.token_hex(24)}"
        form = mapping("text", body.get("text") or {}).get("format") or {"type": "text"}
        self._shared = {
            "id": self.id,
            "object": "response",
            "created_at": int(time.time()),
            "model": service.name,
            "error": None,
            "parallel_tool_calls": True,
            "previous_response_id": body.get("previous_response_id"),
            "reasoning": {"effort": None, "summary": None},
            "store": body.get("store", True),
            "text": {"format": form},
            "tool_choice": body.get("tool_choice") or "auto",
            "tools": body.get("tools") or [],
            "truncation": "disabled",
            **{name: body.get(name) for name in ECHOED},
        }

    def begun(self) -> dict[str, Any]:
        """The object, with nothing written yet."""
        none: dict[str, Any] = {"incomplete_details": None, "output": [], "usage": None}
        return {**self._shared, "status": "in_progress", **none}

    def part(self, piece: Piece | None) -> dict[str, Any]:
        """The part of the message's content: there is one."""
        said = "" if piece is None else piece.content
        logprobs = [] if piece is None else [entry.as_dict() for entry in piece.logprobs]
        return {"type": "output_text", "text": said, "annotations": [], "logprobs": logprobs}

    def item(self, piece: Piece | None) -> dict[str, Any]:
        """The message."""
        status = "in_progress" if piece is None else _status(piece)
        content = [] if piece is None else [self.part(piece)]
        head = {"id": self.item_id, "type": "message", "status": status}
        return {**head, "role": "assistant", "content": content}

    def ended(self, piece: Piece) -> dict[str, Any]:
        """The whole object; it is kept for one that goes on from it."""
        assert self.call.asked is not None
        more, used = self.call.asked.more, usage(self.call)
        if more["keep"]:
            said = {"role": "assistant", "content": piece.content}
            self.service.talks.keep(self.id, [*more["talk"], said])
        whole = _status(piece) == "completed"
        return {
            **self._shared,
            "status": _status(piece),
            "incomplete_details": None if whole else {"reason": "max_output_tokens"},
            "output": [self.item(piece)],
            "usage": {
                "input_tokens": used["prompt_tokens"],
                "input_tokens_details": used["prompt_tokens_details"],
                "output_tokens": used["completion_tokens"],
                "output_tokens_details": {"reasoning_tokens": 0},
                "total_tokens": used["total_tokens"],
            },
        }


def _status(piece: Piece) -> str:
    return "completed" if piece.finish_reason == "stop" else "incomplete"


async def responses(request: Request) -> Response:
    """``POST /v1/responses``."""
    service, body = service_of(request), await read_json(request)
    call = await service.begin(request, read_response, body)
    reply = _Reply(service, call, body)
    if call.stream:
        return Stream(call, _events(reply), _error)
    (piece,) = await finished(request, call)
    return Json(reply.ended(piece))


async def input_tokens(request: Request) -> Response:
    """``POST /v1/responses/input_tokens``."""
    service, body = service_of(request), await read_json(request)
    asked = await service.prepare(read_response, service, body)
    return Json({"object": "response.input_tokens", "input_tokens": len(asked.prompts[0])})


def _error(error: ApiError) -> bytes:
    own = {"code": error.code or error.type, "message": error.message, "param": error.param}
    return event({"type": "error", **own}, "error")


async def _events(reply: _Reply) -> AsyncIterator[bytes]:
    n = 0

    def made(kind: str, **values: Any) -> bytes:
        nonlocal n
        n += 1
        return event({"type": kind, "sequence_number": n - 1, **values}, kind)

    item = {"output_index": 0}
    part = {"item_id": reply.item_id, "output_index": 0, "content_index": 0}
    yield made("response.created", response=reply.begun())
    yield made("response.in_progress", response=reply.begun())
    yield made("response.output_item.added", **item, item=reply.item(None))
    yield made("response.content_part.added", **part, part=reply.part(None))
    pieces: list[Piece] = []
    async for piece in ticking(reply.call):
        if piece is None:
            yield PING
            continue
        pieces.append(piece)
        if piece.content:
            logprobs = [entry.as_dict() for entry in piece.logprobs]
            own = {"delta": piece.content, "logprobs": logprobs}
            yield made("response.output_text.delta", **part, **own)
    whole = Piece.joined(pieces)
    told = reply.part(whole)
    done = {"text": told["text"], "logprobs": told["logprobs"]}
    yield made("response.output_text.done", **part, **done)
    yield made("response.content_part.done", **part, part=told)
    yield made("response.output_item.done", **item, item=reply.item(whole))
    yield made(f"response.{_status(whole)}", response=reply.ended(whole))
