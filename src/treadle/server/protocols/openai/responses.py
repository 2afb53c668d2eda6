"""OpenAI's ``/v1/responses``: from a body to a generation request, and from output to response
objects and events. Clients reassemble streams by ``sequence_number`` of events, ``output_index`` of
items and ``content_index`` of parts.
"""

from __future__ import annotations

import secrets
import time
from collections.abc import AsyncIterator, Mapping, Sequence
from dataclasses import replace
from typing import TYPE_CHECKING, Any

from treadle.chat.tools import OutputPiece
from treadle.chat.tools.arguments import arguments_of
from treadle.server.http.api_errors import ApiError, named
from treadle.server.http.body_fields import (
    Table,
    array,
    flag,
    mapping,
    read_fields,
    refused,
    text,
    whole,
)
from treadle.server.http.http_io import Json, Response, event
from treadle.server.protocols.answer_fields import timings, warnings
from treadle.server.protocols.openai.answer import usage
from treadle.server.protocols.openai.chat import MAX_TOP
from treadle.server.protocols.openai.response_items import (
    calling,
    given_items,
    gone,
    in_turns,
    new_id,
    read_items,
    reasoning_message,
    sealed,
    tool_error,
)
from treadle.server.protocols.openai.response_tools import (
    ClientTool,
    chat_choice,
    read_response_tools,
    unserved,
)
from treadle.server.requests import ignored_fields as ignored
from treadle.server.requests.chat_prompt import read_conversation
from treadle.server.requests.generation_request import GenerationRequest, read_generation
from treadle.server.requests.http_responses import (
    PING,
    StreamedResponse,
    finished,
    pieces_with_pings,
)
from treadle.server.requests.ignored_fields import ignored_fields
from treadle.server.requests.request_stream import RequestStream, StreamPiece
from treadle.server.requests.response_store import StoredResponse
from treadle.server.requests.service import Service

if TYPE_CHECKING:
    from starlette.requests import Request as HttpRequest

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
    "return_progress": flag,
    "timings_per_token": flag,
    "truncation": refused("not supported: conversations are never truncated", "disabled", "auto"),
    "background": refused("not supported: responses do not run in the background", False),
    "conversation": refused("not supported: send the conversation's items as input"),
    "prompt": refused("not supported: prompts are not stored"),
}


NAMES = {
    "response_format": "text.format",
    "messages": "input",
    "reasoning_effort": "reasoning.effort",
    "tool_choice.allowed_tools": "tool_choice",
}


@named(NAMES)
def read_response(service: Service, body: dict[str, Any]) -> GenerationRequest:
    """Return the generation request of a body of ``/v1/responses``. Raises ApiError for invalid
    fields, TreadleError for settings out of range.
    """
    given = read_fields(body, FIELDS)
    form = given.get("text", {}).get("format")
    own: dict[str, Any] = {"response_format": form, "n": None, "stop": None, "max_tokens": None}
    generation = read_generation({**body, **own}, service.model, service.defaults)
    include = given.get("include", [])
    if "message.output_text.logprobs" in include:
        generation.settings["logprobs"] = given.get("top_logprobs", 0)
    before = _before(service, given)
    said = [] if body.get("input") is None and before is not None else body.get("input")
    items = given_items(said, service.responses)
    earlier = list(before.chat_messages) if before is not None else []
    goes_on = bool(body.get("continue_final_message"))
    chat_messages = in_turns(earlier + read_items(items), goes_on=goes_on)
    first = (
        [{"role": "system", "content": given["instructions"]}] if "instructions" in given else []
    )
    offered = read_response_tools(given.get("tools", []))
    chat = {
        "messages": first + chat_messages,
        "tools": offered.functions,
        "tool_choice": chat_choice(body.get("tool_choice"), offered),
        "parallel_tool_calls": body.get("parallel_tool_calls"),
        "reasoning_effort": given.get("reasoning", {}).get("effort"),
        "chat_template_kwargs": body.get("chat_template_kwargs"),
        "continue_final_message": body.get("continue_final_message"),
        "response_format": form,
    }
    read_conversation(chat, service, generation)
    told = (*offered.warnings, *generation.planned.warnings)
    generation.planned = replace(generation.planned, warnings=told)
    generation.ignored = _ignored(body, given)
    generation.progress = generation.is_streamed and given.get("return_progress", False)
    for kind in offered.left_out:
        service.warn_once(unserved(kind))
    generation.more = {
        "chat_messages": chat_messages,
        "inputs": [*(before.items if before is not None else []), *items],
        "keep": given.get("store", True),
        "known": offered.known,
        "seal": "reasoning.encrypted_content" in include,
        "timings_per_token": given.get("timings_per_token", False),
    }
    return generation


def _ignored(body: Mapping[str, Any], given: Mapping[str, Any]) -> list[str]:
    """Return warnings about fields of ``body`` without effect. ``given``: the fields of the body as
    ``read_fields`` returns them.
    """
    told = ignored_fields(body, ignored.RESPONSES)
    streamed = body.get("stream_options") or {}
    told += ignored_fields(streamed, ignored.STREAMED, "stream_options.")
    told += ignored_fields(given.get("text", {}), ignored.RESPONSES_TEXT, "text.")
    told += ignored_fields(given.get("reasoning", {}), ignored.RESPONSES_REASONING, "reasoning.")
    others = [each for each in given.get("include", []) if each not in ignored.INCLUDED]
    return told + [f"include: {each!r:.80} is not supported" for each in others]


def _before(service: Service, given: Mapping[str, Any]) -> StoredResponse | None:
    """Return the stored response that ``previous_response_id`` in the fields ``given`` names, None
    without this field. Raises ApiError if it is not stored.
    """
    name = given.get("previous_response_id")
    if name is None:
        return None
    found = service.responses.get(name)
    if found is None:
        raise gone("previous_response_id", name, "previous_response_not_found")
    return found


class OutputItem:
    """One output item: a message, reasoning or a tool call, which begins with ``part``. ``known``:
    the called function, as its client knows it. ``more``: the generation request's fields of this
    protocol: ``known`` (functions by name) and ``seal`` (whether reasoning gets
    ``encrypted_content``).
    """

    def __init__(self, part: OutputPiece, more: Mapping[str, Any]) -> None:
        self.kind = part.kind
        self.text = part.text
        self.call = part.call
        self.known: ClientTool = (
            ClientTool("") if part.call is None else more["known"][part.call.name]
        )
        self.seal: bool = more["seal"]
        self.logprobs: list[dict[str, Any]] = []
        types = {"content": "message", "reasoning": "reasoning", "call": "function_call"}
        self.type = "custom_tool_call" if self.known.custom else types[part.kind]
        if self.known.server is not None:
            self.type = "mcp_approval_request" if self.known.asks else "mcp_call"
        self.id = new_id(self.type)
        self.output: str | None = None  # of a call that the server has run
        self.error: str | None = None

    def part(self, text: str | None = None) -> dict[str, Any]:
        """Return the item's one content part, with ``text`` in place of the item's own text unless
        it is None.
        """
        said = self.text if text is None else text
        if self.kind == "reasoning":
            return {"type": "reasoning_text", "text": said}
        logprobs = self.logprobs if text is None else []
        return {"type": "output_text", "text": said, "annotations": [], "logprobs": logprobs}

    def as_dict(self, status: str, *, begins: bool = False) -> dict[str, Any]:
        """Return the item's JSON object, with ``status``: "in_progress", "completed" or
        "incomplete". ``begins``: the item is announced, without content yet.
        """
        head = {"id": self.id, "status": status, "type": self.type}
        if self.call is not None and self.known.server is not None:
            own = {"server_label": self.known.server, "name": self.known.name}
            own["arguments"] = "" if begins else self.text
            if self.known.asks:
                return {"id": self.id, "type": self.type, **own}
            error = None if self.error is None else tool_error(self.error)
            told = {"output": self.output, "error": error, "approval_request_id": None}
            ended = {"status": "failed"} if error else {}
            return {**head, **own, **told, **ended}
        if self.call is not None:
            said = "" if begins else self.arguments_text
            own = {"call_id": self.call.id, "name": self.known.name}
            if self.known.namespace is not None:
                own["namespace"] = self.known.namespace
            if self.known.custom:
                return {**head, **own, "input": said}
            return {**head, **own, "arguments": said}
        content = [] if begins else [self.part()]
        if self.kind == "reasoning":
            own = {"encrypted_content": sealed(self.text)} if self.seal and not begins else {}
            return {**head, "summary": [], "content": content, **own}
        return {**head, "role": "assistant", "content": content}

    @property
    def arguments_text(self) -> str:
        """Arguments of a call. For a custom tool the string in them, "" until they are complete."""
        if not self.known.custom:
            return self.text
        found = arguments_of(self.text).get("input", "")
        return found if isinstance(found, str) else ""

    def messages(self) -> list[dict[str, Any]]:
        """Return the item as chat messages: one; two for a call that the server has run; none for a
        call that the client has yet to approve.
        """
        if self.call is not None:
            called = calling(self.call.id, self.call.name, self.text)
            if self.known.server is None:
                return [called]
            said = self.output if self.output is not None else self.error or ""
            result = {"role": "tool", "tool_call_id": self.call.id, "content": said}
            return [] if self.known.asks else [called, result]
        if self.kind == "reasoning":
            return [reasoning_message(self.text)]
        return [{"role": "assistant", "content": self.text}]


class ResponseObject:
    """The response object of the request of ``stream``: its id, and the body fields that it
    repeats. ``earlier``: output items of the request's earlier answers.
    """

    def __init__(self, service: Service, stream: RequestStream, body: Mapping[str, Any]) -> None:
        self.service = service
        self.stream = stream
        self.id = f"resp_{secrets.token_hex(24)}"
        self.earlier: list[dict[str, Any]] = []  # output of earlier answers to the same request
        own = mapping("text", body.get("text") or {})
        form = own.get("format") or {"type": "text"}
        self._shared = {
            "id": self.id,
            "object": "response",
            "created_at": int(time.time()),
            "model": service.name,
            "error": None,
            "parallel_tool_calls": body.get("parallel_tool_calls") is not False,
            "previous_response_id": body.get("previous_response_id"),
            "reasoning": {"effort": None, "summary": None, **(body.get("reasoning") or {})},
            "store": body.get("store") is not False,
            "text": {**own, "format": form},
            "tool_choice": body.get("tool_choice") or "auto",
            "tools": body.get("tools") or [],
            "truncation": "disabled",
            **{name: body.get(name) for name in ECHOED},
        }

    def total(self, used: dict[str, Any]) -> dict[str, Any]:
        """Return the token counts of the whole response; ``used``: those of the last answer, which
        here is the only one.
        """
        return used

    def begun(self) -> dict[str, Any]:
        """Return the object with status "in_progress" and no output."""
        none: dict[str, Any] = {"incomplete_details": None, "output": [], "usage": None}
        return {**self._shared, "status": "in_progress", **none}

    def failed(self, error: ApiError, items: Sequence[OutputItem]) -> dict[str, Any]:
        """Return the object with status "failed", the error, and the output so far; ``items``:
        those of the current answer.
        """
        output = [*self.earlier, *(item.as_dict("incomplete") for item in items)]
        why = {"code": "server_error", "message": error.message}
        return {**self.begun(), "status": "failed", "error": why, "output": output}

    def ended(self, piece: StreamPiece, items: Sequence[OutputItem]) -> dict[str, Any]:
        """Return the object of the finished response, and store it unless the request says ``store:
        false``. ``piece``: the last piece of the output; ``items``: the output items of the model's
        last answer, which follow those of the earlier answers.
        """
        more = self.stream.generation.more
        used = self.total(usage(self.stream))
        media: dict[str, Any] = {key: used[key] for key in ("images", "sounds") if key in used}
        done = status_of(piece) == "completed"
        whole: dict[str, Any] = {
            **self._shared,
            "status": status_of(piece),
            "incomplete_details": None if done else {"reason": "max_output_tokens"},
            "output": [*self.earlier, *(item.as_dict(status_of(piece)) for item in items)],
            **warnings(self.stream),
            "usage": {
                "input_tokens": used["prompt_tokens"],
                "input_tokens_details": {**used["prompt_tokens_details"], "cache_write_tokens": 0},
                "output_tokens": used["completion_tokens"],
                "output_tokens_details": used["completion_tokens_details"],
                "total_tokens": used["total_tokens"],
                **media,
            },
            "timings": timings(piece.output),
        }
        if more["keep"]:
            chat_messages = [
                *more["chat_messages"],
                *(each for item in items for each in item.messages()),
            ]
            self.service.responses.keep(
                self.id, StoredResponse(chat_messages, more["inputs"], whole)
            )
        return whole


def status_of(piece: StreamPiece) -> str:
    """Return the status of a response that ends with ``piece``: "completed", or "incomplete" at a
    limit.
    """
    return "completed" if piece.finish_reason == "stop" else "incomplete"


async def respond(request: HttpRequest, service: Service, body: dict[str, Any]) -> Response:
    """Return the response to ``POST /v1/responses``, whole or as a stream."""
    stream = await service.begin(request, read_response, body)
    reply = ResponseObject(service, stream, body)
    stream.ids.add(reply.id)
    if stream.is_streamed:
        told = ResponseEvents(reply)
        return StreamedResponse(stream, _events(told), told.failed)
    (piece,) = await finished(request, stream)
    return Json(reply.ended(piece, items_of(stream, piece)))


def items_of(stream: RequestStream, piece: StreamPiece) -> list[OutputItem]:
    """Return the output items of an answer; ``piece``: the whole output of ``stream``."""
    items: list[OutputItem] = []
    for part in piece.parsed_parts():
        if part.kind == "arguments":
            items[-1].text = part.text
        else:
            items.append(OutputItem(part, stream.generation.more))
    said = next((item for item in items if item.kind == "content"), None)
    if said is not None:
        said.logprobs = [entry.as_dict() for entry in piece.logprobs]
    return items


class ResponseEvents:
    """The events of one streamed response, ``reply``, numbered in order. ``items``: those of the
    current answer, of which the last may be open: more of its content may come.
    """

    def __init__(self, reply: ResponseObject) -> None:
        self.reply = reply
        self.items = list[OutputItem]()
        self._n = 0
        self.logprobs: list[dict[str, Any]] = []  # of held-back tokens, or not of content
        self.last: StreamPiece | None = None  # of the answer

    def event(self, kind: str, **values: Any) -> bytes:
        """Return the next event, of type ``kind``, with its number."""
        self._n += 1
        return event({"type": kind, "sequence_number": self._n - 1, **values}, kind)

    def index(self, item: OutputItem) -> int:
        """Return the index of an item in the whole output (``output_index``)."""
        return len(self.reply.earlier) + self.items.index(item)

    @property
    def _place(self) -> dict[str, Any]:
        item = self.items[-1]
        at = self.index(item)
        inner = {} if item.call is not None else {"content_index": 0}
        return {"item_id": item.id, "output_index": at, **inner}

    def part_events(self, part: OutputPiece) -> bytes:
        """Return the events for a part of the output, which belongs to the open item or begins a
        new one.
        """
        out = b""
        if part.call is not None:
            return self.closed("completed") + self._opened(part)
        if part.kind != "arguments" and (not self.items or self.items[-1].kind != part.kind):
            out = self.closed("completed") + self._opened(part)
        else:
            self.items[-1].text += part.text
        item = self.items[-1]
        place = self._place
        if item.known.custom or item.known.asks:  # sent when it is complete
            return out
        if item.call is not None:
            kind = f"response.{item.type}_arguments.delta"
            return out + self.event(kind, **place, delta=part.text)
        if item.kind == "reasoning":
            return out + self.event("response.reasoning_text.delta", **place, delta=part.text)
        logprobs = self._take_logprobs()
        place |= {"delta": part.text, "logprobs": logprobs}
        if self.reply.stream.generation.more["timings_per_token"]:
            place["timings"] = timings(self.reply.stream.outputs[0])
        return out + self.event("response.output_text.delta", **place)

    def _take_logprobs(self) -> list[dict[str, Any]]:
        """Move the log-probabilities not yet sent to the open item, and return them, in OpenAI's
        form.
        """
        taken = self.logprobs
        self.logprobs = []
        self.items[-1].logprobs += taken
        return taken

    def _opened(self, part: OutputPiece) -> bytes:
        item = OutputItem(part, self.reply.stream.generation.more)
        self.items.append(item)
        at = self.index(item)
        shown = item.as_dict("in_progress", begins=True)
        out = self.event("response.output_item.added", output_index=at, item=shown)
        if item.call is None:
            own = {**self._place, "part": item.part("")}
            out += self.event("response.content_part.added", **own)
        elif item.type == "mcp_call":
            place = {"item_id": item.id, "output_index": at}
            out += self.event("response.mcp_call.in_progress", **place)
        return out

    def closed(self, status: str) -> bytes:
        """Return the events that end the open item; b"" if there is none. ``status``: of the
        item.
        """
        if not self.items:
            return b""
        item = self.items[-1]
        place = self._place
        if item.known.custom:
            kind = "response.custom_tool_call_input"
            out = self.event(f"{kind}.delta", **place, delta=item.arguments_text)
            out += self.event(f"{kind}.done", **place, input=item.arguments_text)
        elif item.known.asks:
            out = b""
        elif item.call is not None:
            own = {"name": item.known.name, "arguments": item.text}
            out = self.event(f"response.{item.type}_arguments.done", **place, **own)
        else:
            content = item.kind == "content"
            if content:
                self._take_logprobs()
            kind = "output_text" if content else "reasoning_text"
            told = {**place, "text": item.text}
            if content:
                told["logprobs"] = item.logprobs
            out = self.event(f"response.{kind}.done", **told)
            out += self.event("response.content_part.done", **place, part=item.part())
        if item.type == "mcp_call":  # its last events follow its result
            return out
        at = self.index(item)
        shown = item.as_dict(status)
        return out + self.event("response.output_item.done", output_index=at, item=shown)

    def begun(self) -> bytes:
        """Return the first events of the stream: ``response.created`` and
        ``response.in_progress``.
        """
        whole = self.reply.begun()
        created = self.event("response.created", response=whole)
        return created + self.event("response.in_progress", response=whole)

    def ended(self, piece: StreamPiece) -> bytes:
        """Return the last event of the stream; ``piece``: the last of the answer."""
        whole = self.reply.ended(piece, self.items)
        spent = whole["timings"]
        return self.event(f"response.{status_of(piece)}", response=whole, timings=spent)

    def failed(self, error: ApiError) -> bytes:
        """Return the last events after an error, ``error`` and ``response.failed``: clients read
        one or the other.
        """
        own = {"code": error.code or error.type, "message": error.message, "param": error.param}
        whole = self.reply.failed(error, self.items)
        return self.event("error", **own) + self.event("response.failed", response=whole)


async def _events(told: ResponseEvents) -> AsyncIterator[bytes]:
    yield told.begun()
    async for part in answer_events(told):
        yield part
    assert told.last is not None
    yield told.ended(told.last)


async def answer_events(told: ResponseEvents) -> AsyncIterator[bytes]:
    """Yield the events of one answer, which ``told`` makes and numbers; afterwards ``told.last`` is
    the answer's last piece.
    """
    reply = told.reply
    async for piece in pieces_with_pings(reply.stream):
        if piece is None:
            yield PING
            continue
        if piece.progress is not None:
            now = piece.progress.as_dict(reply.stream.arrival_s)
            yield told.event("response.in_progress", response=reply.begun(), prompt_progress=now)
            continue
        told.logprobs += [entry.as_dict() for entry in piece.logprobs]
        for part in piece.parsed_parts():
            yield told.part_events(part)
        if piece.finish_reason is not None:
            yield told.closed(status_of(piece))
            told.last = piece
