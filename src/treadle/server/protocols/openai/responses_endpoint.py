"""The endpoint ``/v1/responses``, with tools of MCP servers: items of the types ``mcp_list_tools``,
``mcp_call`` and ``mcp_approval_request``.

A call that needs no approval runs here, and the model continues after its result. One that needs it
ends the response, and runs when the client's next request has its ``mcp_approval_response``.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from typing import TYPE_CHECKING, Any

from treadle.chat.tools import ToolCall
from treadle.mcp.toolbox import REFUSED
from treadle.server.http.api_errors import ApiError, GoneError
from treadle.server.http.body_fields import flag, text
from treadle.server.http.http_io import Json, Response, read_json, watched
from treadle.server.protocols.openai import responses as plain
from treadle.server.protocols.openai.answer import usage
from treadle.server.protocols.openai.response_items import gone, new_id, tool_error
from treadle.server.protocols.openai.response_tools import ClientTool
from treadle.server.requests.http_responses import PING, StreamedResponse, read_to_end
from treadle.server.requests.service import Service, service_of
from treadle.server.requests.tool_servers import RequestedServers, requested_servers
from treadle.server.requests.tool_turns import ToolCallLoop

if TYPE_CHECKING:
    from starlette.requests import Request as HttpRequest

    from treadle.mcp.session import ToolOutput
    from treadle.server.protocols.openai.responses import OutputItem, ResponseEvents
    from treadle.server.requests.request_stream import RequestStream, StreamPiece


async def responses(request: HttpRequest) -> Response:
    """``POST /v1/responses``, with or without tools of MCP servers."""
    service = service_of(request)
    body = await read_json(request)
    servers = await requested_servers(service, body)
    if servers is None:
        return await plain.respond(request, service, body)
    turns = ResponseToolLoop(request, service, servers, body)
    await turns.first()
    if turns.stream.is_streamed:
        told = plain.ResponseEvents(turns.reply)
        return StreamedResponse(turns, turns.events(told), told.failed)
    async with watched(request.receive, lambda: turns.abort(GoneError())):
        try:
            return Json(await turns.answer())
        finally:
            turns.close()


class ToolLoopResponse(plain.ResponseObject):
    """A response object made of several answers, whose token counts are added up."""

    def __init__(self, turns: ResponseToolLoop, body: dict[str, Any]) -> None:
        super().__init__(turns.service, turns.stream, body)
        self._turns = turns

    def total(self, used: dict[str, Any]) -> dict[str, Any]:
        """Return the token counts of all answers; ``used``: those of the last."""
        return self._turns.add_usage(used)


class ResponseToolLoop(ToolCallLoop):
    """The answers to one request of ``/v1/responses``, ``body``, with tools of MCP servers."""

    def __init__(
        self,
        request: HttpRequest,
        service: Service,
        servers: RequestedServers,
        body: dict[str, Any],
    ) -> None:
        super().__init__(request, service, plain.read_response, servers)
        functions = [
            {"type": "function", **tool.function["function"]} for tool in servers.tools.values()
        ]
        self._echoed = body
        self._body = {**body, "tools": [*servers.without_entries(body["tools"]), *functions]}
        choice = body.get("tool_choice")
        if isinstance(choice, dict) and choice.get("type") == "mcp":
            self._body["tool_choice"] = self._chosen(choice)
        self._inputs: list[dict[str, Any]] = []  # the client's, stored with the response
        self.reply: ToolLoopResponse

    def _chosen(self, choice: dict[str, Any]) -> dict[str, Any]:
        """Return a ``tool_choice`` of an MCP server, or of one of its tools, as a choice of
        functions. Raises ApiError.
        """
        label = choice.get("server_label")
        name = choice.get("name")
        names = [
            tool.name
            for tool in self.servers.tools.values()
            if tool.server == label and name in (None, tool.tool)
        ]
        if not names:
            message = f"tool_choice: no such tool of server {label!r:.80} is in tools"
            raise ApiError(400, message, param="tool_choice")
        functions = [{"type": "function", "name": each} for each in names]
        return {"type": "allowed_tools", "mode": "required", "tools": functions}

    async def first(self) -> None:
        """Run the calls that the client has approved, and begin the first answer. Raises ApiError
        before any call if the server cannot take a request now.
        """
        self.service.check_ready()
        listed = [] if self._was_listed() else [self._listing(label) for label in self._labels()]
        approved = await self._approved()
        await self._begin(approved)
        self.reply = ToolLoopResponse(self, self._echoed)
        self.reply.earlier = [*listed, *approved]
        self.stream.ids.add(self.reply.id)
        self.ids.add(self.reply.id)
        self._inputs = [
            item for item in self.stream.generation.more["inputs"] if item not in approved
        ]
        self._mark()

    def _labels(self) -> tuple[str, ...]:
        return self.servers.labels

    def _was_listed(self) -> bool:
        """Return whether the conversation already has an item ``mcp_list_tools``."""
        before = self._body.get("previous_response_id")
        found = self.service.responses.get(before) if isinstance(before, str) else None
        given = self._body.get("input")
        items = [*(found.items if found else ()), *(given if isinstance(given, list) else ())]
        kinds = [item.get("type") for item in items if isinstance(item, dict)]
        return "mcp_list_tools" in kinds

    def _listing(self, label: str) -> dict[str, Any]:
        kind = "mcp_list_tools"
        tools = self.servers.listing(label)
        return {
            "id": new_id(kind),
            "type": kind,
            "server_label": label,
            "tools": tools,
            "error": None,
        }

    async def _begin(self, added: list[dict[str, Any]]) -> RequestStream:
        """Add the output items ``added`` to the input, and begin an answer to it; return its
        stream.
        """
        if added:
            said = self._body.get("input")
            if isinstance(said, str):
                said = [{"role": "user", "content": said}]
            self._body = {**self._body, "input": [*(said or []), *added]}
        return await self.begin(self._body)

    def _mark(self) -> None:
        """Set in the current answer's request which functions are tools of MCP servers, and the
        input items to store.
        """
        more = self.stream.generation.more
        more["inputs"] = self._inputs
        more["known"] |= {
            name: ClientTool(tool.tool, server=tool.server, asks=name in self.servers.asking)
            for name, tool in self.servers.tools.items()
        }

    # -- approvals ------------------------------------------------------------------------------

    async def _approved(self) -> list[dict[str, Any]]:
        """Remove the ``mcp_approval_response`` items from the input. Run the approved calls; return
        them and the refused ones as items ``mcp_call``. Raises ApiError.
        """
        given = self._body.get("input")
        if not isinstance(given, list):
            return []
        kind = "mcp_approval_response"
        answers = [each for each in given if isinstance(each, dict) and each.get("type") == kind]
        if not answers:
            return []
        rest = [each for each in given if each not in answers]
        self._body = {**self._body, "input": rest}
        return list(await asyncio.gather(*(self._approve(each, rest) for each in answers)))

    async def _approve(self, answer: dict[str, Any], items: list[Any]) -> dict[str, Any]:
        """Return the item ``mcp_call`` for one approval response ``answer``: with the result of the
        call, or refused. ``items``: the other input items. Raises ApiError.
        """
        where = "input.approval_request_id"
        name = text(where, answer.get("approval_request_id"))
        allowed = flag("input.approve", answer.get("approve"))
        mine = (each for each in items if isinstance(each, dict) and each.get("id") == name)
        asked = next(mine, None) or self.service.responses.item(name)
        if asked is None or asked.get("type") != "mcp_approval_request":
            raise gone(where, name, "item_not_found")
        output: ToolOutput | None = None
        error: str | None = None if allowed else REFUSED
        if allowed:
            tool = next(
                (
                    each.name
                    for each in self.servers.tools.values()
                    if (each.server, each.tool) == (asked.get("server_label"), asked.get("name"))
                ),
                None,
            )
            if tool is None:
                raise ApiError(400, f"{where}: its tool is not in tools", param="input")
            call = ToolCall(name, tool, str(asked.get("arguments")))
            async for found in self.call([call]):
                output = found[0] if found else output
        if output is not None and output.is_error:
            error = output.text
        return {
            "id": new_id("mcp_call"),
            "type": "mcp_call",
            "status": "failed" if error else "completed",
            "server_label": asked.get("server_label"),
            "name": asked.get("name"),
            "arguments": asked.get("arguments"),
            "output": output.text if output is not None and error is None else None,
            "error": None if error is None else tool_error(error),
            "approval_request_id": name,
        }

    # -- answers --------------------------------------------------------------------------------

    def _running(self, piece: StreamPiece, items: list[OutputItem]) -> list[OutputItem]:
        """Return those of ``items``, the items of a finished answer, that are calls for the server
        to run now; none if ``piece``, its last, says that a limit cut the answer.
        """
        if piece.finish_reason != "stop":
            return []
        return [item for item in items if item.type == "mcp_call"]

    def _goes_on(self, items: list[OutputItem], running: list[OutputItem]) -> bool:
        """Return whether the model answers again: if all calls in ``items`` are ``running`` here,
        so that the client has none to answer.
        """
        calls = [item for item in items if item.call is not None]
        return bool(running) and len(calls) == len(running)

    async def _run(self, items: list[OutputItem]) -> AsyncIterator[None]:
        """Run the calls in ``items``, and set their results. Yields None each second meanwhile, for
        keep-alives.
        """
        calls = [item.call._replace(arguments=item.text) for item in items if item.call]
        async for found in self.call(calls):
            if found is None:
                yield None
                continue
            for item, output in zip(items, found, strict=True):
                item.output = None if output.is_error else output.text
                item.error = output.text if output.is_error else None

    async def _next(self, items: list[OutputItem]) -> None:
        """Begin the next answer, after the items of the last one."""
        self.add_usage(usage(self.stream))
        done = [item.as_dict("completed") for item in items]
        self.reply.earlier += done
        if self._body.get("tool_choice") is not None:
            self._body = {**self._body, "tool_choice": "auto"}  # a forced call would never end
        self._body.pop("continue_final_message", None)
        self.reply.stream = await self._begin(done)
        self._mark()

    async def answer(self) -> dict[str, Any]:
        """Run answers and calls until the last answer, and return the response object."""
        while True:
            (piece,) = await read_to_end(self.stream)
            items = plain.items_of(self.stream, piece)
            running = self._running(piece, items)
            if running:
                async for _ in self._run(running):
                    pass
            if not self._goes_on(items, running):
                return self.reply.ended(piece, items)
            await self._next(items)

    async def events(self, told: ResponseEvents) -> AsyncIterator[bytes]:
        """Yield the events of the response's stream: of all answers and of the calls between them.
        ``told`` makes and numbers them.
        """
        yield told.begun()
        for at, whole in enumerate(self.reply.earlier):
            yield told.event("response.output_item.added", output_index=at, item=whole)
            if whole["type"] == "mcp_list_tools":
                place = {"item_id": whole["id"], "output_index": at}
                yield told.event("response.mcp_list_tools.in_progress", **place)
                yield told.event("response.mcp_list_tools.completed", **place)
            yield told.event("response.output_item.done", output_index=at, item=whole)
        while True:
            async for part in plain.answer_events(told):
                yield part
            assert told.last is not None
            running = self._running(told.last, told.items)
            if running:
                async for _ in self._run(running):
                    yield PING
            status = plain.status_of(told.last)
            for item in told.items:
                if item.type == "mcp_call":
                    yield self._called(told, item, status)
            if not self._goes_on(told.items, running):
                yield told.ended(told.last)
                return
            await self._next(told.items)
            told.items = []

    def _called(self, told: ResponseEvents, item: OutputItem, status: str) -> bytes:
        """Return the events, numbered by ``told``, that end an item ``mcp_call``. ``status``: the
        item's.
        """
        place = {"item_id": item.id, "output_index": told.index(item)}
        kind = "completed" if item.output is not None else "failed"
        out = told.event(f"response.mcp_call.{kind}", **place)
        own = {"output_index": place["output_index"], "item": item.as_dict(status)}
        return out + told.event("response.output_item.done", **own)
