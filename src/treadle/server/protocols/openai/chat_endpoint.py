"""The endpoint ``/v1/chat/completions``. If a request has tools of MCP servers, the server runs
their calls, and lets the model answer again.

Calls that the client must approve, and calls in one answer with calls of the client's own
functions, are returned to the client like any other; ``/v1/mcp/call`` runs the former.
"""

from __future__ import annotations

import secrets
from collections.abc import AsyncIterator, Iterator
from dataclasses import replace
from typing import TYPE_CHECKING, Any

from treadle.chat.tools import OutputPiece, ParsedOutput, ToolCall
from treadle.chat.tools.openai_objects import delta_of, message_of
from treadle.server.http.api_errors import ApiError, GoneError
from treadle.server.http.http_io import Json, Response, event, read_json, watched
from treadle.server.protocols.answer_fields import timings, warnings
from treadle.server.protocols.openai import chat
from treadle.server.protocols.openai.answer import error_event, head, usage
from treadle.server.requests.http_responses import (
    DONE,
    PING,
    StreamedResponse,
    pieces_with_pings,
    read_to_end,
)
from treadle.server.requests.service import Service, service_of
from treadle.server.requests.tool_servers import RequestedServers, requested_servers
from treadle.server.requests.tool_turns import ToolCallLoop

if TYPE_CHECKING:
    from starlette.requests import Request as HttpRequest

    from treadle.mcp.session import ToolOutput
    from treadle.server.requests.request_stream import StreamPiece


async def chat_completions(request: HttpRequest) -> Response:
    """``POST /v1/chat/completions``, with or without tools of MCP servers."""
    service = service_of(request)
    body = await read_json(request)
    servers = await requested_servers(service, body)
    if servers is None:
        return await chat.respond(request, service, body)
    if body.get("n") not in (None, 1):
        raise ApiError(400, "n: only 1 with tools of MCP servers", param="n")
    others = servers.without_entries(body["tools"])
    body["tools"] = [*others, *(tool.function for tool in servers.tools.values())]
    turns = ChatToolLoop(request, service, servers, body)
    await turns.begin(body)
    if turns.stream.is_streamed:
        return StreamedResponse(turns, turns.events(), error_event)
    async with watched(request.receive, lambda: turns.abort(GoneError())):
        try:
            return Json(await turns.answer())
        finally:
            turns.close()


class ChatToolLoop(ToolCallLoop):
    """The answers to one chat request, ``body``, with tools of MCP servers. ``added``: chat
    messages so far of the calls that the server ran, and of their results.
    """

    def __init__(
        self,
        request: HttpRequest,
        service: Service,
        servers: RequestedServers,
        body: dict[str, Any],
    ) -> None:
        super().__init__(request, service, chat.read_chat, servers)
        self.id = f"chatcmpl-{secrets.token_hex(16)}"
        self.ids.add(self.id)
        self.added: list[dict[str, Any]] = []
        self._body = body

    def runs(self, piece: StreamPiece, told: ParsedOutput) -> bool:
        """Return whether the server runs all calls of an answer, so that the model answers again.
        ``piece``: the last of the answer, ``told``: its parsed output.
        """
        names = [call.name for call in told.calls]
        return bool(names) and piece.finish_reason == "stop" and self.servers.is_free(names)

    async def go_on(self, told: ParsedOutput, outputs: list[ToolOutput]) -> None:
        """Begin the next answer: to the conversation, followed by the last answer ``told``, with
        its calls, and their results ``outputs``.
        """
        self.add_usage(usage(self.stream))
        self.added.append(message_of(told))
        for call, output in zip(told.calls, outputs, strict=True):
            result = {"role": "tool", "tool_call_id": call.id, "content": output.text}
            self.added.append(result)
        body = {**self._body, "messages": [*self._body["messages"], *self.added]}
        body.pop("continue_final_message", None)
        if body.get("tool_choice") is not None:
            body["tool_choice"] = "auto"  # a forced call would never end
        await self.begin(body)

    @property
    def more(self) -> dict[str, Any]:
        """The field ``mcp_messages``: messages of calls and results, for the client's history; {}
        without any.
        """
        return {"mcp_messages": self.added} if self.added else {}

    async def answer(self) -> dict[str, Any]:
        """Run answers and calls until the last answer, and return its response body."""
        while True:
            (piece,) = await read_to_end(self.stream)
            parts = piece.parsed_parts()
            told = ParsedOutput.of(parts)
            if not self.runs(piece, told):
                break
            outputs: list[ToolOutput] = []
            async for found in self.call(told.calls):
                outputs = outputs if found is None else found
            await self.go_on(told, outputs)
        made = chat.answer_of(self.service, self.stream, [piece], [parts], self.id)
        return {**made, "usage": self.add_usage(made["usage"]), **self.more}

    async def events(self) -> AsyncIterator[bytes]:
        """Yield the events of a stream: text of all answers, and an event before and after each
        call.
        """
        shared = head(self.service, "chat.completion.chunk", self.id)

        def chunk(delta: dict[str, Any], **more: Any) -> bytes:
            choice = {"index": 0, "delta": delta, "logprobs": None, "finish_reason": None}
            return event({**shared, "choices": [choice], **more})

        yield chunk({"role": "assistant", "content": None})
        while True:
            held: list[OutputPiece] = []
            texts: list[OutputPiece] = []
            last: StreamPiece | None = None
            async for piece in pieces_with_pings(self.stream):
                if piece is None:
                    yield PING
                    continue
                if piece.progress is not None:
                    told = piece.progress.as_dict(self.stream.arrival_s)
                    yield chunk({}, prompt_progress=told)
                    continue
                for each in self._deltas(piece, texts, held):
                    yield event({**shared, "choices": [each]})
                last = piece
            assert last is not None
            answer = ParsedOutput.of([*texts, *held])
            if not self.runs(last, answer):
                break
            for call in answer.calls:
                yield chunk({"mcp_call": self._shown(call)})
            outputs: list[ToolOutput] = []
            async for found in self.call(answer.calls):
                if found is None:
                    yield PING
                else:
                    outputs = found
            for call, output in zip(answer.calls, outputs, strict=True):
                result = {"id": call.id, "output": output.text, "is_error": output.is_error}
                yield chunk({"mcp_call": result})
            await self.go_on(answer, outputs)
        for part in held:
            yield chunk(delta_of(part))
        end = chat.choice_of(last, {"delta": {}})
        shown = {"timings": timings(last.output), **warnings(self.stream), **self.more}
        yield event({**shared, "choices": [end], **shown})
        if self.stream.generation.more["include_usage"]:
            used = self.add_usage(usage(self.stream))
            told = {"usage": used, "timings": timings(last.output)}
            yield event({**shared, "choices": [], **told})
        yield DONE

    def _deltas(
        self, piece: StreamPiece, texts: list[OutputPiece], held: list[OutputPiece]
    ) -> Iterator[dict[str, Any]]:
        """Yield an object for ``choices`` for each part of text in ``piece``. Text parts are added
        to ``texts``, parts of calls to ``held``: only at the end of the answer is it clear who runs
        the calls.
        """
        parsed_parts = piece.parsed_parts()
        piece = replace(piece, finish_reason=None)
        for part in parsed_parts:
            if part.kind in ("call", "arguments"):
                held.append(part)
                continue
            texts.append(part)
            for each in chat.kept(self.stream, [part]):
                yield chat.choice_of(piece, {"delta": delta_of(each)})
                piece = replace(piece, logprobs=[])  # sent once

    def _shown(self, call: ToolCall) -> dict[str, Any]:
        """Return the object ``mcp_call`` that a stream shows before ``call`` runs: its id, server,
        tool and arguments.
        """
        tool = self.servers.tools[call.name]
        own = {"id": call.id, "server_label": tool.server, "name": tool.tool}
        return {**own, "arguments": call.arguments}
