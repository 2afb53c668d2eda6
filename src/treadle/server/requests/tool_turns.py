"""The answers of a model to one HTTP request, with calls of MCP servers' tools between them."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable, Mapping, Sequence
from typing import TYPE_CHECKING, Any

from treadle.server.http.api_errors import ApiError
from treadle.server.requests.http_responses import PING_S

if TYPE_CHECKING:
    from starlette.requests import Request as HttpRequest

    from treadle.chat.tools import ToolCall
    from treadle.mcp.session import ToolOutput
    from treadle.server.requests.generation_request import GenerationRequest
    from treadle.server.requests.kept_streams import KeptStream
    from treadle.server.requests.request_stream import RequestStream
    from treadle.server.requests.service import Service
    from treadle.server.requests.tool_servers import RequestedServers

Read = Callable[["Service", dict[str, Any]], "GenerationRequest"]


class ToolCallLoop:
    """The answers to one HTTP request, one stream after the other; the server runs tool calls
    between them. ``read(service, body)`` returns an answer's generation request. For the HTTP
    response the loop is one stream: its ``abort`` and ``close`` end the answer or the calls that
    run now.
    """

    def __init__(
        self, request: HttpRequest, service: Service, read: Read, servers: RequestedServers
    ) -> None:
        self.service = service
        self.servers = servers
        self.stream: RequestStream  # the current one, after the first ``begin``
        self.n_answers = 0
        self.usage: dict[str, Any] = {}  # of all answers but the last
        self._request = request
        self._read = read
        self._has_stream = False
        self._left = asyncio.Event()
        self._why: BaseException | None = None
        self.kept: KeptStream | None = None  # all answers, if they outlive the connection
        self.ids: set[str] = set()  # by which clients name the request
        service.tool_turns.add(self)

    @property
    def is_last(self) -> bool:
        """Whether the current answer is the last that the operator's bounds allow; it cannot call
        tools.
        """
        return self.n_answers >= self.servers.toolbox.bounds.rounds

    async def begin(self, body: dict[str, Any]) -> RequestStream:
        """Begin the next answer, to ``body``, and return its stream. Raises ApiError, and the error
        that was passed to ``abort``.
        """
        self._check()
        self.close()
        self.n_answers += 1
        if self.is_last:
            body = {**body, "tool_choice": "none"}
        begin = self.service.begin
        more = self.n_answers > 1
        self.stream = await begin(self._request, self._read, body, keep_stream=False, admitted=more)
        self._has_stream = True
        if self.n_answers == 1 and self.stream.is_streamed:
            try:
                self.kept = self.service.keep(self._request, self)
            except ApiError:
                self.close()
                raise
        self.stream.ids |= self.ids
        if self._why is not None:  # ended while the answer was being started
            self.stream.abort(self._why)
        return self.stream

    def _check(self) -> None:
        if self._why is not None:
            raise self._why

    async def call(self, calls: Sequence[ToolCall]) -> AsyncIterator[list[ToolOutput] | None]:
        """Run tool calls concurrently. Yield None each second, and at the end the results, in the
        order of ``calls``. Raises the error that was passed to ``abort``.
        """
        toolbox = self.servers.toolbox
        running = [asyncio.wrap_future(toolbox.submit(call.name, call.arguments)) for call in calls]
        left = asyncio.ensure_future(self._left.wait())
        try:
            while not all(each.done() for each in running):
                waited: set[asyncio.Future[Any]] = {left}
                waited |= {each for each in running if not each.done()}
                done, _ = await asyncio.wait(
                    waited, timeout=PING_S, return_when=asyncio.FIRST_COMPLETED
                )
                self._check()
                if not done:
                    yield None
            yield [each.result() for each in running]
        finally:
            left.cancel()
            for each in running:
                each.cancel()

    def abort(self, why: BaseException) -> None:
        """End the request, during an answer or a call; its iterators raise ``why``."""
        self._why = self._why or why
        self._left.set()
        if self._has_stream:
            self.stream.abort(why)

    def close(self) -> None:
        """Cancel the current answer if it is unfinished."""
        if self._has_stream:
            self.stream.close()

    def add_usage(self, used: Mapping[str, Any]) -> dict[str, Any]:
        """Add ``used``, the token counts of an answer in OpenAI's form, and return the sums of all
        answers.
        """
        self.usage = added(self.usage, used)
        return self.usage


def added(first: Mapping[str, Any], second: Mapping[str, Any]) -> dict[str, Any]:
    """Return the sums of counts in ``first`` and ``second`` by key, also within inner objects;
    values that are no counts are those of ``second``.
    """
    total = dict(first)
    for key, value in second.items():
        before = first.get(key)
        if isinstance(value, dict):
            total[key] = added(before if isinstance(before, dict) else {}, value)
        elif isinstance(value, int) and isinstance(before, int):
            total[key] = before + value
        else:
            total[key] = value
    return total
